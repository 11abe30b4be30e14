"""What makes up a logit, drawn from the parts' table: bars of components, a grid of heads, words coloured by their part.

Bars to the right (blue) are for the target, to the left (red) against it, or for the other token where a difference of
two logits was split. Parts that are not drawn are one bar, so that the bars always sum to the logit.
Beware: a bar is a direct part alone; what taking the component out would do is another number.
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from microtome.figures.head_map import head_map
from microtome.figures.theme import BLUE, DIVERGING, DIVERGING_ON_DARK, GREY, LIGHT, NULL, plain, symmetric_range

_BAR_PIXELS = 20
_STRIP_CHARACTERS = 96


def attribution_bars(
    table: pd.DataFrame, *, row: int = 0, largest: int = 20, order: str = "size", title: str | None = None
) -> go.Figure:
    """Horizontal bars of one logit's parts.

    table: parts, with columns component, value, and row, layer, head, neuron, source, source_token where they are.
    row: which logit. largest: how many bars; the rest is summed in one. order: "size" (largest on top), "value" (most
    positive on top) or "layer" (the model's first part on top).
    Raises ValueError for another order, no bars, or a row that the table lacks; KeyError for a missing column.
    """
    if order not in ("size", "value", "layer"):
        raise ValueError(f"order={order!r}; give 'size', 'value' or 'layer'.")
    if largest < 1:
        raise ValueError(f"largest={largest}: give at least one bar.")
    parts = _of_row(table, row)
    total = float(parts["value"].sum())
    parts = parts.assign(name=[_name(part) for _, part in parts.iterrows()], place=np.arange(len(parts)))
    parts = parts.iloc[np.argsort(-parts["value"].abs().to_numpy(), kind="stable")]
    shown, rest = parts.iloc[:largest], parts.iloc[largest:]
    if order == "value":
        shown = shown.sort_values("value", ascending=False, kind="stable")
    elif order == "layer":
        shown = shown.sort_values(["layer", "place"], na_position="first", kind="stable", key=_layers)
    names, values = list(shown["name"]), list(shown["value"])
    if len(rest):
        names.append(f"{len(rest)} other parts")
        values.append(float(rest["value"].sum()))
    names.append("sum")
    values.append(total)
    colours = [BLUE if value >= 0 else NULL for value in values]
    colours[-1] = GREY
    if len(rest):
        colours[-2] = GREY
    figure = go.Figure(
        go.Bar(
            x=values,
            y=list(range(len(values))),
            orientation="h",
            marker={"color": colours},
            text=[f"{value:+.2f}" for value in values],
            textposition="outside",
            cliponaxis=False,
            hovertext=[f"<b>{name}</b>  {value:+.4f}" for name, value in zip(names, values, strict=True)],
            hoverinfo="text",
        )
    )
    low, high = min(0.0, *values), max(0.0, *values)
    room = 0.12 * (high - low or 1.0)
    figure.update_layout(
        template=LIGHT,
        title={"text": title if title is not None else "parts of the logit"},
        height=_BAR_PIXELS * len(values) + 110,
        bargap=0.25,
        showlegend=False,
        xaxis={"title": {"text": "logits"}, "range": [low - (room if low < 0 else 0), high + room], "zeroline": True},
        yaxis={
            "tickvals": list(range(len(names))),
            "ticktext": names,
            "range": [len(names) - 0.4, -0.6],
            "showgrid": False,
            "ticks": "",
        },
    )
    return figure


def attribution_heads(
    table: pd.DataFrame, *, row: int = 0, layers_on: str = "x", title: str | None = None
) -> go.Figure:
    """Grid of heads: each head's part of one logit, blue for the target, red against it.

    table: parts with columns component, layer, head, value; those of one head (its source tokens) are summed.
    Raises ValueError where no part has a head.
    """
    parts = _of_row(table, row)
    parts = parts[parts["head"].notna()] if "head" in parts.columns else parts.iloc[:0]
    if parts.empty:
        raise ValueError("no part has a head. Split by 'head' or finer, or draw attribution_bars.")
    heads = parts.groupby(["layer", "head"], as_index=False)["value"].sum().assign(kind="z")
    figure = head_map(heads, value="value", kind="z", layers_on=layers_on, title=title or "each head's part, logits")
    low, high = symmetric_range(heads["value"].tolist(), 0.0)
    figure.update_layout(
        coloraxis={"colorscale": DIVERGING, "cmin": low, "cmax": high},
        meta={"colorscale_on_dark": DIVERGING_ON_DARK},
    )
    return figure


def attribution_tokens(table: pd.DataFrame, *, row: int = 0, title: str | None = None) -> go.Figure:
    """The text, each token coloured by what heads brought from it to one logit; longer texts run over lines.

    table: parts by token, with columns source, source_token and value.
    Raises ValueError where no part has a source token.
    """
    parts = _of_row(table, row)
    parts = parts[parts["source"].notna()] if "source" in parts.columns else parts.iloc[:0]
    if parts.empty:
        raise ValueError("no part has a source token. Split by 'token'.")
    tokens = parts.groupby("source", as_index=False).agg(token=("source_token", "first"), value=("value", "sum"))
    low, high = symmetric_range(tokens["value"].tolist(), 0.0)
    left, line, boxes = 0, 0, []
    for token in tokens.itertuples():
        text = str(token.token).replace("\n", "⏎").strip() or "␣"
        width = max(len(text), 5) + 2
        if left and left + width > _STRIP_CHARACTERS:
            left, line = 0, line + 1
        boxes.append((left, line, width, text, float(token.value)))
        left += width
    right = max(box[0] + box[2] for box in boxes)
    figure = go.Figure(
        go.Scatter(
            x=[x + width / 2 for x, _, width, _, _ in boxes],
            y=[y for _, y, _, _, _ in boxes],
            mode="text",
            text=[f"{plain(text)}<br><span style='font-size:10px'>{value:+.2f}</span>" for *_, text, value in boxes],
            textfont={"color": [_ink(value, high) for *_, value in boxes]},
            hovertext=[
                f"<b>{plain(text)}</b> (position {source})  {value:+.4f}"
                for (*_, text, value), source in zip(boxes, tokens["source"], strict=True)
            ],
            hoverinfo="text",
            showlegend=False,
        )
    )
    for x, y, width, _, value in boxes:
        figure.add_shape(
            type="rect",
            x0=x + 0.1,
            x1=x + width - 0.1,
            y0=y - 0.46,
            y1=y + 0.46,
            layer="below",
            line={"width": 0},
            fillcolor=_shade(value, high),
        )
    hidden = {"visible": False, "fixedrange": True}
    figure.update_layout(
        template=LIGHT,
        title={"text": title if title is not None else "what heads brought from each token, logits"},
        height=44 * (line + 1) + 70,
        margin={"l": 8, "r": 8, "t": 48, "b": 8},
        xaxis=hidden | {"range": [-0.5, max(right, 40) + 0.5]},
        yaxis=hidden | {"range": [line + 0.55, -0.55]},
    )
    return figure


def _of_row(table: pd.DataFrame, row: int) -> pd.DataFrame:
    if missing := [name for name in ("component", "value") if name not in table.columns]:
        raise KeyError(f"the table has no column {missing}; it has {list(table.columns)}. Pass a table of parts.")
    parts = table if "row" not in table.columns else table[table["row"] == row]
    if parts.empty:
        raise ValueError(f"the table has no row {row}; it has {sorted(set(table.get('row', [])))}.")
    return parts


def _layers(values: pd.Series) -> pd.Series:
    """Layers as numbers; what belongs to no layer and comes before the first one is missing."""
    return values.astype("Float64") if values.name == "layer" else values


def _name(part: pd.Series) -> str:
    """`L23H4`, `L23H4 ← France`, `MLP 28`, `L27 neuron 800`, `embed`."""

    def has(name: str) -> bool:
        return name in part.index and not pd.isna(part[name])

    component = str(part["component"])
    if has("head"):
        name = f"L{int(part['layer'])}H{int(part['head'])}"
        if has("source"):
            word = str(part["source_token"]).replace("\n", "⏎").strip() or "␣"
            name += f" ← {plain(word)}"
        return name
    if has("neuron"):
        return f"L{int(part['layer'])} neuron {int(part['neuron'])}"
    if not has("layer"):
        return plain(component)
    shown = {"mlp": "MLP", "attention": "attention"}.get(component, component.replace("mlp", "MLP"))
    return f"L{int(part['layer'])} {plain(shown)}"


def _shade(value: float, reach: float) -> str:
    red, green, blue = (33, 102, 172) if value >= 0 else (178, 24, 43)
    return f"rgba({red},{green},{blue},{0.08 + 0.8 * min(abs(value) / reach, 1.0):.3f})"


def _ink(value: float, reach: float) -> str:
    return "#ffffff" if abs(value) > 0.55 * reach else "#1f2328"

"""What each head of a layer says in words, beside how far its peers predict it and what the lens loses without it.

One row per head: a bar for peer R2 (the share of the head that the layer's other heads predict: a lens cannot say
whose the words of that share are), a bar for the KL that the lens loses when the head is taken out (nats), the lens's
words, and the words of the plain unembedding of the head. Heads whose peers predict half or more of them are orange.
"""

import textwrap

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from microtome.figures.theme import BLUE, GREY, LIGHT, ORANGE, plain

_ROW_PIXELS = 44
_SHARED = 0.5
_CAVEAT = (
    "peer R² is the share of a head that the layer's other heads predict; a lens cannot say whose the words of that "
    f"share are (orange: {_SHARED:.0%} and more)"
)


def head_words(
    table: pd.DataFrame, *, wrap: int = 44, lines: int = 2, sort_by: str = "head", title: str | None = None
) -> go.Figure:
    """Table figure of heads by words.

    Args:
        table: columns head, peer_r2, words and, where they are there, drop_kl (or kl, of lenses of single heads),
            plain_words and layer: the scores of an attention lens, `scores.to_frame(model)`.
        wrap, lines: characters of a line of words, and lines of a head; what does not fit ends in "…".
        sort_by: "head", or "drop_kl" to have the heads that matter most on top.

    Raises:
        KeyError: a column is missing.
        ValueError: an empty table, a head twice, another order.
    """
    if missing := [name for name in ("head", "peer_r2", "words") if name not in table.columns]:
        raise KeyError(f"the table has no column {missing}; it has {list(table.columns)}. Pass scores.to_frame(model).")
    if table.empty or table["head"].duplicated().any():
        raise ValueError("give one row per head of one layer; the table is empty or names a head twice.")
    loss = next((name for name in ("drop_kl", "kl") if name in table.columns and table[name].notna().any()), None)
    if sort_by not in ("head", "drop_kl") or (sort_by == "drop_kl" and loss != "drop_kl"):
        raise ValueError(f"sort_by={sort_by!r}. Give 'head', or 'drop_kl' for a table that has it.")
    table = table.sort_values(sort_by, ascending=sort_by == "head", kind="stable")
    columns = ["peer R²", *([] if loss is None else [_LOSS[loss]]), "lens"]
    columns += ["plain unembedding"] if "plain_words" in table.columns else []
    widths = [0.13 if name in ("peer R²", *_LOSS.values()) else 1.0 for name in columns]
    texts = sum(width == 1.0 for width in widths)
    bars = len(widths) - texts
    widths = [0.13 if width < 1 else (1 - 0.13 * bars) / texts for width in widths]
    figure = make_subplots(
        cols=len(columns), shared_yaxes=True, column_widths=widths, horizontal_spacing=0.015, column_titles=columns
    )
    rows = np.arange(len(table))
    r2 = table["peer_r2"].to_numpy(dtype=float)
    colours = [ORANGE if value >= _SHARED else BLUE for value in r2]
    _add_bars(figure, 1, rows, r2, colours, [0.0, 1.0])
    if loss is not None:
        values = table[loss].to_numpy(dtype=float)
        reach = float(np.nanmax(np.abs(values))) or 1.0
        low = min(0.0, float(np.nanmin(values)))
        _add_bars(figure, 2, rows, values, [GREY] * len(rows), [low, reach])
    for place, name in enumerate(("words", "plain_words")[:texts], start=bars + 1):
        whole = [plain(words) for words in table[name]]
        figure.add_scatter(
            x=[0.0] * len(rows),
            y=rows,
            text=[_wrapped(words, wrap, lines) for words in table[name]],
            mode="text",
            textposition="middle right",
            textfont={"size": 12} | ({"color": GREY} if name == "plain_words" else {}),
            hovertext=[f"head {head}<br>{words}" for head, words in zip(table["head"], whole, strict=True)],
            hoverinfo="text",
            cliponaxis=False,
            row=1,
            col=place,
        )
        figure.update_xaxes(range=[0, 1], visible=False, col=place)
    figure.update_yaxes(
        tickvals=rows.tolist(),
        ticktext=[f"head {head}" for head in table["head"]],
        range=[len(rows) - 0.5, -0.5],
        showline=False,
        showgrid=False,
        ticks="",
        ticksuffix="  ",
        tickfont={"size": 13},
    )
    layer = f", layer {table['layer'].iloc[0]}" if "layer" in table.columns else ""
    figure.update_layout(
        template=LIGHT,
        title={"text": title if title is not None else f"What each head says{layer}", "y": 1, "yref": "container"}
        | {"pad": {"t": 14}, "yanchor": "top"},
        height=_ROW_PIXELS * len(rows) + 124,
        margin={"t": 72, "b": 52, "r": 12, "l": 60},
        showlegend=False,
        bargap=0.45,
    )
    for place, note in enumerate(figure.layout.annotations, start=1):
        # titles begin where bars and text do
        axis = figure.layout["xaxis" if place == 1 else f"xaxis{place}"]
        note.update(x=axis.domain[0], xanchor="left", font={"size": 13})
    figure.add_annotation(
        text="<br>".join(textwrap.wrap(_CAVEAT, 130)),
        **{"xref": "paper", "yref": "paper", "x": 0, "y": 0, "yshift": -14, "xanchor": "left", "yanchor": "top"},
        **{"showarrow": False, "align": "left", "font": {"size": 12}},
    )
    return figure


_LOSS = {"drop_kl": "KL lost, nats", "kl": "KL alone, nats"}


def _add_bars(
    figure: go.Figure, column: int, rows: np.ndarray, values: np.ndarray, colours: list[str], span: list[float]
) -> None:
    figure.add_bar(
        x=np.clip(values, *span),
        y=rows,
        orientation="h",
        marker={"color": colours},
        text=["" if np.isnan(value) else f"{value:.2f}" for value in values],
        textposition="outside",
        cliponaxis=False,
        hoverinfo="skip",
        row=1,
        col=column,
    )
    width = span[1] - span[0]
    figure.update_xaxes(range=[span[0], span[1] + 0.55 * width], visible=False, row=1, col=column)


def _wrapped(words: str, width: int, lines: int) -> str:
    shown = textwrap.wrap(str(words), width, break_long_words=True, max_lines=lines, placeholder=" …") or ["–"]
    return "<br>".join(plain(line) for line in shown)

"""Head roles as a grid, layers across and heads down: a colour and a letter for each role, all scores on hover.

    head_role_grid(table)         the grid
    head_score_maps(table)        a small map per score, one colour scale, the threshold's heads ringed

Both are drawn from the table of `microtome.lenses.head_roles` alone. A letter tells a role where colours cannot be
told apart; a cell with several roles shows the letters of all. The colour is that of the most telling one.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from microtome.figures.theme import BLUE, GREEN, GREY, LIGHT, ORANGE, PINK, SEQUENTIAL, plain

# role to letter and colour; a table may have roles that are not here, which are grey with their first letter
ROLES: Mapping[str, tuple[str, str]] = {
    "induction": ("I", ORANGE),
    "previous": ("P", BLUE),
    "duplicate": ("D", PINK),
    "retrieval": ("R", "#c9a400"),
    "self": ("S", GREEN),
    "local": ("L", "#7fb8de"),
    "sink": ("•", "#c3c8ce"),
    "inactive": ("–", "#e3d5c8"),
}
SCORES = ("induction", "previous", "duplicate", "retrieval_copied", "self", "local_16_no_sink", "sink", "entropy")
_CELL_PIXELS = 24
_FRAME = 140
_HOVERED = ("induction", "previous", "duplicate", "retrieval_copied", "self", "sink", "local_16_no_sink", "entropy")
_HOVERED_REST = ("distance", "output_norm", "content_share")


def head_role_grid(table: pd.DataFrame, *, title: str | None = None) -> go.Figure:
    """The grid.

    table: columns layer, head, role, roles (all roles of a head, separated by spaces), and scores with `_low`, `_high`
    and `fresh_` columns, which are shown on hover where they are there.
    Raises KeyError for a table without these columns, ValueError for an empty one or two rows for one head.
    """
    rows, layers, heads = _checked(table, ("layer", "head", "role", "roles"))
    names = [name for name in ROLES if (rows["role"] == name).any()]
    names += sorted(set(rows["role"]) - {"", *ROLES})
    colours = {"": "rgba(132,139,148,0.10)"} | {name: _role(name)[1] for name in names}
    codes = {name: number for number, name in enumerate(colours)}
    values = np.full((len(heads), len(layers)), np.nan)
    texts, letters = (np.full(values.shape, "", dtype=object) for _ in "ab")
    for _, row in rows.iterrows():
        at = heads.index(row["head"]), layers.index(row["layer"])
        values[at] = codes[row["role"]]
        texts[at] = described_head(row)
        letters[at] = "".join(_role(name)[0] for name in row["roles"].split())
    count = len(codes)
    steps = [(edge / count, colour) for number, colour in enumerate(colours.values()) for edge in (number, number + 1)]
    figure = go.Figure(
        go.Heatmap(
            x=list(range(len(layers))),
            y=list(range(len(heads))),
            z=values,
            zmin=-0.5,
            zmax=count - 0.5,
            colorscale=steps,
            showscale=False,
            text=letters.tolist(),
            texttemplate="%{text}",
            textfont={"size": 11, "color": "#1f2328"},
            hovertext=texts.tolist(),
            hoverinfo="text",
            hoverongaps=False,
            xgap=1,
            ygap=1,
        )
    )
    for name in names:
        number = int((rows["role"] == name).sum())
        figure.add_scatter(
            x=[None],
            y=[None],
            mode="markers",
            marker={"symbol": "square", "size": 12, "color": colours[name]},
            name=f"{_role(name)[0]} {plain(name)} ({number})",
            hoverinfo="skip",
        )
    figure.update_layout(
        template=LIGHT,
        title={"text": title if title is not None else "Role of each head"},
        height=int(np.clip(_CELL_PIXELS * len(heads), 72, 720)) + _FRAME,
        xaxis=_axis("layer", layers),
        yaxis=_axis("head", heads, is_down=True),
        showlegend=bool(names),
    )
    return figure


def head_score_maps(
    table: pd.DataFrame,
    *,
    scores: Sequence[str] = SCORES,
    thresholds: Mapping[str, float] | None = None,
    title: str | None = None,
) -> go.Figure:
    """A map of each score over layers and heads, from 0 to 1, two beside each other.

    scores: columns; those that the table lacks are left out. thresholds: by score, heads above it get a ring.
    Raises KeyError if the table has none of the scores, and what `head_role_grid` raises.
    """
    rows, layers, heads = _checked(table, ("layer", "head"))
    there = [name for name in scores if name in rows and rows[name].notna().any()]
    if not there:
        raise KeyError(f"the table has none of the columns {list(scores)}. Pass the table of head_roles.")
    across = 2 if len(there) > 1 else 1
    down = -(-len(there) // across)
    cells = int(np.clip(14 * len(heads), 60, 400))
    height = down * (cells + 44) + 110
    figure = make_subplots(
        rows=down,
        cols=across,
        subplot_titles=[plain(name.replace("_", " ")) for name in there],
        horizontal_spacing=0.06,
        vertical_spacing=44 / (height - 110) if down > 1 else 0,
    )
    for number, name in enumerate(there):
        values = np.full((len(heads), len(layers)), np.nan)
        texts = np.full(values.shape, "", dtype=object)
        for _, row in rows.iterrows():
            at = heads.index(row["head"]), layers.index(row["layer"])
            values[at], texts[at] = row[name], f"<b>{_place(row)}</b>  {_said(row, name)}"
        place = {"row": number // across + 1, "col": number % across + 1}
        figure.add_heatmap(
            x=list(range(len(layers))),
            y=list(range(len(heads))),
            z=values,
            coloraxis="coloraxis",
            hovertext=texts.tolist(),
            hoverinfo="text",
            hoverongaps=False,
            xgap=1,
            ygap=1,
            **place,
        )
        if thresholds and name in thresholds:
            above = rows[rows[name] > thresholds[name]]
            figure.add_scatter(
                x=[layers.index(layer) for layer in above["layer"]],
                y=[heads.index(head) for head in above["head"]],
                mode="markers",
                marker={"symbol": "circle-open", "size": 8, "color": ORANGE, "line": {"width": 1.6}},
                hoverinfo="skip",
                showlegend=False,
                **place,
            )
        figure.update_xaxes(_axis("layer" if place["row"] == down else "", layers), **place)
        figure.update_yaxes(_axis("head" if place["col"] == 1 else "", heads, is_down=True), **place)
    figure.update_annotations(font={"size": 12.5})
    bar = {"thickness": 12, "outlinewidth": 0, "xpad": 6}
    figure.update_layout(
        template=LIGHT,
        title={"text": title if title is not None else "Scores of each head"},
        height=height,
        coloraxis={"colorscale": SEQUENTIAL, "cmin": 0, "cmax": 1, "colorbar": bar},
        margin={"t": 76},
    )
    return figure


def described_head(row: pd.Series) -> str:
    """`L5H3, key-value head 1: induction` and a line per score, with interval and the untrained model's."""
    shared = f", key-value head {row['kv_head']}" if "kv_head" in row.index else ""
    roles = ", ".join(str(row["roles"]).split()) or "no role"
    lines = [f"<b>{_place(row)}</b>{shared}: {plain(roles)}"]
    lines += [_said(row, name) for name in (*_HOVERED, *_HOVERED_REST) if _has(row, name)]
    return "<br>".join(lines)


def _place(row: pd.Series) -> str:
    return f"L{row['layer']}H{row['head']}"


def _said(row: pd.Series, name: str) -> str:
    text = f"{plain(name.replace('_', ' '))} {row[name]:.2f}" if _has(row, name) else f"{name}: none"
    if _has(row, f"{name}_low") and _has(row, f"{name}_high"):
        text += f" [{row[f'{name}_low']:.2f}, {row[f'{name}_high']:.2f}]"
    if _has(row, f"fresh_{name}"):
        text += f", untrained {row[f'fresh_{name}']:.2f}"
    return text


def _has(row: pd.Series, name: str) -> bool:
    return name in row.index and not pd.isna(row[name])


def _role(name: str) -> tuple[str, str]:
    return ROLES.get(name, (name[:1].upper(), GREY))


def _checked(table: pd.DataFrame, columns: Sequence[str]) -> tuple[pd.DataFrame, list[int], list[int]]:
    """Rows in order, the layers that are there and all heads."""
    if missing := [name for name in columns if name not in table.columns]:
        raise KeyError(f"the table has no column {missing}; pass the table of head_roles.")
    if table.empty:
        raise ValueError("the table has no heads. Pass the table of head_roles.")
    rows = table.assign(layer=table["layer"].astype(int), head=table["head"].astype(int))
    if rows.duplicated(["layer", "head"]).any():
        raise ValueError("the table has several rows for one head. Pass one model's table.")
    return rows, sorted(rows["layer"].unique().tolist()), list(range(int(rows["head"].max()) + 1))


def _axis(name: str, numbers: list[int], *, is_down: bool = False) -> dict:
    count = len(numbers)
    ends = [-0.5, count - 0.5]
    axis = {"title": {"text": name}, "showgrid": False, "tickangle": 0, "range": ends[::-1] if is_down else ends}
    if count <= 12:
        axis |= {"dtick": 1, "tick0": 0}
    if numbers != list(range(count)):  # layers without attention are squeezed out and named
        axis |= {"tickvals": list(range(count)), "ticktext": [str(number) for number in numbers]}
    return axis

"""How a probe fitted on one domain does on another: train by test, the number in each cell.

Cells on the diagonal, outlined, are within one domain (cross-validated, or the comparison would be with seen rows).
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from microtome.figures.theme import GREY, LIGHT, colour_layout, label_of, plain


def transfer_matrix(table: pd.DataFrame, *, value: str = "auroc", title: str | None = None) -> go.Figure:
    """Heat map with rows "fitted on", columns "tested on".

    table: columns `train`, `test`, the value and, where there are, `<value>_low` and `<value>_high`; domains in order
    of first appearance. Pairs that are not there stay empty.
    Raises KeyError for a missing column, ValueError for a pair that is there twice or an empty table.
    """
    if missing := [name for name in ("train", "test", value) if name not in table.columns]:
        raise KeyError(f"the table has no column {missing}; it has {list(table.columns)}.")
    if table.empty:
        raise ValueError("the table has no rows. Pass one row per pair of training and test domain.")
    twice = table[table.duplicated(["train", "test"])]
    if not twice.empty:
        pair = tuple(twice.iloc[0][["train", "test"]])
        raise ValueError(f"the pair {pair} has several rows. Pass one row per pair of training and test domain.")
    trains, tests = list(dict.fromkeys(table["train"])), list(dict.fromkeys(table["test"]))
    values = np.full((len(trains), len(tests)), np.nan)
    texts = np.full(values.shape, "", dtype=object)
    hovers = np.full(values.shape, "", dtype=object)
    for _, row in table.iterrows():
        at = trains.index(row["train"]), tests.index(row["test"])
        values[at] = row[value]
        texts[at] = f"{row[value]:.2f}"
        hovers[at] = f"{plain(row['train'])} → {plain(row['test'])}<br>{label_of(value)} {row[value]:.3f}"
        if f"{value}_low" in table.columns and f"{value}_high" in table.columns:
            hovers[at] += f" [{row[f'{value}_low']:.3f}, {row[f'{value}_high']:.3f}]"
    figure = go.Figure(
        go.Heatmap(
            z=values,
            text=texts.tolist(),
            texttemplate="%{text}",
            textfont={"size": 14},
            hovertext=hovers.tolist(),
            hoverinfo="text",
            hoverongaps=False,
            xgap=2,
            ygap=2,
            coloraxis="coloraxis",
        )
    )
    for name in set(trains) & set(tests):
        row, column = trains.index(name), tests.index(name)
        figure.add_shape(
            type="rect",
            x0=column - 0.5,
            x1=column + 0.5,
            y0=row - 0.5,
            y1=row + 0.5,
            line={"color": GREY, "width": 2},
        )
    figure.update_layout(
        template=LIGHT,
        title={"text": title if title is not None else f"{label_of(value)} across domains"},
        height=56 * len(trains) + 140,
        # numbered axes with names as tick labels: a domain called "2024" would be taken for a number otherwise
        xaxis=_axis("tested on", tests),
        yaxis=_axis("fitted on", trains) | {"autorange": "reversed"},
        **colour_layout(value, values.ravel().tolist()),
    )
    return figure


def _axis(title: str, names: list) -> dict:
    ticks = {"tickvals": list(range(len(names))), "ticktext": [plain(name) for name in names]}
    return {"title": {"text": title}, "showgrid": False, **ticks}

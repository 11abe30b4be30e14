"""How far direction finders agree: finder by finder, |cosine| in each cell, with its band.

Values run from 0 to 1 (colours do too, so that figures compare); the expected |cosine| of random directions is in the
title, since it depends on the width alone.
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from microtome.figures.theme import LIGHT, SEQUENTIAL, label_of, plain


def cosine_matrix(table: pd.DataFrame, *, value: str = "cosine", title: str | None = None) -> go.Figure:
    """Heat map of a symmetric table of finders at one site, 1 on the diagonal.

    table: columns `first`, `second`, the value and, where there are, `<value>_low` and `<value>_high`, `chance` and
    `site`, one row per pair: the pairs of one site of a table of directions. Pairs that are not there stay empty.
    value: may be signed (score_correlation); colours then show its size and cells its sign.
    Raises KeyError for a missing column; ValueError for an empty table, several sites, or a pair that is there twice.
    """
    if missing := [name for name in ("first", "second", value) if name not in table.columns]:
        raise KeyError(f"the table has no column {missing}; it has {list(table.columns)}.")
    if table.empty:
        raise ValueError("the table has no rows. Pass one row per pair of finders.")
    if "site" in table.columns and table["site"].nunique() > 1:
        sites = list(dict.fromkeys(table["site"]))
        raise ValueError(f"the table has several sites ({sites[:3]}). Pass the rows of one.")
    names = list(dict.fromkeys([*table["first"], *table["second"]]))
    values = np.full((len(names), len(names)), np.nan)
    texts, hovers = (np.full(values.shape, "", dtype=object) for _ in range(2))
    for place in range(len(names)):
        values[place, place], texts[place, place] = 1.0, "1"
    for _, row in table.iterrows():
        at = names.index(row["first"]), names.index(row["second"])
        if not np.isnan(values[at]):
            raise ValueError(f"the pair ({row['first']}, {row['second']}) has several rows. Pass one row per pair.")
        hover = f"{plain(row['first'])} · {plain(row['second'])}<br>{label_of(value)} {row[value]:.3f}"
        if f"{value}_low" in table.columns and not pd.isna(row[f"{value}_low"]):
            hover += f" [{row[f'{value}_low']:.3f}, {row[f'{value}_high']:.3f}]"
        for cell in (at, at[::-1]):
            values[cell], texts[cell], hovers[cell] = abs(row[value]), f"{row[value]:.2f}", hover
    figure = go.Figure(
        go.Heatmap(
            z=values,
            text=texts.tolist(),
            texttemplate="%{text}",
            textfont={"size": 12},
            hovertext=hovers.tolist(),
            hoverinfo="text",
            hoverongaps=False,
            xgap=2,
            ygap=2,
            coloraxis="coloraxis",
        )
    )
    ticks = {"tickvals": list(range(len(names))), "ticktext": [label_of(name) for name in names], "showgrid": False}
    bar = {"thickness": 12, "outlinewidth": 0, "nticks": 6, "xpad": 6}
    figure.update_layout(
        template=LIGHT,
        title={"text": title if title is not None else _title(table, value)},
        height=44 * len(names) + 150,
        xaxis=ticks,
        yaxis=ticks | {"autorange": "reversed"},
        coloraxis={"colorscale": SEQUENTIAL, "cmin": 0, "cmax": 1, "colorbar": bar},
    )
    return figure


def _title(table: pd.DataFrame, value: str) -> str:
    where = f" at {plain(table['site'].iloc[0])}" if "site" in table.columns else ""
    has_chance = value == "cosine" and "chance" in table.columns
    chance = f" (random directions: {table['chance'].iloc[0]:.3f})" if has_chance else ""
    return f"{label_of(value)} of direction finders{where}{chance}"

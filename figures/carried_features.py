"""How many directions are carried and how many made anew: a histogram of R2 for each pair, coloured by verdict.

From a table alone: one row per pair and direction, as `FeatureTransport.table` gives them.
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from microtome.figures.theme import BLUE, GREY, LIGHT, NULL, ORANGE, plain

COLOURS = {"carried": BLUE, "undecided": GREY, "made here": ORANGE}
_BINS = 45
_MOST = 6
_FEW = 25


def carried_features(table: pd.DataFrame, *, floor: float = -0.25, title: str | None = None) -> go.Figure:
    """One panel per pair of sites, at most six; directions below the floor are counted in the first bar.

    table: columns source, target, r2, verdict; null_bar draws the upper quantile of the null. Up to 25 directions of a
    pair are points, with name, r2_low and r2_high where the table has them.
    Raises KeyError for missing columns; ValueError for no rows, or more than six pairs.
    """
    if missing := [name for name in ("source", "target", "r2", "verdict") if name not in table]:
        raise KeyError(f"the table lacks {missing}. Give FeatureTransport.table.")
    pairs = list(dict.fromkeys(zip(table["source"], table["target"], strict=True)))
    if not 1 <= len(pairs) <= _MOST:
        raise ValueError(f"the table has {len(pairs)} pairs. Give one to {_MOST}; more cannot be read.")
    edges = np.linspace(floor, 1, _BINS + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    figure = make_subplots(
        rows=len(pairs),
        shared_xaxes=True,
        vertical_spacing=0.09,
        subplot_titles=[f"{plain(source)} → {plain(target)}" for source, target in pairs],
    )
    for number, (source, target) in enumerate(pairs, start=1):
        rows = table[(table["source"] == source) & (table["target"] == target)]
        if len(rows) <= _FEW:
            _points(figure, rows, number)
            continue
        for verdict, colour in COLOURS.items():
            chosen = rows[rows["verdict"] == verdict]["r2"].dropna().clip(floor, 1)
            counts, _ = np.histogram(chosen, edges)
            figure.add_bar(
                x=middles,
                y=counts,
                width=edges[1] - edges[0],
                marker={"color": colour, "line": {"width": 0}},
                name=verdict,
                legendgroup=verdict,
                showlegend=number == 1,
                hovertext=[
                    f"{verdict}: {count} of {len(rows)}<br>R2 {low:.2f} to {high:.2f}"
                    for count, low, high in zip(counts, edges, edges[1:], strict=False)
                ],
                hoverinfo="text",
                row=number,
                col=1,
            )
        figure.update_yaxes(title={"text": "directions"}, row=number, col=1)
        if "null_bar" in rows and rows["null_bar"].notna().any():
            bar = float(rows["null_bar"].median())
            line = {"color": NULL, "dash": "dot", "width": 1.4}
            figure.add_vline(x=max(bar, floor), line=line, row=number, col=1)
    figure.update_xaxes(range=[floor, 1], showgrid=False)
    figure.update_xaxes(title={"text": "R2 on held-out documents"}, row=len(pairs), col=1)
    figure.update_annotations(font={"size": 13})
    figure.update_layout(
        template=LIGHT,
        barmode="stack",
        bargap=0,
        title={"text": title or "Directions carried and made"},
        height=150 + 190 * len(pairs),
    )
    return figure


def _points(figure: go.Figure, rows: pd.DataFrame, number: int) -> None:
    """Each direction on a line of its own, with its interval."""
    names = rows.get("name", rows.index)
    shown = [plain(name) for name in names]
    has_ends = {"r2_low", "r2_high"} <= set(rows)
    for verdict, colour in COLOURS.items():
        is_it = (rows["verdict"] == verdict).to_numpy()
        some = rows[is_it]
        ends = {}
        if has_ends:
            above, below = some["r2_high"] - some["r2"], some["r2"] - some["r2_low"]
            ends = {"error_x": {"type": "data", "symmetric": False, "array": above, "arrayminus": below}}
        figure.add_scatter(
            x=some["r2"],
            y=[name for name, keep in zip(shown, is_it, strict=True) if keep],
            mode="markers",
            marker={"color": colour, "size": 9},
            name=verdict,
            legendgroup=verdict,
            showlegend=number == 1,
            row=number,
            col=1,
            **ends,
        )
    figure.update_yaxes(title={"text": ""}, type="category", row=number, col=1)

"""Transport by rank and by distance: what a map carries beside what it could, and how that fades with blocks between.

From tables alone: `TransportEfficiency.table` for ranks, `TransportMap.table` for distances.
"""

from collections.abc import Iterable

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from microtome.figures.band import band
from microtome.figures.theme import BLUE, GREEN, GREY, LIGHT, NULL, ORANGE, PINK, plain

_SCORES = {
    "ceiling": ("ceiling, same rows", NULL, "dot"),
    "score": ("reduced rank", BLUE, "solid"),
    "truncated_score": ("singular values cut off", ORANGE, "dash"),
}
_EFFICIENCIES = {
    "efficiency": ("reduced rank", BLUE, "solid"),
    "truncated_efficiency": ("singular values cut off", ORANGE, "dash"),
    "published_efficiency": ("as published", PINK, "dashdot"),
}
VALUES = {
    "r2_vw": ("R2, variance-weighted", BLUE),
    "r2_ua": ("R2, mean of channels", ORANGE),
    "r2_wh": ("R2, whitened", GREEN),
    "identity_r2_vw": ("identity, variance-weighted", GREY),
    "r2_increment": ("R2 of the increment", PINK),
    "ceiling": ("ceiling, whitened", NULL),
    "efficiency": ("efficiency", GREEN),
    "identity_efficiency": ("efficiency of the identity", GREY),
    "above_edge": ("directions carried", BLUE),
}
_DASHES = ("solid", "dash", "dot")


def efficiency_curves(table: pd.DataFrame, *, floor: float = -0.5, title: str | None = None) -> go.Figure:
    """Two panels over the rank of the map: R2 and its ceiling, and efficiency of this and of published estimators.

    table: columns rank, score, ceiling, efficiency, truncated_score, truncated_efficiency, published_efficiency.
    floor: where the axes end; lines may leave them, and the table has the numbers.
    Raises KeyError for missing columns, ValueError for no rows.
    """
    if missing := [name for name in ("rank", *_SCORES, *_EFFICIENCIES) if name not in table]:
        raise KeyError(f"the table lacks {missing}. Give TransportEfficiency.table.")
    if table.empty:
        raise ValueError("the table has no rows. Give one row per rank.")
    rows = table.sort_values("rank")
    figure = make_subplots(cols=2, horizontal_spacing=0.12)
    named: set[str] = set()
    for column, lines in enumerate((_SCORES, _EFFICIENCIES), start=1):
        for value, (name, colour, dash) in lines.items():
            figure.add_scatter(
                x=rows["rank"],
                y=rows[value],
                mode="lines+markers",
                line={"color": colour, "dash": dash, "width": 2},
                marker={"size": 5},
                name=name,
                legendgroup=name,
                showlegend=name not in named,
                hovertext=[
                    f"{name}, rank {rank}<br>{said:.4g}" for rank, said in zip(rows["rank"], rows[value], strict=True)
                ],
                hoverinfo="text",
                row=1,
                col=column,
            )
            named.add(name)
    figure.add_hline(y=1, line={"color": NULL, "dash": "dot", "width": 1.2}, row=1, col=2)
    ticks = [rank for rank in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048) if rank <= rows["rank"].max()]
    figure.update_xaxes(type="log", title={"text": "rank"}, showgrid=False, tickvals=ticks)
    figure.update_yaxes(title={"text": "R2 on held-out rows"}, row=1, col=1)
    figure.update_yaxes(title={"text": "efficiency"}, row=1, col=2)
    for column in (1, 2):
        drawn = [trace for trace in figure.data if trace.xaxis == ("x" if column == 1 else "x2")]
        figure.update_yaxes(**_ends(drawn, floor), row=1, col=column)
    figure.update_layout(template=LIGHT, title={"text": title or "Transport by rank"}, height=420)
    return figure


def distance_curves(
    table: pd.DataFrame,
    *,
    values: tuple[str, ...] = ("r2_vw", "r2_ua", "r2_wh", "identity_r2_vw"),
    by: str | None = None,
    floor: float = -0.5,
    title: str | None = None,
) -> go.Figure:
    """Mean over the pairs of each distance, with the middle 80 % of pairs as a band where one line is drawn.

    table: one row per pair: distance and the values (of VALUES). by: a column whose values are drawn in dashes of their
    own, such as the tokens ("without sinks", "with sinks"). floor: where the axis ends; lines may leave it.
    Raises KeyError for missing columns, ValueError for values not of VALUES, no rows, or more than three kinds.
    """
    if wrong := [value for value in values if value not in VALUES]:
        raise ValueError(f"{wrong[0]!r} is not drawn. Give some of {', '.join(VALUES)}.")
    if missing := [name for name in ("distance", *values, *([by] if by else [])) if name not in table]:
        raise KeyError(f"the table lacks {missing}. Give TransportMap.table.")
    kinds = list(dict.fromkeys(table[by])) if by else [None]
    if table.empty or len(kinds) > len(_DASHES):
        raise ValueError(f"the table has {len(table)} rows and {len(kinds)} kinds. Give rows of one to {len(_DASHES)}.")
    figure = go.Figure()
    for kind, dash, own in zip(kinds, _DASHES, (BLUE, ORANGE, GREEN), strict=False):
        rows = table if kind is None else table[table[by] == kind]
        for value in values:
            name, colour = VALUES[value] if len(values) > 1 else (VALUES[value][0], own)
            grouped = rows.groupby("distance")[value]
            mean = grouped.mean()
            if len(values) * len(kinds) == 1:
                low, high = grouped.quantile(0.1), grouped.quantile(0.9)
                figure.add_trace(band(mean.index, low, high, colour))
            figure.add_scatter(
                x=mean.index,
                y=mean,
                mode="lines+markers",
                line={"color": colour, "dash": dash, "width": 2},
                marker={"size": 5},
                name=name if kind is None else f"{name}, {plain(kind)}",
                hovertext=[
                    f"{name}, {distance:g} blocks<br>{said:.3f} (mean of {count} pairs)"
                    for distance, said, count in zip(mean.index, mean, grouped.size(), strict=True)
                ],
                hoverinfo="text",
            )
    label = VALUES[values[0]][0] if len(values) == 1 else "R2 on held-out rows"
    figure.update_layout(
        template=LIGHT,
        title={"text": title or "Transport by distance"},
        height=420,
        xaxis={"title": {"text": "blocks between source and target"}, "showgrid": False},
        yaxis={"title": {"text": label}, **_ends(figure.data, floor)},
        hovermode="closest",
    )
    return figure


def _ends(traces: Iterable[go.Scatter], floor: float) -> dict:
    """From the lowest value, or the floor where one lies below, to the highest."""
    drawn = [value for trace in traces for value in trace.y if value == value]
    low, high = max(min(drawn, default=0.0), floor), max(drawn, default=1.0)
    margin = 0.05 * max(high - low, 1e-6)
    return {"range": [low - margin, high + margin]}

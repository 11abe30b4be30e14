"""Where a direction comes from: by depth, how much of it is carried to where it is read, and what each block added.

From a table alone: one row per direction and depth, as `DirectionOrigin.table` gives them.
"""

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from microtome.figures.band import band
from microtome.figures.theme import BLUE, GREEN, GREY, LIGHT, ORANGE, plain

_NEEDED = ("name", "depth", "carried_to_target", "made_at", "carried_from_previous")
_LINES = {
    "carried_to_target": ("carried from here to the target", BLUE, "solid"),
    "carried_from_previous": ("of it here, carried by this block", GREEN, "dash"),
    "identity_to_target": ("the target's, read off as it is", GREY, "dot"),
}
_MOST = 6


def origin_curves(table: pd.DataFrame, *, threshold: float = 0.5, title: str | None = None) -> go.Figure:
    """One panel per direction, at most six: lines by depth, bars for what each block made, and random directions' band.

    table: columns name, depth, carried_to_target, made_at, carried_from_previous; with identity_to_target a further
    line, with carried_to_target_control_low and _high a band. Values below -0.25 are drawn there. threshold: a line.
    Raises KeyError for missing columns; ValueError for no rows or more than six directions.
    """
    if missing := [name for name in _NEEDED if name not in table]:
        raise KeyError(f"the table lacks {missing}. Give DirectionOrigin.table.")
    names = list(dict.fromkeys(table["name"]))
    if not 1 <= len(names) <= _MOST:
        raise ValueError(f"the table has {len(names)} directions. Give one to {_MOST}; more cannot be read.")
    columns = min(2, len(names))
    figure = make_subplots(
        rows=-(-len(names) // columns),
        cols=columns,
        shared_yaxes=True,
        horizontal_spacing=0.06,
        vertical_spacing=0.16,
        subplot_titles=[plain(name) for name in names],
    )
    for number, name in enumerate(names):
        rows = table[table["name"] == name].sort_values("depth")
        place = {"row": number // columns + 1, "col": number % columns + 1}
        if {"carried_to_target_control_low", "carried_to_target_control_high"} <= set(rows):
            high, low = rows["carried_to_target_control_high"], rows["carried_to_target_control_low"]
            ends = low.clip(lower=-0.25), high.clip(lower=-0.25)
            shown = {"name": "random directions, 95 %", "legendgroup": "band", "showlegend": number == 0}
            figure.add_trace(band(rows["depth"], *ends, GREY, opacity=0.22, **shown), **place)
        figure.add_bar(
            x=rows["depth"],
            y=rows["made_at"].clip(lower=-0.25),
            marker={"color": ORANGE, "line": {"width": 0}},
            name="made by this block",
            legendgroup="made",
            showlegend=number == 0,
            hovertext=[f"made at {row['depth']:g}: {row['made_at']:.3f}" for _, row in rows.iterrows()],
            hoverinfo="text",
            **place,
        )
        for column, (said, colour, dash) in _LINES.items():
            if column not in rows:
                continue
            figure.add_scatter(
                x=rows["depth"],
                y=rows[column].clip(lower=-0.25),
                mode="lines",
                line={"color": colour, "dash": dash, "width": 2},
                name=said,
                legendgroup=column,
                showlegend=number == 0,
                hovertext=[f"{said}<br>depth {row['depth']:g}: {row[column]:.3f}" for _, row in rows.iterrows()],
                hoverinfo="text",
                **place,
            )
        figure.add_hline(y=threshold, line={"color": GREY, "dash": "dot", "width": 1}, **place)
    figure.update_xaxes(title={"text": "depth (blocks)"}, showgrid=False)
    figure.update_yaxes(range=[-0.3, 1.05])
    figure.update_yaxes(title={"text": "share of variance"}, col=1)
    figure.update_annotations(font={"size": 13})
    figure.update_layout(
        template=LIGHT,
        title={"text": title or "Where directions come from"},
        height=190 + 230 * -(-len(names) // columns),
        bargap=0.2,
    )
    return figure

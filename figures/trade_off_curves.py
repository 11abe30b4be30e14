"""Target against side effect: a line per method through its strengths, controls in grey."""

import pandas as pd
import plotly.graph_objects as go

from microtome.figures.band import arms
from microtome.figures.dose_response import said
from microtome.figures.theme import BLUE, GREEN, GREY, LIGHT, NULL, ORANGE, PINK, plain

_COLOURS = (BLUE, ORANGE, GREEN, PINK, "#7a68c7", "#b58900", "#444b54", "#5aa9c9")
_DASHES = ("solid", "dash", "dot")


def trade_off_curves(
    table: pd.DataFrame,
    target: str,
    *,
    side_effect: str = "kl",
    limit: float | None = None,
    title: str | None = None,
) -> go.Figure:
    """Target over side effect.

    table: method, strength, target and side effect, with intervals (`<target>_low`, `_high`) where there are; where
    `control` is True a row is drawn as a grey mark, others as lines from the unsteered model (strength 0 or NaN) on.
    Controls that cost more than any of the lines shows are triangles at the edge; hovering tells their place.

    Raises KeyError for a missing column, ValueError for a table without a method.
    """
    needed = ("method", "strength", target, side_effect)
    if missing := [name for name in needed if name not in table.columns]:
        raise KeyError(f"the table has no column {missing}; it has {list(table.columns)}.")
    control = table["control"].astype(bool) if "control" in table.columns else pd.Series(False, index=table.index)
    strength = table["strength"].fillna(0.0)
    zero = table[(strength == 0) & ~control]
    rest = table[(strength != 0) & ~control]
    methods = list(dict.fromkeys(rest["method"]))
    if not methods:
        raise ValueError("the table has no row of a method with a strength: nothing to draw.")
    figure = go.Figure()
    marks = table[control]
    edge = 1.1 * max(float(rest[side_effect].max()), limit or 0.0)
    if len(marks):
        beyond = marks[side_effect] > edge
        figure.add_scatter(
            x=marks[side_effect].clip(upper=edge),
            y=marks[target],
            mode="markers",
            marker={
                "color": GREY,
                "size": 8,
                "symbol": ["triangle-right" if is_far else "x-thin" for is_far in beyond],
                "line": {"width": 1.5, "color": GREY},
            },
            name="controls",
            customdata=marks[side_effect],
            hovertext=[plain(name) for name in marks["method"]],
            hovertemplate="%{hovertext}<br>%{customdata:.3f}, %{y:.3f}<extra></extra>",
        )
    for number, method in enumerate(methods):
        rows = pd.concat([zero, rest[rest["method"] == method]]).sort_values(side_effect)
        colour = _COLOURS[number % len(_COLOURS)]
        figure.add_scatter(
            x=rows[side_effect],
            y=rows[target],
            error_y=arms(rows, target, thickness=0.8, width=0),
            mode="lines+markers",
            line={"color": colour, "width": 2, "dash": _DASHES[number // len(_COLOURS) % len(_DASHES)]},
            marker={"size": 6},
            name=plain(method),
            customdata=rows["strength"].fillna(0.0),
            hovertemplate="strength %{customdata:.3g}<br>%{x:.3f}, %{y:.3f}",
        )
    if limit is not None:
        figure.add_vline(x=limit, line={"color": NULL, "dash": "dash", "width": 1.4})
    words = f"{said(target)} against {said(side_effect)}" if title is None else title
    figure.update_layout(
        template=LIGHT,
        title={"text": plain(words[0].upper() + words[1:])},
        height=480,
        xaxis={"title": {"text": said(side_effect)}, "range": [-0.02 * edge, 1.02 * edge]},
        yaxis={"title": {"text": said(target)}},
    )
    return figure

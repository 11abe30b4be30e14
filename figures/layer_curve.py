"""A number by layer, with what it must beat: its interval, the shuffled-label control, chance, and the best-site null.

A line per site kind. Kinds without heads (resid_post) show each layer's value with its interval; kinds with heads (z)
show the best head of each layer.
Beware: the best of many heads is above chance by luck alone; judge it against the best-site line, not against chance.
"""

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from microtome.figures.band import band
from microtome.figures.sweep_rows import described, rows_of_kind
from microtome.figures.theme import BLUE, GREEN, GREY, LIGHT, MIDPOINT, NULL, ORANGE, PINK, label_of

_COLOURS = (BLUE, ORANGE, GREEN, PINK)
_DASHES = ("solid", "dash", "dashdot", "longdash")


def layer_curve(
    table: pd.DataFrame,
    *,
    value: str = "auroc",
    kinds: Sequence[str] = ("resid_post",),
    best_site_null: float | None = None,
    title: str | None = None,
) -> go.Figure:
    """Line of `value` over layers for each kind, the first kind's control beneath.

    table: one row per probe, as a sweep gives it; `<value>_low` and `_high` give the interval's band,
    `control_<value>` the shuffled labels' line and its own `_low` and `_high` their band. best_site_null: the value
    that the best of all sites reaches in 5 % of the permutations, a dashed line across. title: None writes the value's
    name.
    Raises what `rows_of_kind` does; ValueError for no kinds or more than four.
    """
    if not 1 <= len(kinds) <= len(_COLOURS):
        raise ValueError(
            f"kinds is {list(kinds)}. Give one to {len(_COLOURS)} site kinds; more lines cannot be told apart."
        )
    figure = go.Figure()
    curves = {kind: rows_of_kind(table, kind, value) for kind in kinds}
    control = f"control_{value}"
    first = _best_of_layer(curves[kinds[0]], value)
    if control in table.columns:
        _add_band(figure, first, control, GREY)
        figure.add_scatter(
            x=first["layer"],
            y=first[control],
            mode="lines",
            line={"color": GREY, "dash": "dash", "width": 1.5},
            name="shuffled labels",
            hoverinfo="skip",
        )
    for kind, colour, dash in zip(kinds, _COLOURS, _DASHES, strict=False):
        rows = curves[kind]
        heads = int(rows.groupby("layer").size().max())
        best = _best_of_layer(rows, value)
        _add_band(figure, best, value, colour)
        figure.add_scatter(
            x=best["layer"],
            y=best[value],
            mode="lines+markers",
            line={"color": colour, "dash": dash, "width": 2},
            marker={"size": 6},
            legendrank=100,
            name=label_of(kind) if heads == 1 else f"best of {heads} {label_of(kind)}",
            hovertext=[described(row, value) for _, row in best.iterrows()],
            hoverinfo="text",
        )
    layers = sorted({layer for rows in curves.values() for layer in rows["layer"]})
    if best_site_null is not None:
        _add_level(figure, layers, best_site_null, "95 % of best-site null", NULL, "longdash")
    if value in MIDPOINT:
        _add_level(figure, layers, MIDPOINT[value], "chance" if MIDPOINT[value] else "no effect", GREY, "dot")
    # few ticks may fall between whole numbers when Plotly chooses the step
    step = {"dtick": 1} if len(layers) <= 12 else {}
    figure.update_layout(
        template=LIGHT,
        title={"text": title if title is not None else f"{label_of(value)} by layer"},
        height=400,
        xaxis={"title": {"text": "layer"}, "range": [layers[0] - 0.5, layers[-1] + 0.5], "showgrid": False, **step},
        yaxis={"title": {"text": label_of(value)}},
        hovermode="closest",
    )
    return figure


def _best_of_layer(rows: pd.DataFrame, value: str) -> pd.DataFrame:
    rows = rows.dropna(subset=[value])
    return rows.loc[rows.groupby("layer")[value].idxmax()]


def _add_band(figure: go.Figure, rows: pd.DataFrame, name: str, colour: str) -> None:
    if f"{name}_low" not in rows.columns or f"{name}_high" not in rows.columns:
        return
    figure.add_trace(band(rows["layer"], rows[f"{name}_low"], rows[f"{name}_high"], colour))


def _add_level(figure: go.Figure, layers: list[int], level: float, name: str, colour: str, dash: str) -> None:
    figure.add_scatter(
        x=[layers[0] - 0.5, layers[-1] + 0.5],
        y=[level, level],
        mode="lines",
        line={"color": colour, "dash": dash, "width": 1.4},
        name=f"{name} ({level:.3g})",
        legendrank=500,
        hoverinfo="skip",
    )

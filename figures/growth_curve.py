"""A score by the number of training groups, on a logarithmic axis, with its interval: a line per site."""

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from microtome.figures.band import arms
from microtome.figures.theme import BLUE, GREEN, GREY, LIGHT, MIDPOINT, ORANGE, PINK, label_of, plain

_COLOURS = (BLUE, ORANGE, GREEN, PINK)


def growth_curve(
    table: pd.DataFrame, *, value: str = "auroc", sites: Sequence[str] | None = None, title: str | None = None
) -> go.Figure:
    """Line of `value` over `groups` for each site.

    table: columns site, groups, the value and, where there are, `<value>_low` and `<value>_high`. sites: up to four;
    the first four of the table if None.
    Raises KeyError for a missing column or site, ValueError for none or more than four sites.
    """
    if missing := [name for name in ("site", "groups", value) if name not in table.columns]:
        raise KeyError(f"the table has no column {missing}; it has {list(table.columns)}.")
    known = list(dict.fromkeys(table["site"]))
    sites = known[: len(_COLOURS)] if sites is None else list(sites)
    if not 1 <= len(sites) <= len(_COLOURS):
        raise ValueError(f"sites is {sites}. Give one to {len(_COLOURS)}; more lines cannot be told apart.")
    if unknown := [site for site in sites if site not in known]:
        raise KeyError(f"the table has no site {unknown}; it has {known[:8]}.")
    figure = go.Figure()
    for site, colour in zip(sites, _COLOURS, strict=False):
        rows = table[table["site"] == site].sort_values("groups")
        figure.add_scatter(
            x=rows["groups"].tolist(),
            y=rows[value].tolist(),
            error_y=arms(rows, value, thickness=1.2, width=3),
            mode="lines+markers",
            line={"color": colour, "width": 2},
            name=plain(site),
            hovertemplate="%{x:,.0f} groups: %{y:.3f}",
        )
    if value in MIDPOINT:
        figure.add_hline(y=MIDPOINT[value], line={"color": GREY, "dash": "dot", "width": 1.4})
    sizes = sorted(set(table["groups"]))
    shown = [f"{size:,.0f}" for size in sizes]
    figure.update_layout(
        template=LIGHT,
        title={"text": title if title is not None else f"{label_of(value)} by training groups"},
        height=400,
        xaxis={"title": {"text": "training groups"}, "type": "log", "tickvals": sizes, "ticktext": shown},
        yaxis={"title": {"text": label_of(value)}},
    )
    return figure

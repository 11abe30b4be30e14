"""A number by depth for several lenses, each with its interval: KL to the model, agreement with it, or cross-entropy.

From a table alone: one row per lens and depth, as `LensStatistics.curve` gives them, put under one another. A dashed
line, where the table has it, is the model itself.
"""

import pandas as pd
import plotly.graph_objects as go

from microtome.figures.band import band
from microtome.figures.theme import BLUE, GREEN, GREY, LIGHT, ORANGE, PINK, plain

_COLOURS = (BLUE, ORANGE, GREEN, PINK)
_DASHES = ("solid", "dash", "dashdot", "longdash")
VALUES = {
    "kl": "KL(model || lens), nats",
    "kl_reverse": "KL(lens || model), nats",
    "cross_entropy": "cross-entropy of the next token, nats",
    "entropy": "entropy, nats",
    "agrees": "share of tokens whose first word is the model's",
    "max_prob": "mean probability of the lens's first word",
    "target_in_top": "share of tokens whose true next token is among the top words",
}


def lens_curves(table: pd.DataFrame, *, value: str = "kl", log: bool = False, title: str | None = None) -> go.Figure:
    """Lines with bands over depth.

    table: columns lens, depth, the value, and for the band `<value>_low` and `<value>_high`. value: of VALUES. log: a
    logarithmic axis; zeros (the last depth's KL) then fall below it. title: None writes the value's name.
    Raises KeyError for missing columns; ValueError for another value, no rows, or more than four lenses.
    """
    if value not in VALUES:
        raise ValueError(f"value is {value!r}. Give one of {', '.join(VALUES)}.")
    if missing := [name for name in ("lens", "depth", value) if name not in table]:
        raise KeyError(f"the table lacks {missing}. Give what LensStatistics.curve returns.")
    names = list(dict.fromkeys(table["lens"]))
    if not 1 <= len(names) <= len(_COLOURS):
        raise ValueError(f"the table has {len(names)} lenses. Give one to {len(_COLOURS)}; more cannot be told apart.")
    figure = go.Figure()
    for name, colour, dash in zip(names, _COLOURS, _DASHES, strict=False):
        rows = table[table["lens"] == name].sort_values("depth")
        if {f"{value}_low", f"{value}_high"} <= set(rows) and rows[f"{value}_low"].notna().any():
            figure.add_trace(band(rows["depth"], rows[f"{value}_low"], rows[f"{value}_high"], colour))
        figure.add_scatter(
            x=rows["depth"],
            y=rows[value],
            mode="lines+markers",
            line={"color": colour, "dash": dash, "width": 2},
            marker={"size": 5},
            name=f"{plain(name)} lens",
            hovertext=[_said(row, value) for _, row in rows.iterrows()],
            hoverinfo="text",
        )
    if value == "cross_entropy":
        last = table[table["depth"] == table["depth"].max()][value].iloc[0]
        figure.add_hline(y=float(last), line={"color": GREY, "dash": "dot", "width": 1.4})
    figure.update_layout(
        template=LIGHT,
        title={"text": title if title is not None else VALUES[value]},
        height=400,
        xaxis={"title": {"text": "depth (blocks)"}, "showgrid": False},
        yaxis={"title": {"text": VALUES[value]}, **({"type": "log"} if log else {"rangemode": "tozero"})},
        hovermode="closest",
    )
    return figure


def _said(row: pd.Series, value: str) -> str:
    low, high = row.get(f"{value}_low"), row.get(f"{value}_high")
    interval = "" if low is None or pd.isna(low) else f" [{low:.3g}, {high:.3g}]"
    return f"{plain(row['lens'])} lens, depth {row['depth']}<br>{row[value]:.4g}{interval}"

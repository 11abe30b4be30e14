"""Does a stated confidence come true as often as it says: frequency over confidence, a point per bin.

The grey band is where 95 % of frequencies lie if every confidence is right; points on the diagonal are calibrated.
"""

import pandas as pd
import plotly.graph_objects as go

from microtome.figures.band import band
from microtome.figures.theme import BLUE, GREY, LIGHT, plain

_COLUMNS = ("rows", "confidence", "frequency", "low", "high")


def reliability_curve(table: pd.DataFrame, *, title: str | None = None, note: str | None = None) -> go.Figure:
    """Points of frequency over confidence, their areas as the bins' rows.

    table: one row per bin, columns rows, confidence, frequency, low, high (`microtome.probes.calibration.reliability`).
    note: a line below the title, such as the calibration error beside its floor.
    Raises KeyError for a missing column, ValueError for an empty table.
    """
    if missing := [name for name in _COLUMNS if name not in table.columns]:
        raise KeyError(f"the table has no column {missing}; it has {list(table.columns)}.")
    if table.empty:
        raise ValueError("the table has no rows. Pass one row per bin that holds rows.")
    table = table.sort_values("confidence")
    figure = go.Figure()
    expected = table["confidence"], table["low"], table["high"]
    figure.add_trace(band(*expected, GREY, opacity=0.25, name="95 % if right"))
    ends = [min(table["confidence"].min(), table["frequency"].min()), 1.0]
    figure.add_scatter(
        x=ends, y=ends, mode="lines", line={"color": GREY, "dash": "dot", "width": 1.4}, hoverinfo="skip", name="right"
    )
    figure.add_scatter(
        x=table["confidence"].tolist(),
        y=table["frequency"].tolist(),
        mode="lines+markers",
        line={"color": BLUE, "width": 1.5},
        marker={"size": (6 + 18 * (table["rows"] / table["rows"].max()) ** 0.5).tolist()},
        customdata=table["rows"].tolist(),
        hovertemplate="stated %{x:.3f}, came true %{y:.3f} (%{customdata:,} rows)<extra></extra>",
        name="bins",
    )
    text = title if title is not None else "Stated confidence and how often it came true"
    figure.update_layout(
        template=LIGHT,
        title={"text": text if note is None else f"{text}<br><sup>{plain(note)}</sup>"},
        height=420,
        xaxis={"title": {"text": "stated confidence"}},
        yaxis={"title": {"text": "share that came true"}},
    )
    return figure

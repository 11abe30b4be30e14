"""Intervals along a line, drawn as a band or as arms of its points."""

from typing import Any

import pandas as pd
import plotly.graph_objects as go


def band(
    x: pd.Series | pd.Index, low: pd.Series, high: pd.Series, colour: str, *, opacity: float = 0.2, **shown: Any
) -> go.Scatter:
    """The area between low and high over x; without a legend unless `shown` (Plotly's options) names it.

    colour: as "#2f7fc1".
    """
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return go.Scatter(
        x=[*x, *x[::-1]],
        y=[*high, *low[::-1]],
        mode="lines",
        line={"width": 0},
        fill="toself",
        fillcolor=f"rgba({red},{green},{blue},{opacity:g})",
        hoverinfo="skip",
        **{"showlegend": "name" in shown, **shown},
    )


def arms(rows: pd.DataFrame, value: str, **shown: Any) -> dict[str, Any] | None:
    """Error bars of a column from `<value>_low` and `<value>_high`; None where the table lacks one. shown: Plotly's
    options, such as width."""
    if not {f"{value}_low", f"{value}_high"} <= set(rows.columns):
        return None
    above, below = rows[f"{value}_high"] - rows[value], rows[value] - rows[f"{value}_low"]
    return {"type": "data", "symmetric": False, "array": above.tolist(), "arrayminus": below.tolist(), **shown}

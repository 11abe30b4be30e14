"""An interval along a line, drawn as a band."""

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

"""Colours, axis labels and the light and dark look that every figure shares.

Colours hold for the common kinds of colour blindness and on white and on dark ground: blue and orange (after Okabe and
Ito 2008) for series, red-white-blue for what has a middle (ColorBrewer RdBu), cividis for what has none (Nunez,
Anderton, Renslow 2018). A figure is drawn in the light look; a page that may be dark swaps `layout.template`.
"""

import html
import math

import plotly.graph_objects as go

BLUE, ORANGE, GREEN, PINK = "#2f7fc1", "#d9730d", "#2a9d6f", "#b0609a"
# shuffled labels, chance and marks; and the line that a finding has to pass
GREY, NULL = "#848b94", "#c43d3d"
DIVERGING, SEQUENTIAL = "RdBu", "Cividis"
# the same red and blue around a dark middle; a page with dark ground takes it from the figure's meta
DIVERGING_ON_DARK = ((0.0, "#ffa488"), (0.25, "#b84e3e"), (0.5, "#252a31"), (0.75, "#2f70b0"), (1.0, "#8fd2ff"))

# the value of no effect, the middle of the colour scale; for accuracy it holds when classes are of equal size.
# columns without one are sequential
MIDPOINT = {
    "auroc": 0.5,
    "r2": 0.0,
    "control_r2": 0.0,
    "ridge_auroc": 0.5,
    "accuracy": 0.5,
    "balanced_accuracy": 0.5,
    "control_auroc": 0.5,
    "control_accuracy": 0.5,
    "selectivity": 0.0,
}
_LABEL = {
    "auroc": "AUROC",
    "r2": "R2",
    "control_r2": "R2 on shuffled labels",
    "ridge_r2": "R2 of the ridge probe",
    "control_task_auroc": "AUROC on a label per token",
    "bits": "bits per row",
    "accuracy": "accuracy",
    "control_auroc": "AUROC on shuffled labels",
    "control_accuracy": "accuracy on shuffled labels",
    "selectivity": "selectivity",
    "ridge_auroc": "AUROC of the ridge probe",
    "p_best_site": "p against the best-site null",
    "resid_post": "residual stream",
    "z": "heads",
}


def label_of(name: str) -> str:
    """A column or site kind in words, safe to show: a name that is not ours keeps its spelling."""
    return _LABEL.get(name, plain(name.replace("_", " ")))


def plain(text: object) -> str:
    """Text that Plotly shows as it stands: it would take tags such as `<b>` and `<a>` for markup otherwise."""
    return html.escape(str(text), quote=False)


def symmetric_range(values, midpoint: float) -> tuple[float, float]:
    """A range centred on the midpoint that holds every finite value, and has some width if all of them equal it."""
    reach = max((abs(value - midpoint) for value in values if math.isfinite(value)), default=0.0) or 0.01
    return midpoint - reach, midpoint + reach


def colour_layout(name: str, values) -> dict:
    """Layout entries that colour a heat map of the column `name`: diverging about its midpoint if it has one."""
    bar = {"thickness": 12, "outlinewidth": 0, "nticks": 6, "xpad": 6}
    if name not in MIDPOINT:
        return {"coloraxis": {"colorscale": SEQUENTIAL, "colorbar": bar}}
    low, high = symmetric_range(values, MIDPOINT[name])
    return {
        "coloraxis": {"colorscale": DIVERGING, "cmin": low, "cmax": high, "colorbar": bar},
        "meta": {"colorscale_on_dark": DIVERGING_ON_DARK},
    }


def _look(*, text: str, line: str, grid: str, ground: str) -> go.layout.Template:
    axis = {
        "linecolor": line,
        "tickcolor": line,
        "gridcolor": grid,
        "zeroline": False,
        "showline": True,
        "ticks": "outside",
        "ticklen": 4,
        "automargin": True,
        "title": {"standoff": 8},
    }
    return go.layout.Template(
        layout={
            "font": {"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 13, "color": text},
            "title": {"x": 0, "xref": "paper", "xanchor": "left", "font": {"size": 15}},
            "paper_bgcolor": ground,
            "plot_bgcolor": "rgba(0,0,0,0)",
            "colorway": [BLUE, ORANGE, GREY],
            "xaxis": axis,
            "yaxis": axis,
            "hoverlabel": {
                "bgcolor": ground,
                "bordercolor": line,
                "font": {"color": text, "size": 13},
                "align": "left",
            },
            "legend": {"orientation": "h", "x": 0, "xanchor": "left", "yref": "container", "y": 0, "yanchor": "bottom"},
            "margin": {"l": 48, "r": 12, "t": 48, "b": 44},
        }
    )


LIGHT = _look(text="#1f2328", line="#9aa1a9", grid="#e6e8eb", ground="#ffffff")
DARK = _look(text="#e6e8eb", line="#6b727b", grid="#2c3138", ground="#16181d")

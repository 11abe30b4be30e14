"""What steering does by strength: targets as lines with intervals, the side effect as a band below."""

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from microtome.figures.band import band
from microtome.figures.theme import BLUE, GREEN, GREY, LIGHT, NULL, ORANGE, PINK, label_of, plain

_COLOURS = (BLUE, ORANGE, GREEN, PINK)


def dose_response(
    table: pd.DataFrame,
    targets: Sequence[str],
    *,
    side_effect: str = "kl",
    limit: float | None = None,
    title: str = "Dose and response",
) -> go.Figure:
    """A panel per target over strength, one line per method, and one of the side effect with its limit.

    table: strength, the targets and the side effect; where there are, `method`, and `<name>_low`, `<name>_high`. The
    row of strength 0 (or NaN: the unsteered model) belongs to every method.

    Raises KeyError for a missing column, ValueError for no or more than four targets or methods.
    """
    if missing := [name for name in ("strength", *targets, side_effect) if name not in table.columns]:
        raise KeyError(f"the table has no column {missing}; it has {list(table.columns)}.")
    table = table.assign(strength=table["strength"].fillna(0.0).astype(float))
    if "method" not in table.columns:
        table = table.assign(method="steered")
    zero, rest = table[table["strength"] == 0], table[table["strength"] != 0]
    methods = list(dict.fromkeys(rest["method"]))
    if not 1 <= len(methods) <= len(_COLOURS) or not 1 <= len(targets) <= 4:
        raise ValueError(f"{len(methods)} methods, {len(targets)} targets: give one to four of each.")
    shown = [*targets, side_effect]
    figure = make_subplots(rows=len(shown), cols=1, shared_xaxes=True, vertical_spacing=0.05)
    for number, name in enumerate(shown, start=1):
        for method, colour in zip(methods, _COLOURS, strict=False):
            rows = pd.concat([zero, rest[rest["method"] == method]]).sort_values("strength")
            if f"{name}_low" in rows.columns:
                figure.add_trace(
                    band(rows["strength"], rows[f"{name}_low"], rows[f"{name}_high"], colour), row=number, col=1
                )
            figure.add_trace(
                go.Scatter(
                    x=rows["strength"],
                    y=rows[name],
                    mode="lines+markers",
                    line={"color": colour, "width": 2},
                    name=plain(method),
                    legendgroup=plain(method),
                    showlegend=number == 1 and len(methods) > 1,
                    hovertemplate="strength %{x:.3g}: %{y:.3f}",
                ),
                row=number,
                col=1,
            )
        if len(zero):
            level = float(zero[name].iloc[0])
            figure.add_hline(y=level, line={"color": GREY, "dash": "dot", "width": 1.2}, row=number, col=1)
        figure.update_yaxes(title={"text": said(name)}, row=number, col=1)
    if limit is not None:
        figure.add_hline(y=limit, line={"color": NULL, "dash": "dash", "width": 1.4}, row=len(shown), col=1)
    figure.update_xaxes(title={"text": "strength"}, row=len(shown), col=1)
    figure.update_layout(template=LIGHT, title={"text": plain(title)}, height=120 + 190 * len(shown))
    return figure


_SAID = {
    "kl": "KL, nats",
    "independent_probe": "independent probe",
    "vader_same_source": "VADER (same source)",
    "word_odds": "log odds of words",
    "perplexity": "perplexity",
    "repetition": "repetition",
    "mc_accuracy": "multiple choice",
}


def said(name: str) -> str:
    """A column of an evaluation in words."""
    stem = name.removesuffix("_gain")
    words = _SAID.get(stem, label_of(stem))
    return words if stem == name else f"gain in {words}"

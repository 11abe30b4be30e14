"""A map of one number per head: layer by head, colour centred on the value of no effect.

Red is below the middle, blue above it (0.5 for AUROC and accuracy, 0 for selectivity), the range symmetric. A cross
marks the heads that do not stand out from the best site of a permuted labelling: of 270 heads the best is above chance
by luck alone, so a blue cell with a cross is no finding.
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from microtome.figures.sweep_rows import described, rows_of_kind
from microtome.figures.theme import GREY, LIGHT, colour_layout, label_of

_CELL_PIXELS = 22


def head_map(
    table: pd.DataFrame,
    *,
    value: str = "auroc",
    kind: str = "z",
    layers_on: str = "x",
    significance: float = 0.05,
    title: str | None = None,
) -> go.Figure:
    """Heat map of `value` over the heads of a site kind.

    table: one row per probe, as a sweep gives it. value: the column drawn. layers_on: "x" (wide) or "y" (tall).
    significance: heads with p_best_site at or above it get a cross; where p is missing there is none. title: above the
    map; None writes the value's name.
    Raises what `rows_of_kind` does; ValueError if the kind has no heads or for another `layers_on`.
    """
    if layers_on not in ("x", "y"):
        raise ValueError(f"layers_on is {layers_on!r}. Give 'x' for a wide map or 'y' for a tall one.")
    rows = rows_of_kind(table, kind, value)
    if (rows["head"] < 0).any():
        raise ValueError(f"kind {kind!r} has rows without a head, so it has no map. Draw it with layer_curve.")
    # layers are squeezed together when some were not captured, and named on the axis
    numbers = np.sort(rows["layer"].unique())
    layers, heads = np.arange(len(numbers)), np.arange(rows["head"].max() + 1)
    rows = rows.assign(layer=np.searchsorted(numbers, rows["layer"]), named_layer=rows["layer"])
    values = np.full((len(heads), len(layers)), np.nan)
    texts = np.full(values.shape, "", dtype=object)
    at = rows["head"].to_numpy(), rows["layer"].to_numpy()
    values[at] = rows[value].to_numpy(dtype=float)
    texts[at] = [described(row, value) for _, row in rows.assign(layer=rows["named_layer"]).iterrows()]
    wide = layers_on == "x"
    figure = go.Figure(
        go.Heatmap(
            x=layers if wide else heads,
            y=heads if wide else layers,
            z=values if wide else values.T,
            hovertext=(texts if wide else texts.T).tolist(),
            hoverinfo="text",
            hoverongaps=False,
            xgap=1,
            ygap=1,
            coloraxis="coloraxis",
        )
    )
    if "p_best_site" in rows.columns:
        unproved = rows[rows["p_best_site"] >= significance]
        figure.add_scatter(
            x=unproved["layer" if wide else "head"],
            y=unproved["head" if wide else "layer"],
            mode="markers",
            marker={"symbol": "x-thin", "size": 6, "line": {"width": 1, "color": GREY}},
            name=f"does not beat the best-site null (p ≥ {significance:g})",
            hoverinfo="skip",
            showlegend=len(unproved) > 0,
        )
    layer_axis, head_axis = _axis("layer", len(layers)), _axis("head", len(heads))
    if len(numbers) <= numbers[-1]:
        layer_axis |= {"tickvals": layers.tolist(), "ticktext": [str(number) for number in numbers]}
    across, down = (layer_axis, head_axis) if wide else (head_axis, layer_axis)
    height = int(np.clip(_CELL_PIXELS * (len(heads) if wide else len(layers)), 90, 660))
    figure.update_layout(
        template=LIGHT,
        title={"text": title if title is not None else f"{label_of(value)} of each head ({kind})"},
        height=height + 140,
        xaxis=across,
        # number 0 on top, as in a printed matrix
        yaxis=down | {"range": down["range"][::-1]},
        **colour_layout(value, values.ravel().tolist()),
    )
    return figure


def _axis(name: str, count: int) -> dict:
    # few ticks may fall between whole numbers when Plotly chooses the step
    step = {"dtick": 1, "tick0": 0} if count <= 12 else {}
    return {"title": {"text": name}, "showgrid": False, "tickangle": 0, "range": [-0.5, count - 0.5], **step}

"""A map of one number per pair of depths: source down, target across, as a table of pairs gives it.

Cells of pairs that the table lacks stay empty; the diagonal, outlined, is a site with itself. Between two models, whose
sites are named "model/site", rows and columns may differ in number and there is no diagonal. R2 is coloured about 0,
and what lies far below (an identity between depths of unlike scale has R2 of minus hundreds) is drawn as the end of the
scale and told in full under the pointer.
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from microtome.figures.theme import GREY, LIGHT, colour_layout, label_of, plain

_CELL_PIXELS = 20
_LABEL = {
    "r2_vw": "R2, variance-weighted",
    "r2_ua": "R2, mean of channels",
    "r2_wh": "R2, whitened",
    "r2_increment": "R2 of the increment",
    "identity_r2_vw": "R2 of the identity",
    "shift_r2_vw": "R2 of the identity plus shift",
    "scale_r2_vw": "R2 of a scale per channel",
    "ceiling": "canonical ceiling",
    "above_edge": "directions carried",
    "identity_efficiency": "efficiency of the identity",
    "back_r2_vw": "R2 back, variance-weighted",
    "back_r2_wh": "R2 back, whitened",
    "beyond_r2_vw": "R2 beyond the token's embedding",
    "lexical_r2_vw": "R2 of the token's embedding",
    "shuffled_r2_vw": "R2 of shuffled documents",
    "cka": "linear CKA",
    "cka_null": "linear CKA by chance",
    "cka_two": "linear CKA across shards",
    "canonical": "mean squared canonical correlation",
    "procrustes": "R2 of a rotation",
}
_SHOWN_WITH = (
    "r2_vw",
    "back_r2_vw",
    "r2_increment",
    "identity_r2_vw",
    "lexical_r2_vw",
    "cka",
    "cka_null",
    "strength",
    "count",
)


def layer_pairs(
    table: pd.DataFrame, *, value: str = "r2_vw", floor: float | int | None = -1.0, title: str | None = None
) -> go.Figure:
    """Heat map of `value` over pairs of sites.

    table: columns `source`, `target` and the value, one row per pair, sites in the order of their first appearance as a
    source, then as a target. floor: colours end here below; None for the table's own range. title: above the map; None
    writes the value's name.
    Raises KeyError for a missing column; ValueError for an empty table, a pair that is there twice, or a value that is
    no number.
    """
    if missing := [name for name in ("source", "target", value) if name not in table.columns]:
        raise KeyError(f"the table has no column {missing}; it has {list(table.columns)}.")
    if table.empty:
        raise ValueError("the table has no rows. Pass one row per pair of source and target.")
    if not pd.api.types.is_numeric_dtype(table[value]):
        numeric = [name for name in table.columns if pd.api.types.is_numeric_dtype(table[name])]
        raise ValueError(f"column {value!r} holds no numbers. Draw one of {numeric}.")
    twice = table[table.duplicated(["source", "target"])]
    if not twice.empty:
        pair = tuple(twice.iloc[0][["source", "target"]])
        raise ValueError(f"the pair {pair} has several rows. Pass one row per pair: one stratum, one method.")
    names = list(dict.fromkeys([*table["source"], *table["target"]]))
    sources = [name for name in names if name in set(table["source"])]
    targets = [name for name in names if name in set(table["target"])]
    down, across = ({name: i for i, name in enumerate(some)} for some in (sources, targets))
    values = np.full((len(sources), len(targets)), np.nan)
    texts = np.full(values.shape, "", dtype=object)
    for row in table.to_dict("records"):
        at = down[row["source"]], across[row["target"]]
        values[at], texts[at] = row[value], _told(row, value)
    drawn = values if floor is None else np.maximum(values, floor)
    figure = go.Figure(
        go.Heatmap(
            z=drawn,
            hovertext=texts.tolist(),
            hoverinfo="text",
            hoverongaps=False,
            xgap=1,
            ygap=1,
            coloraxis="coloraxis",
        )
    )
    for name in set(sources) & set(targets):
        x, y = across[name], down[name]
        figure.add_shape(type="rect", x0=x - 0.5, x1=x + 0.5, y0=y - 0.5, y1=y + 0.5, line={"color": GREY, "width": 1})
    figure.update_layout(
        template=LIGHT,
        title={"text": title if title is not None else f"{_label(value)} from depth to depth"},
        height=int(np.clip(_CELL_PIXELS * len(sources), 120, 720)) + 160,
        xaxis=_axis("to", targets),
        yaxis=_axis("from", sources) | {"autorange": "reversed"},
        **colour_layout("r2" if "r2" in value else value, drawn.ravel().tolist()),
    )
    return figure


def _label(name: str) -> str:
    return _LABEL.get(name, label_of(name))


def _told(row: dict, value: str) -> str:
    """`resid_pre.0 → resid_post.3`, the value, and what else is known of the pair."""
    text = f"{plain(row['source'])} → {plain(row['target'])}<br>{_label(value)} {row[value]:.3f}"
    others = [name for name in _SHOWN_WITH if name != value and name in row and not pd.isna(row[name])]
    return text + "".join(f"<br>{_label(name)} {row[name]:.3g}" for name in others)


def _axis(title: str, names: list) -> dict:
    """Of one model's sites with its name in the title, not at every tick."""
    models = {name.partition("/")[0] for name in map(str, names) if "/" in name}
    if len(models) == 1 and all("/" in str(name) for name in names):
        title, names = f"{title} {plain(models.pop())}", [str(name).partition("/")[2] for name in names]
    # every so many names, so that they do not run into each other
    step = max(1, round(len(names) / 16))
    ticks = {"tickvals": list(range(0, len(names), step)), "ticktext": [plain(name) for name in names[::step]]}
    return {"title": {"text": title}, "showgrid": False, **ticks}

"""Read a sweep's table for drawing: the rows of one site kind, checked, and the sentence that a cell or a point shows.

Columns used: kind, layer, head (missing for a site without heads), the value drawn and, where they are there, its
`_low` and `_high`, control_auroc, p_best_site and the rest: what a table lacks is left out of the sentence.
"""

import pandas as pd

from microtome.figures.theme import label_of


def rows_of_kind(table: pd.DataFrame, kind: str, value: str) -> pd.DataFrame:
    """The kind's rows, layer and head as integers (head -1 where missing), sorted.

    Raises KeyError for a column that the table lacks; ValueError if it has no such kind, a value that is no number,
    rows without a layer, or two rows for one layer and head.
    """
    if missing := [name for name in ("kind", "layer", "head", value) if name not in table.columns]:
        raise KeyError(f"the table has no column {missing}; it has {list(table.columns)}. Pass the table of a sweep.")
    if not pd.api.types.is_numeric_dtype(table[value]):
        numeric = [name for name in table.columns if pd.api.types.is_numeric_dtype(table[name])]
        raise ValueError(f"column {value!r} holds no numbers. Draw one of {numeric}.")
    rows = table[table["kind"] == kind]
    if rows.empty:
        raise ValueError(f"the table has no rows of kind {kind!r}; its kinds are {sorted(set(table['kind']))}.")
    if rows["layer"].isna().any():
        raise ValueError(
            f"kind {kind!r} has rows without a layer, so it cannot be drawn by layer. Choose another kind."
        )
    rows = rows.assign(layer=rows["layer"].astype(int), head=rows["head"].fillna(-1).astype(int))
    twice = rows[rows.duplicated(["layer", "head"])]
    if not twice.empty:
        layer, head = twice.iloc[0][["layer", "head"]]
        raise ValueError(f"kind {kind!r} has several rows for layer {layer}, head {head}. Pass one row per site.")
    return rows.sort_values(["layer", "head"])


def described(row: pd.Series, value: str) -> str:
    """`L5H3  AUROC 0.81 [0.78, 0.84], control 0.51, p 0.001`, and a second line of what else the row tells."""
    place = f"L{row['layer']}" + (f"H{row['head']}" if row["head"] >= 0 else "")
    parts = [f"{label_of(value)} {_with_interval(row, value)}"]
    control = f"control_{value}"
    if _has(row, control):
        parts.append(f"control {_with_interval(row, control)}")
    if _has(row, "p_best_site"):
        parts.append(f"p {row['p_best_site']:.3g}")
    others = [
        f"{label_of(name)} {_with_interval(row, name)}"
        for name in ("auroc", "accuracy", "selectivity")
        if name != value and _has(row, name)
    ]
    return f"<b>{place}</b>  " + ", ".join(parts) + ("<br>" + ", ".join(others) if others else "")


def _has(row: pd.Series, name: str) -> bool:
    return name in row.index and not pd.isna(row[name])


def _with_interval(row: pd.Series, name: str) -> str:
    text = f"{row[name]:.2f}"
    if _has(row, f"{name}_low") and _has(row, f"{name}_high"):
        text += f" [{row[f'{name}_low']:.2f}, {row[f'{name}_high']:.2f}]"
    return text

"""A label column as the target of a probe, and the rows that are probed: without missing labels, at most so many.

    {column: c}                   two values, the larger is positive, as in a sweep; other names: their classes
    {column: c, positive: p}      c = p against every other value
    {column: c, above: a}         c > a; the median is that of all rows that have the label
    {column: c, target: numbers}  the numbers themselves; target: classes makes classes of whole numbers

The median is taken before rows are drawn, so that a limit on the rows does not move it. Beware: with many equal numbers
no more than half of the rows, and perhaps far fewer, are above the median.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Int64, Shaped

from microtome.app.grid_config import LabelSettings
from microtome.probes.target import Kind, target_of

_SHOWN = 8


@dataclass(frozen=True, eq=False)
class GridLabel:
    """rows: numbers of the rows that have the label, ascending. values: of each of those. says: plain values."""

    rows: Int64[np.ndarray, " row"]
    values: Shaped[np.ndarray, " row"]
    kind: Kind
    says: dict


def grid_label(values: pd.Series, label: LabelSettings) -> GridLabel:
    """The rows that have the label, and what a probe is to tell of them. A missing value is None or NaN.

    Raises ValueError for a column that is empty or holds one value, or numbers of which nothing is said; TypeError for
    text where `above` or `target: numbers` needs numbers.
    """
    column = f"label {label.column!r}"
    rows = np.flatnonzero(values.notna().to_numpy())
    if not len(rows):
        raise ValueError(f"{column} is missing in all {len(values)} rows. Name another column.")
    known = values.iloc[rows].infer_objects()
    kind: Kind = "binary"
    if label.positive is not None:
        found, says = _one_against_others(known, label.positive, column)
    elif label.above is not None:
        found, says = _above(known, label.above, column)
    elif known.nunique() == 1:
        raise ValueError(f"{column} is {known.iloc[0]!r} in every row that has it; a probe needs both classes.")
    elif label.target == "numbers":
        _refuse_names(known, column, "target: numbers")
        kind, found = "numbers", known.to_numpy(dtype=np.float64)
        says = {"numbers": f"{found.min():g} to {found.max():g}"}
    else:
        kind, found, says = _classes(known, label, column)
    return GridLabel(rows.astype(np.int64), found, kind, {"column": label.column, **says})


def draw_groups(groups: np.ndarray, *, rows: int, seed: int) -> Int64[np.ndarray, " row"]:
    """Numbers of at most `rows` rows, ascending: groups in random order, as many as fit, each whole.

    Raises ValueError if the first group drawn is larger than that.
    """
    codes = pd.factorize(groups)[0]
    sizes = np.bincount(codes)
    order = np.random.default_rng(seed).permutation(len(sizes))
    kept = order[np.cumsum(sizes[order]) <= rows]
    if not len(kept):
        raise ValueError(
            f"rows: {rows} does not hold one whole group; the one that was drawn has {sizes[order[0]]} rows. Allow "
            "more rows, or name a finer group."
        )
    return np.flatnonzero(np.isin(codes, kept)).astype(np.int64)


def _classes(known: pd.Series, label: LabelSettings, column: str) -> tuple[Kind, np.ndarray, dict]:
    n_values = known.nunique()
    if n_values > 2 and label.target is None and pd.api.types.is_numeric_dtype(known):
        name = column.removeprefix("label ")
        raise ValueError(
            f"{column} has {n_values} values ({_values(known)}). Write {{column: {name}, target: numbers}} (--target "
            f"numbers), {{column: {name}, above: median}} (--above median), {{column: {name}, positive: ONE OF THEM}} "
            f"(--positive CLASS) or {{column: {name}, target: classes}} (--target classes)."
        )
    kind: Kind = "binary" if n_values == 2 else "classes"
    found = target_of(known, n_rows=len(known), kind=kind)
    names = [str(value) for value in found.classes]
    if kind == "binary":
        return kind, found.values.numpy(), {"positive": names[1], "negative": names[0]}
    return kind, np.array(names)[found.values.numpy()], {"classes": names}


def _refuse_names(known: pd.Series, column: str, way: str) -> None:
    if not pd.api.types.is_numeric_dtype(known) or pd.api.types.is_bool_dtype(known):
        raise TypeError(
            f"{column}: {way!r} needs numbers; its values are {_values(known)}. Use 'positive' (--positive CLASS) for "
            "a class."
        )


def _one_against_others(known: pd.Series, wanted: bool | int | float | str, column: str) -> tuple[np.ndarray, dict]:
    # True == 1 in Python; a class is only what it is written as
    positive = np.array([value == wanted and isinstance(value, bool | np.bool_) == isinstance(wanted, bool)
                         for value in known], dtype=bool)  # fmt: skip
    if not positive.any() or positive.all():
        which = "every row" if positive.all() else "no row"
        hint = (
            " YAML reads a bare yes or no as true or false: put the class in quotes." if wanted in (True, False) else ""
        )
        raise ValueError(f"{column}: {which} is {wanted!r}; its values are {_values(known)}.{hint}")
    return positive, {"positive": str(wanted), "negative": "all others"}


def _above(known: pd.Series, limit: float | str, column: str) -> tuple[np.ndarray, dict]:
    _refuse_names(known, column, "above")
    value = float(known.median() if limit == "median" else limit)
    positive = (known > value).to_numpy(dtype=bool)
    if not positive.any() or positive.all():
        which = "every row" if positive.all() else "no row"
        raise ValueError(f"{column}: {which} is above {value:g} (smallest {known.min():g}, largest {known.max():g}).")
    return positive, {"positive": f"above {value:g}", "negative": f"up to {value:g}"}


def _values(known: pd.Series) -> str:
    values = known.value_counts().index.tolist()
    return ", ".join(repr(value) for value in values[:_SHOWN]) + (", ..." if len(values) > _SHOWN else "")

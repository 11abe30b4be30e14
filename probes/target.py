"""What a probe is to tell from its features: one of two classes, one of several, or a number; checked, as a tensor.

Which of them is read off the labels: two values are two classes, strings and other names several, numbers with a
fraction are numbers. Whole numbers of more than two values could be either, so the caller says which.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from microtome.probes.problem_checks import LARGEST
from microtome.probes.row_keys import as_array, row_keys

Kind = Literal["binary", "classes", "numbers"]
MAIN: Mapping[Kind, str] = {"binary": "auroc", "classes": "auroc", "numbers": "r2"}  # the measure to judge by
_SHOWN = 5


@dataclass(frozen=True, eq=False)
class Target:
    """Labels of rows. values: True for the larger of two; the number of the class, ascending by name; or the number."""

    kind: Kind
    values: Bool[Tensor, " example"] | Int64[Tensor, " example"] | Float64[Tensor, " example"]
    classes: tuple  # what the values stand for, ascending; empty for numbers

    @property
    def names(self) -> tuple[str, ...]:
        """What the stratification's class numbers (`codes`) are called in messages."""
        if self.kind == "numbers":
            return tuple(f"fifth {number + 1} of the numbers" for number in range(5))
        return tuple(repr(value) for value in self.classes)

    @property
    def codes(self) -> Int64[np.ndarray, " example"]:
        """Class numbers by which folds are stratified; numbers by fifths of their order."""
        if self.kind != "numbers":
            return self.values.numpy().astype(np.int64)
        ranks = pd.Series(self.values.numpy()).rank(method="first").to_numpy()
        return np.minimum((ranks - 1) * 5 // len(ranks), 4).astype(np.int64)


def target_of(labels, *, n_rows: int, kind: Kind | None = None) -> Target:
    """The target that labels `[row]` describe.

    Raises ValueError for another length or shape, a missing label (NaN, None), infinity, numbers whose squares overflow
    or vanish, one value only, whole numbers of more than two values without `kind`, and a `kind` that the labels cannot
    be.
    """
    if kind not in (None, *get_args(Kind)):
        raise ValueError(
            f"target={kind!r}; give one of {', '.join(get_args(Kind))}, or None to read it off the labels."
        )
    labels = as_array(labels)
    series = pd.Series(labels).reset_index(drop=True) if np.ndim(labels) == 1 else None
    if series is None or len(series) != n_rows:
        raise ValueError(f"labels has shape {np.shape(labels)}, activations {n_rows} rows. Pass one label per row.")
    if pd.api.types.is_complex_dtype(series):
        raise ValueError("labels are complex numbers. Give one real number per row: their size, angle or a part.")
    if pd.api.types.is_object_dtype(series):
        series = pd.Series(row_keys(series, n_rows, "labels"), dtype=object)
    if series.isna().any():
        raise ValueError(
            f"{int(series.isna().sum())} of {n_rows} labels are missing (first: row {int(series.isna().argmax())}). "
            "Keep the others: acts = acts.select_rows(acts.rows[NAME].notna())."
        )
    codes, values = pd.factorize(series, sort=True)
    shown = ", ".join(repr(value) for value in values[:_SHOWN].tolist()) + (", ..." if len(values) > _SHOWN else "")
    if len(values) < 2:
        raise ValueError(f"labels holds 1 different value ({shown}). A probe needs rows of two classes, or numbers.")
    kind = kind or _kind(series, values, shown)
    if kind == "numbers":
        return Target("numbers", torch.from_numpy(_numbers(series)), ())
    if kind == "binary" and len(values) != 2:
        raise ValueError(
            f"labels holds {len(values)} different values ({shown}); a binary target needs two. Make it two: "
            "labels=(acts.rows[NAME] == VALUE) for a class, labels=(acts.rows[NAME] > 0) for numbers."
        )
    if kind == "binary":
        return Target("binary", torch.from_numpy(codes == 1), tuple(values.tolist()))
    return Target("classes", torch.from_numpy(codes.astype(np.int64)), tuple(values.tolist()))


def _kind(series: pd.Series, values, shown: str) -> Kind:
    if len(values) == 2:
        return "binary"
    if not pd.api.types.is_numeric_dtype(series) or isinstance(series.dtype, pd.CategoricalDtype):
        return "classes"
    if pd.api.types.is_float_dtype(series) and (series % 1 != 0).any():
        return "numbers"
    raise ValueError(
        f"labels holds {len(values)} whole numbers ({shown}), which may be classes or quantities. Say which: "
        'target="classes" or target="numbers"; or make them two: labels=(acts.rows[NAME] > 0).'
    )


def _numbers(series: pd.Series) -> Float64[np.ndarray, " example"]:
    try:
        numbers = series.to_numpy(dtype=np.float64, copy=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"labels are no numbers ({error}). Pass numbers, or target='classes'.") from error
    if not np.isfinite(numbers).all():
        row = int(np.argmin(np.isfinite(numbers)))
        raise ValueError(f"labels[{row}] is {numbers[row]}; a number must be finite. Drop the row or fix the label.")
    if np.abs(numbers).max() > LARGEST or np.ptp(numbers) < 1 / LARGEST:
        raise ValueError(
            f"labels lie from {numbers.min():g} to {numbers.max():g}, whose squares no float can hold. Give them in "
            "another unit."
        )
    return numbers

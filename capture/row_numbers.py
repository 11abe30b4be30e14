"""Which rows of a row table are meant: by a condition, a Boolean per row, a slice, or numbers in the order wanted."""

from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

_QUERY = "\"position > 0 and token == ' the'\""
_NO_QUERY = (NameError, SyntaxError, TypeError, KeyError, ValueError, AttributeError, NotImplementedError)


def row_numbers(rows: pd.DataFrame, which: Any) -> np.ndarray:
    """Their numbers; negative ones count from the end. Arguments and errors are those of `Activations.select_rows`."""
    if isinstance(which, str):
        index = _that_satisfy(rows, which)
    elif isinstance(which, slice):
        index = np.arange(len(rows))[which]
    elif (index := _mask(which)) is None:
        index = _numbers(which)
    elif index.shape != (len(rows),):
        raise ValueError(f"The mask has shape {index.shape}; expected one Boolean per row, ({len(rows)},).")
    if index.dtype == bool:
        index = np.flatnonzero(index)
    if not len(index):
        raise ValueError(f"No row left of {len(rows)}: {which!r:.80} matches none.")
    return index


def _that_satisfy(rows: pd.DataFrame, query: str) -> np.ndarray:
    """A Boolean per row: whether it satisfies a query."""
    try:
        mask = _mask(rows.eval(query))
    except _NO_QUERY as error:
        raise ValueError(
            f"{query!r} is no query over the columns {list(rows)}: {error}. An example: {_QUERY}."
        ) from error
    if mask is None or mask.shape != (len(rows),):
        raise ValueError(f"{query!r} is no condition, true or false of each row. An example: {_QUERY}.")
    return mask


def _mask(which: object) -> np.ndarray | None:
    """Booleans, whatever holds them; None for anything else. Missing ones of a nullable column are False."""
    if isinstance(which, pd.Series | pd.Index) and isinstance(which.dtype, pd.BooleanDtype):
        return np.asarray(which.fillna(False), dtype=bool)
    array = which.cpu().numpy() if isinstance(which, Tensor) else np.asarray(which)
    if array.dtype == object and array.size and pd.api.types.infer_dtype(array.ravel(), skipna=False) == "boolean":
        array = array.astype(bool)
    return array if array.dtype == bool and array.ndim else None


def _numbers(which: object) -> np.ndarray:
    """Row numbers, whatever holds them.

    Raises TypeError for anything else.
    """
    array = which.cpu().numpy() if isinstance(which, Tensor) else np.asarray(which)
    if array.dtype == object and pd.api.types.infer_dtype(array.ravel(), skipna=False) == "integer":
        array = array.astype(np.int64)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(
            f"select_rows({which!r:.60}): expected a condition ({_QUERY}), one Boolean per row, a slice, or a list or "
            "array of row numbers."
        )
    return array.astype(np.int64)

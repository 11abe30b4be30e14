"""Labels per text as a table, checked once for all: one type per column, so that the parts of a store go together."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import pandas as pd
import pyarrow
from torch import Tensor

from microtome.capture.token_labels import ROW_COLUMNS


def label_table(labels: Mapping[str, Any] | pd.DataFrame, n_texts: int) -> pd.DataFrame:
    """Labels as a table with one row per text, in the order of the texts, whatever their index was.

    Raises:
        ValueError: a column that every row table has itself, a name twice, or a column of another length.
        TypeError: a name that is no string, what is no column, or a column that holds values of several types.
    """
    if isinstance(labels, pd.DataFrame) and not labels.columns.is_unique:
        twice = labels.columns[labels.columns.duplicated()][0]
        raise ValueError(f"labels has the column {twice!r} twice. Give each column one name.")
    columns = {}
    for name in labels:
        if not isinstance(name, str):
            raise TypeError(f"labels has a column named {name!r} ({type(name).__name__}); names are strings.")
        if name in ROW_COLUMNS:
            raise ValueError(f"labels has a column {name!r}, which the row table has itself. Give it another name.")
        columns[name] = _column(name, labels[name], n_texts)
    return pd.DataFrame(columns, index=pd.RangeIndex(n_texts))


def labels_sha256(labels: pd.DataFrame | None) -> str | None:
    """SHA-256 of names, types and values, a few thousand rows at a time; None without labels. 0 is not "0"."""
    if labels is None:
        return None
    digest = hashlib.sha256()
    for name in sorted(labels):
        digest.update(json.dumps([name, str(labels[name].dtype)]).encode())
        for first in range(0, len(labels), 4096):
            values = labels[name].iloc[first : first + 4096].tolist()
            digest.update(json.dumps(values, default=repr).encode())
    return digest.hexdigest()


def _column(name: str, values: Any, n_texts: int) -> pd.Series:
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    is_column = (
        hasattr(values, "__len__") and hasattr(values, "__getitem__") and not isinstance(values, str | bytes | dict)
    )
    if not is_column:
        raise TypeError(f"labels[{name!r}] is a {type(values).__name__}; give a list with one entry per text.")
    if len(values) != n_texts:
        raise ValueError(f"labels[{name!r}] has {len(values)} entries for {n_texts} texts; one per text is expected.")
    column = pd.Series(values).reset_index(drop=True)
    try:
        pyarrow.array(column, from_pandas=True)
    except (pyarrow.ArrowException, OverflowError, TypeError, ValueError) as error:
        kinds = sorted({type(value).__name__ for value in column})
        raise TypeError(
            f"labels[{name!r}] cannot be kept in a table: {error} It holds {', '.join(kinds[:5])}; give it one type."
        ) from error
    return column

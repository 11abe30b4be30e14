"""One key per row, as a caller gives it (a list, column, array or tensor of anything hashable), as one flat array."""

from collections.abc import Mapping, Set

import numpy as np
import torch


def as_array(values):
    """Tensors as arrays (bfloat16, which NumPy lacks, as float32); anything else as it is."""
    if isinstance(values, torch.Tensor):
        values = values.float() if values.dtype == torch.bfloat16 else values
        return values.numpy(force=True)
    return values


def row_keys(keys, n_rows: int, name: str) -> np.ndarray:
    """The keys `[row]`; tuples stay whole, lists become tuples.

    Raises TypeError for what has no order of rows (a dictionary, a set) or no length, and for keys that cannot be
    compared by hash; ValueError for another number of keys than rows and for arrays of two axes.
    """
    if isinstance(keys, Mapping | Set):
        raise TypeError(f"{name} is a {type(keys).__name__}, which says nothing of rows; it needs one key per row.")
    keys = as_array(keys)
    keys = keys.to_numpy() if hasattr(keys, "to_numpy") else keys
    if isinstance(keys, str | bytes) or not hasattr(keys, "__len__"):
        raise TypeError(f"{name} is {keys!r} ({type(keys).__name__}); it needs one key per row.")
    if len(keys) != n_rows:
        raise ValueError(f"{name} has {len(keys)} entries for {n_rows} rows. Pass one key per row.")
    if isinstance(keys, np.ndarray) and keys.ndim > 1:
        raise ValueError(f"{name} has shape {keys.shape}; it needs one key per row, shape ({n_rows},).")
    if isinstance(keys, np.ndarray) and keys.dtype != object:
        return keys
    # an object array, so that mixed keys stay what they are and tuples stay whole
    column = np.empty(n_rows, dtype=object)
    column[:] = [tuple(key) if isinstance(key, list) else key for key in keys]
    for row, key in enumerate(column):
        try:
            hash(key)
        except TypeError as error:
            raise TypeError(
                f"{name}[{row}] is {key!r} ({type(key).__name__}), which is no key: rows are told apart by their "
                "keys. Pass numbers, strings or tuples of them."
            ) from error
    return column

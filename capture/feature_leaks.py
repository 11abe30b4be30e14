"""Features that are the label under another name: equal to it, or with one value of its own for each class.

    f tells y:   f[i] = f[j] where y[i] = y[j], and f[i] != f[j] where not       (classes: at most 64)
                 f[i] = y[i]                                                     (numbers)

A probe of such a feature scores 1.0 and says nothing. Beware: a feature that only nearly tells the label is not found.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from torch import Tensor

from microtome.capture.sites import Site

FEWEST_ROWS = 20  # below, a column of two values agrees with a label of two by chance
_MOST_CLASSES = 64
_FIRST = 64  # rows that rule nearly all features out


def features_that_tell(
    arrays: Mapping[Site, Tensor],
    labels: np.ndarray,
    columns: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:
    """Names of features that tell the labels, by `columns` (names by site), else as "site[number]"; mostly none.

    arrays: `[row, ...]` by site. labels: one per row; rows whose label is missing do not count.
    """
    codes, values = pd.factorize(np.asarray(labels))
    rows = np.flatnonzero(codes >= 0)
    if len(rows) < FEWEST_ROWS or len(values) < 2:
        return []
    found = []
    for site, array in arrays.items():
        flat = array.reshape(len(array), -1)
        names = (columns or {}).get(str(site), ())
        for number in _telling(flat, np.asarray(labels), codes, rows, len(values)):
            found.append(names[number] if len(names) == flat.shape[1] else f"{site}[{number}]")
    return list(dict.fromkeys(found))


def said_leaks(names: Sequence[str]) -> str:
    """A sentence that names them."""
    shown = ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return (
        f"{shown} tell{'s' * (len(names) == 1)} the label exactly, as a copy of it does, and so does any probe of it."
    )


def _telling(flat: Tensor, labels: np.ndarray, codes: np.ndarray, rows: np.ndarray, n_values: int) -> list[int]:
    numbers = np.arange(flat.shape[1])
    if n_values <= min(_MOST_CLASSES, len(rows) // 2):
        of_class = _taken(flat, rows[np.unique(codes[rows], return_index=True)[1]])
        ordered = np.sort(of_class, axis=0)
        numbers = numbers[(ordered[1:] != ordered[:-1]).all(axis=0)]
        for some in (rows[:_FIRST], rows):
            numbers = numbers[(_taken(flat, some, numbers) == of_class[codes[some]][:, numbers]).all(axis=0)]
            if not len(numbers):
                break
        return numbers.tolist()
    if labels.dtype.kind not in "fiub":
        return []
    for some in (rows[:_FIRST], rows):
        target = labels[some].astype(np.float64)[:, None]
        numbers = numbers[np.isclose(_taken(flat, some, numbers), target, rtol=1e-6, atol=0).all(axis=0)]
        if not len(numbers):
            break
    return numbers.tolist()


def _taken(flat: Tensor, rows: np.ndarray, numbers: np.ndarray | None = None) -> np.ndarray:
    return (flat[rows] if numbers is None else flat[rows[:, None], numbers]).double().numpy()

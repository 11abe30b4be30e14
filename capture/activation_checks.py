"""Are arrays fit to be activations: axes that agree with the row table and the site, floating point, finite."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from microtome.capture.activation_sites import any_site
from microtome.capture.sites import KINDS, Site
from microtome.capture.stored_tensor import StoredTensor


def as_tensors(arrays: Mapping) -> dict[Site, Tensor]:
    """Named arrays as tensors by site, sharing memory where possible.

    Raises:
        ValueError: no arrays, two names of one site, an array with axes its site does not have.
        TypeError: not floating point.
    """
    if not arrays:
        raise ValueError("arrays is empty: give at least one, as {'backbone.3': array}.")
    tensors: dict[Site, Tensor] = {}
    for name, array in arrays.items():
        site = any_site(name)
        if np.ma.isMaskedArray(array):
            raise TypeError(f"{name!r} is a masked array; what its mask hides would be kept. Fill it, or drop rows.")
        array = array.detach() if isinstance(array, Tensor) else np.asarray(array)
        if site in tensors:
            raise ValueError(f"{name!r} and an earlier name both mean the site {site}. Keep one.")
        if not (array.is_floating_point() if isinstance(array, Tensor) else array.dtype.kind == "f"):
            raise TypeError(f"{name!r} holds {array.dtype}; activations are floating point. Convert it first.")
        if isinstance(array, np.ndarray):  # torch takes neither read-only nor backwards arrays: those are copied
            array = torch.from_numpy(np.require(array, requirements=["C", "W"]))
        tensor = array
        check_axes(site, tensor)
        tensors[site] = tensor
    return tensors


def check_axes(site: Site, tensor: Tensor | StoredTensor) -> None:
    """[row, d], or [row, head, d] for all heads of a site.

    Raises:
        ValueError: another number of axes, or an axis of length zero.
    """
    kind = KINDS.get(site.kind)
    if site.head is not None or (kind is not None and not kind.per_head):
        allowed, expected = (2,), "[row, d]"
    elif kind is not None:
        allowed, expected = (3,), f"[row, head, d] for all heads (one head is named, as in '{site}.0')"
    else:
        allowed, expected = (2, 3), "[row, d] or [row, head, d]"
    if tensor.dim() not in allowed or 0 in tensor.shape:
        raise ValueError(f"{site} has shape {list(tensor.shape)}; expected {expected}, no axis empty.")


def check_rows(rows: pd.DataFrame, tensors: Mapping[Site, Tensor | StoredTensor]) -> None:
    """The row table has the columns every capture has, and as many rows as each tensor.

    Raises:
        ValueError: columns missing, an index that is not 0, 1, ..., a tensor with another number of rows, two sites
            that are spelled alike.
        TypeError: text or position not whole numbers.
    """
    if missing := [name for name in ("text", "position", "token") if name not in rows]:
        raise ValueError(f"rows lacks {missing}; every row has a text (its number), a position (-1: mean) and a token.")
    for name in ("text", "position"):
        if not pd.api.types.is_integer_dtype(rows[name]):
            raise TypeError(f"rows[{name!r}] holds {rows[name].dtype}; expected whole numbers. Rename that column.")
    if not rows.index.equals(pd.RangeIndex(len(rows))):
        raise ValueError("rows has an index other than 0, 1, ...: use rows.reset_index(drop=True).")
    names = [str(site) for site in tensors]
    if alike := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"Two sites are both spelled {alike[0]!r}. Rename one.")
    for site, tensor in tensors.items():
        if len(tensor) != len(rows):
            raise ValueError(f"{site} has {len(tensor)} rows, the row table {len(rows)}. They must agree.")


def check_finite(site: Site, tensor: Tensor, rows: pd.DataFrame | None = None, *, start: int = 0) -> None:
    """No NaN and no infinity. Costs one pass without further memory if all is well. `start`: number of the first row.

    Raises:
        ValueError: names the site, the first such row and, from `rows`, its text, position and token.
    """
    if bool(torch.isfinite(tensor.sum())):  # a NaN or infinity anywhere makes the sum one
        return
    bad = ~torch.isfinite(tensor).flatten(1).all(1)
    if not bool(bad.any()):  # the sum itself overflowed
        return
    first = start + int(bad.nonzero()[0, 0])
    where = f"row {first}"
    if rows is not None:
        row = rows.iloc[first]
        where += f" (text {row['text']}, position {row['position']}, token {row['token']!r})"
    n_rows = int(bad.sum())
    advice = (
        "float16 overflows at 65504: use torch.float32 or torch.bfloat16."
        if tensor.dtype == torch.float16
        else "Look at that text, or pass allow_nonfinite=True to keep it."
    )
    raise ValueError(f"{site} is NaN or infinite in {n_rows} of {len(tensor)} rows, first in {where}. {advice}")

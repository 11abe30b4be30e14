"""What a measurement depends on, as fingerprints that tell whether a record that was kept still answers the question.

A fingerprint is over what a value says: numbers, texts, tensors to the last bit, the fields of dataclasses (those with
`compare=False` hold no settings and are left out) and their class. Code says nothing that could be compared, so that
functions have no fingerprint, and what contains one is measured anew.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import pandas as pd
import xxhash
from torch import Tensor, nn

from microtome.capture.fingerprint import new_fingerprint, tensor_bytes


def fingerprint_of(value: Any) -> str:
    """32 digits that are the same for values that say the same.

    Raises TypeError for a function, a module, or whatever else does not say what it is.
    """
    digest = new_fingerprint()
    _add(digest, value)
    return digest.hexdigest()


def _add(digest: xxhash.xxh3_128, value: Any) -> None:
    """Add the value: its kind, its size and its parts, so that no two values run into one another."""
    if isinstance(value, Tensor):
        _head(digest, f"tensor {value.dtype}", value.numel())
        _add(digest, tuple(value.shape))
        digest.update(tensor_bytes(value))
    elif isinstance(value, np.ndarray):
        _head(digest, f"array {value.dtype}", value.size)
        _add(digest, value.shape)
        _add(digest, value.tolist())
    elif isinstance(value, np.generic):
        _add(digest, value.item())
    elif value is None or isinstance(value, bool | int | float | str | bytes | PurePath | Enum):
        said = f"{type(value).__name__} {value!r}".encode()
        _head(digest, "plain", len(said))
        digest.update(said)
    elif isinstance(value, pd.DataFrame):
        _add(digest, value.to_dict("list"))
    elif isinstance(value, Mapping):
        _head(digest, "mapping", len(value))
        for key, one in value.items():
            _add(digest, key)
            _add(digest, one)
    elif isinstance(value, Sequence):
        _head(digest, "sequence", len(value))
        for one in value:
            _add(digest, one)
    elif isinstance(value, nn.Module | type) or (callable(value) and not is_dataclass(value)):
        raise TypeError(f"{value!r:.60} has no fingerprint: code does not say what it does.")
    elif is_dataclass(value):
        held = {one.name: getattr(value, one.name) for one in fields(value) if one.compare}
        _head(digest, f"{type(value).__module__}.{type(value).__qualname__}", len(held))
        _add(digest, held)
    elif hasattr(value, "__dict__"):
        _head(digest, f"{type(value).__module__}.{type(value).__qualname__}", len(vars(value)))
        _add(digest, vars(value))
    else:
        raise TypeError(f"{value!r:.60} ({type(value).__name__}) has no fingerprint.")


def _head(digest: xxhash.xxh3_128, kind: str, size: int) -> None:
    digest.update(f"<{kind} {size}>".encode())

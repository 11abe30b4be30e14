"""What a result prints as: its fields in a line, tensors and tables by their shapes."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

_SHOWN = 4


def short_repr(self: Any) -> str:
    """`Name(field=..., ...)` of a dataclass, such as `Shortcuts(maps={435 entries}, table=[435 x 38], ...)`."""
    said = ", ".join(f"{field.name}={_said(getattr(self, field.name))}" for field in fields(self) if field.repr)
    return f"{type(self).__name__}({said})"


def _said(value: Any) -> str:
    if isinstance(value, Tensor):
        return repr(value.item()) if value.ndim == 0 else f"{str(value.dtype)[6:]} {list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, pd.DataFrame):
        return f"[{len(value)} x {value.shape[1]}]"
    if isinstance(value, Mapping | Set) and len(value) > _SHOWN:
        return f"{{{len(value)} entries}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_said(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else f"{value[:57]}...")
    if isinstance(value, Sequence):
        shown = [_said(entry) for entry in value[:_SHOWN]]
        return f"({', '.join([*shown, f'... {len(value)} in all'] if len(value) > _SHOWN else shown)})"
    return type(value).__name__ if is_dataclass(value) and len(repr(value)) > 200 else repr(value)

"""What kind of texts a caller gave: strings, message lists or token ids, and one kind only."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from microtome.capture.encoded_text import TextKind

_SHOWN_ROWS = 5


def name_rows(rows: Sequence[int], first_row: int = 0) -> str:
    """The start of a sentence about these rows, counted from `first_row`: "row 3 has", "rows 3, 4 have"."""
    rows = [first_row + row for row in rows]
    shown = ", ".join(map(str, rows[:_SHOWN_ROWS])) + (", ..." if len(rows) > _SHOWN_ROWS else "")
    return f"row {shown} has" if len(rows) == 1 else f"rows {shown} have"


def list_texts(texts: Any) -> list:
    """The texts as a list.

    Raises:
        TypeError: a single text that was not wrapped in a list, or nothing that can be listed.
        ValueError: no texts.
    """
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable) or getattr(texts, "ndim", 1) != 1:
        raise TypeError(f"texts must be a list of texts. Got {texts!r:.80}; wrap a single text: [text].")
    items = list(texts)
    if not items:
        raise ValueError("texts is empty: give at least one text.")
    if isinstance(items[0], Mapping):
        raise TypeError(
            "texts is a list of dicts. Wrap a single message list: [messages]. Images and audio come as one mapping of "
            "model inputs with a leading row axis, not as a list of mappings."
        )
    if _is_integer(items[0]):
        raise TypeError("texts is a single row of token ids; wrap it: [ids].")
    return items


def kind_of_texts(items: list, first_row: int = 0) -> TextKind:
    """The one kind that all of them have; errors number rows from `first_row`.

    Raises:
        TypeError: a row of no accepted kind, or more than one kind.
        ValueError: a row that is an empty list.
    """
    found: dict[TextKind, int] = {}
    for row, item in enumerate(items, start=first_row):
        found.setdefault(_kind_of(item, row), row)
    if len(found) > 1:
        named = ", ".join(f"{kind} (row {row})" for kind, row in found.items())
        raise TypeError(f"texts mix kinds: {named}. Make one call per kind.")
    return next(iter(found))


def list_ids(item: Tensor | np.ndarray | Sequence) -> list[int]:
    """Token ids as plain integers."""
    return [int(index) for index in (item.tolist() if isinstance(item, Tensor | np.ndarray) else item)]


def _kind_of(item: object, row: int) -> TextKind:
    if isinstance(item, str):
        return "strings"
    if isinstance(item, Tensor | np.ndarray):
        if item.ndim != 1 or not _holds_integers(item):
            raise TypeError(
                f"row {row} is a {item.dtype} array of shape {tuple(item.shape)}; token ids are 1-D integers."
            )
        if not len(item):
            raise ValueError(f"row {row} is empty: a text needs at least one token.")
        return "token_ids"
    if isinstance(item, Sequence) and not isinstance(item, bytes):
        if not len(item):
            raise ValueError(f"row {row} is an empty list: a text needs at least one token or message.")
        if all(isinstance(part, Mapping) for part in item):
            return "messages"
        if all(_is_integer(part) for part in item):
            return "token_ids"
    raise TypeError(
        f"row {row} is {item!r:.80} ({type(item).__name__}): expected a string, a list of messages, or token ids. "
        "Images and audio come as one mapping of model inputs with a leading row axis."
    )


def _is_integer(item: object) -> bool:
    if isinstance(item, Tensor):
        return item.dim() == 0 and _holds_integers(item)
    return isinstance(item, int | np.integer) and not isinstance(item, bool)


def _holds_integers(array: Tensor | np.ndarray) -> bool:
    if isinstance(array, np.ndarray):
        return array.dtype.kind in "iu"
    return array.dtype != torch.bool and not array.dtype.is_floating_point and not array.dtype.is_complex

"""A label for each token of a text: from spans of characters, from a function of the text, or given one by one.

    token_labels={"pos": [[(0, 3, "DET"), (4, 8, "NOUN")], ...],          # spans of characters, one list per text
                  "length": token_length,                                  # f(text, offsets) -> one value per token
                  "surprising": [[0, 1, 1, 0], ...]}                       # one value per token, special ones included

A span labels each token whose first character that is no white space lies in it; tokens in no span, special tokens and
means have no label (None). Beware: a word of several tokens gives its label to each of them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Int

from microtome.capture.encoded_text import EncodedText
from microtome.capture.kept_positions import KeptPositions

ROW_COLUMNS = ("text", "position", "token", "span", "string", "token_ids")  # what every row table has
LabelFunction = Callable[[str, Int[np.ndarray, "token 2"]], Sequence]
TokenLabels = Mapping[str, LabelFunction | Sequence | pd.Series | np.ndarray]


def checked_token_labels(token_labels: TokenLabels | None, *, n_texts: int, taken: Sequence[str]) -> TokenLabels:
    """Functions, and lists by place (a Series' index does not count), before any work is done.

    Raises:
        ValueError: a column that is there already, or lists for another number of texts.
        TypeError: neither a mapping, nor in it functions and lists.
    """
    if token_labels is None:
        return {}
    checked: dict[str, LabelFunction | Sequence] = {}
    if not isinstance(token_labels, Mapping):
        raise TypeError(
            f"token_labels is a {type(token_labels).__name__}; give columns by name: a function f(text, offsets), or "
            "one list per text of (start, end, value) spans or of one value per token."
        )
    for name, given in token_labels.items():
        if name in taken or name in ROW_COLUMNS:
            raise ValueError(f"token_labels has a column {name!r}, which the row table has already. Rename it.")
        if not isinstance(name, str):
            raise TypeError(f"token_labels has a column named {name!r} ({type(name).__name__}); names are strings.")
        if callable(given):
            checked[name] = given
            continue
        if isinstance(given, str) or not isinstance(given, Sequence | pd.Series | np.ndarray):
            raise TypeError(
                f"token_labels[{name!r}] is a {type(given).__name__}; give a function or one list per text."
            )
        if len(given) != n_texts:
            raise ValueError(f"token_labels[{name!r}] has {len(given)} entries for {n_texts} texts; give one per text.")
        checked[name] = list(given)
    return checked


def token_label_columns(
    token_labels: TokenLabels, texts: Sequence[EncodedText], kept: KeptPositions, *, first_row: int = 0
) -> dict[str, pd.Series]:
    """The columns of the kept rows. `first_row` is the number of the first of these texts among all.

    Raises:
        ValueError: values of another number than the tokens, spans that overlap, or spans and functions for texts
            without character offsets; the message names the row.
    """
    columns = {}
    for name, given in token_labels.items():
        labels: dict[int, Sequence] = {}
        values: list[Any] = []
        for text, position in zip(kept.text.tolist(), kept.position.tolist(), strict=True):
            if text not in labels:
                labels[text] = _of_text(given, name, texts[text], first_row + text)
            values.append(labels[text][position] if position >= 0 else None)
        columns[name] = label_column(values, name)
    return columns


def kind_of_values(values: Iterable) -> str | None:
    """What the present values of a column are: "text", "a Boolean", "a number" or a type's name; None without any.

    Raises TypeError for several kinds.
    """
    kinds = {_kind(value) for value in values if value is not None}
    if len(kinds) > 1:
        raise TypeError(f"holds {' and '.join(sorted(kinds))}; give every token's label one type")
    return kinds.pop() if kinds else None


def _kind(value: object) -> str:
    if isinstance(value, bool | np.bool_):
        return "a Boolean"
    if isinstance(value, int | float | np.number):
        return "a number"
    return "text" if isinstance(value, str) else type(value).__name__


def label_column(values: list, name: str) -> pd.Series:
    """Values as a column: text with missing entries as such, numbers as floats where some are missing.

    Raises TypeError for values of several kinds.
    """
    plain = [value.item() if isinstance(value, np.generic) else value for value in values]
    present = [value for value in plain if value is not None]
    try:
        kind_of_values(present)
    except TypeError as error:
        raise TypeError(f"token_labels[{name!r}] {error}.") from error
    if not present:  # of no type: another shard may say which
        return pd.Series(plain, dtype="object")
    if all(isinstance(value, str) for value in present):
        return pd.Series(plain, dtype="str")
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in present):
        return pd.Series(plain, dtype="float64") if len(present) < len(plain) else pd.Series(plain)
    return pd.Series(plain, dtype="object" if len(present) < len(plain) else None)


def _of_text(given: LabelFunction | Sequence, name: str, text: EncodedText, row: int) -> Sequence:
    if callable(given):
        values = list(given(*_text_and_offsets(text, name, row)))
    else:
        entry = list(given[row])
        if all(isinstance(part, tuple | list) and len(part) == 3 for part in entry):
            return _by_span(entry, name, *_text_and_offsets(text, name, row), text.is_special.tolist(), row)
        values = entry
    if len(values) != text.length:
        cut = f" ({text.n_dropped} more were cut off)" if text.n_dropped else ""
        raise ValueError(
            f"row {row}: token_labels[{name!r}] gives {len(values)} values for {text.length} tokens{cut}, special ones "
            "included. Give one per token, or (start, end, value) spans of characters."
        )
    return values


def _text_and_offsets(text: EncodedText, name: str, row: int) -> tuple[str, np.ndarray]:
    if text.text is None or text.offsets is None:
        raise ValueError(
            f"row {row} has no character offsets, which token_labels[{name!r}] needs. Give strings and use a fast "
            "tokenizer, or give one value per token."
        )
    return text.text, text.offsets.numpy()


def _by_span(spans: list, name: str, text: str, offsets: np.ndarray, is_special: list[bool], row: int) -> list:
    for start, stop, _ in spans:
        if not 0 <= start < stop <= len(text):
            raise ValueError(
                f"row {row}: a span ({start}, {stop}) of token_labels[{name!r}] is empty or not inside the text's "
                f"{len(text)} characters."
            )
    ordered = sorted(spans, key=lambda span: span[0])
    for (_, stop, _), (start, _, _) in pairwise(ordered):
        if start < stop:
            raise ValueError(f"row {row}: spans of token_labels[{name!r}] overlap at character {start}. Part them.")
    starts = np.array([span[0] for span in ordered], dtype=np.int64)
    values = []
    for (first, stop), special in zip(offsets.tolist(), is_special, strict=True):
        inside = text[first:stop]
        at = first + len(inside) - len(inside.lstrip())
        number = int(np.searchsorted(starts, at, side="right")) - 1
        is_labelled = not special and at < stop and number >= 0 and at < ordered[number][1]
        values.append(ordered[number][2] if is_labelled else None)
    return values

"""Labels of tokens that follow from the text alone: how long a token is, how far into its line, how far from its end.

    length   = characters of the token without the white space around it
    position = characters between the last newline before the token's first character, and that character
    left     = characters from the token's first character up to the newline that ends the line, or the text's end

Each takes a text and the tokens' character offsets, `[token, 2]` (first character, one after the last), and gives one
value per token: what `capture` takes as `token_labels`. The first character counts as the tokenizer has it: of " word"
it is the space. A token that is itself a newline belongs to the line that it ends. A token without characters (special
tokens have the offsets 0, 0) has length 0, and None for the other two.
Beware: tokens of a byte-level tokenizer may be parts of one character; they share its offsets, and so its labels.
"""

import numpy as np
from jaxtyping import Integer


def token_length(text: str, offsets: Integer[np.ndarray, "token two"]) -> list[int]:
    """Characters of each token, white space at its ends left out."""
    return [len(text[start:end].strip()) for start, end in offsets.tolist()]


def line_position(text: str, offsets: Integer[np.ndarray, "token two"]) -> list[int | None]:
    """Characters since the last newline, or since the text's start, at each token's first character."""
    line_starts = np.concatenate([[0], _newlines(text) + 1])
    line = np.searchsorted(_newlines(text), offsets[:, 0], side="left")
    return _unless_empty(offsets[:, 0] - line_starts[line], offsets)


def line_left(text: str, offsets: Integer[np.ndarray, "token two"]) -> list[int | None]:
    """Characters from each token's first character to the end of its line; 0 for the newline itself.

    It depends on the words that follow, as the end of a line does. What is left to the width up to which a text was
    wrapped, which a model could know, is the width less `line_position`.
    """
    line_ends = np.concatenate([_newlines(text), [len(text)]])
    line = np.searchsorted(_newlines(text), offsets[:, 0], side="left")
    return _unless_empty(line_ends[line] - offsets[:, 0], offsets)


def _newlines(text: str) -> np.ndarray:
    return np.array([place for place, character in enumerate(text) if character == "\n"], dtype=np.int64)


def _unless_empty(values: np.ndarray, offsets: np.ndarray) -> list[int | None]:
    is_empty = offsets[:, 0] == offsets[:, 1]
    return [None if empty else value for value, empty in zip(values.tolist(), is_empty.tolist(), strict=True)]

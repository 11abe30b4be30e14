"""Which positions of each text are kept: a policy, resolved to real-token indices.

Positions count real tokens from 0, special tokens included and padding never; negative ones count from the end.

- "last", "first": that token. "all": every token.
- "mean": the mean over tokens, special ones left out unless `include_special`; recorded as position -1.
- 3: that index in every text. [3, -1, 0]: one index per text. [[3, 5], [], ...]: any number per text.
- (start, end): every token that overlaps these characters, in every text; a list of such pairs, or of lists of them:
  per text. A `Span(start, end, pool=...)` instead of a pair keeps the first, the last or the mean of its tokens.

So a tuple of two numbers is a span, and a list always has one entry per text. Beware: a token may carry the space
before its word, and several tokens may share one character; both count as overlap.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from microtome.capture.encoded_text import EncodedText
from microtome.capture.kept_positions import KeptPositions

KEEPS_NOTHING = "positions keeps nothing of any text: every entry is an empty list."
_POLICIES = ("last", "first", "mean", "all")


@dataclass(frozen=True)
class Span:
    """Characters `start` up to, not including, `end` of a text (for message lists, of the rendered text).

    pool: "all" keeps every token that overlaps them, "first" and "last" one of those, "mean" their mean (position -1).
    """

    start: int
    end: int
    pool: str = "all"


class _Block(NamedTuple):
    """Tokens of one text that are kept one by one, or as their mean."""

    tokens: np.ndarray
    is_mean: bool
    span: int  # number of the span among those of its text; -1 without spans


def resolve_positions(
    positions: Any,
    texts: Sequence[EncodedText],
    *,
    include_special: bool = False,
    first_row: int = 0,
    is_part: bool = False,
) -> KeptPositions:
    """What to keep of every text, in the order of texts, and within a text in the order asked for.

    Args:
        positions: a policy, see the module docstring.
        texts: all encoded texts.
        include_special: whether "mean" takes special tokens in.
        first_row: number of the first text in errors, where these are a part of more.
        is_part: whether they are a part of more, of which nothing may be kept.

    Raises:
        TypeError: no policy.
        ValueError: an unknown name; a list of another length than the texts; nothing kept at all; or, naming the row:
            an index out of range, a mean over no token, a span that is empty, reaches beyond the text or covers no
            token, or a span of a text without character offsets.
    """
    if hasattr(positions, "tolist"):  # arrays, tensors, Series and their numbers
        positions = positions.tolist()
    if isinstance(positions, str):
        if positions not in _POLICIES:
            raise ValueError(f"positions={positions!r}: expected one of {', '.join(_POLICIES)}, an index or a span.")
        per_text: list = [positions] * len(texts)
    elif isinstance(positions, int | tuple | Span):
        per_text = [positions] * len(texts)
    elif isinstance(positions, Sequence):
        require_one_each(positions, len(texts))
        per_text = list(positions)
    else:
        raise TypeError(f"positions={positions!r:.80}: expected {', '.join(_POLICIES)}, an index, a span, or a list.")
    blocks = [
        _resolve(wanted, text, row, include_special)
        for row, (wanted, text) in enumerate(zip(per_text, texts, strict=True), start=first_row)
    ]
    if not any(blocks) and not is_part:
        raise ValueError(KEEPS_NOTHING)
    return _flatten(blocks, texts)


def require_one_each(positions: Sequence, n_texts: int) -> None:
    """Raise ValueError for a list of positions that is not as long as the texts."""
    if len(positions) != n_texts:
        raise ValueError(
            f"positions is a list of {len(positions)} entries for {n_texts} texts: a list has one entry per "
            "text (an index, a span, or a list of these). The same for every text: one index, or a (start, end)."
        )


def _resolve(wanted: Any, text: EncodedText, row: int, include_special: bool) -> list[_Block]:
    if isinstance(wanted, str):
        return [_policy(wanted, text, row, include_special)]
    if isinstance(wanted, Span | tuple):
        return [_span(wanted, text, row, 0)]
    if not isinstance(wanted, list):
        return [_Block(np.array([_index(wanted, text, row)]), False, -1)]
    if any(isinstance(part, Span | tuple) for part in wanted):
        return [_span(part, text, row, number) for number, part in enumerate(wanted)]
    tokens = [_index(part, text, row) for part in wanted]
    return [_Block(np.array(tokens), False, -1)] if tokens else []


def _policy(name: str, text: EncodedText, row: int, include_special: bool) -> _Block:
    if name not in _POLICIES:
        raise ValueError(f"row {row}: unknown position {name!r}; expected one of {', '.join(_POLICIES)}.")
    if name == "mean":
        tokens = np.arange(text.length) if include_special else np.flatnonzero(~text.is_special.numpy())
        if not len(tokens):
            raise ValueError(
                f"row {row} holds special tokens only, so its mean is over nothing. Pass include_special=True."
            )
        return _Block(tokens, True, -1)
    tokens = {"first": [0], "last": [text.length - 1], "all": np.arange(text.length)}[name]
    return _Block(np.asarray(tokens), False, -1)


def _index(wanted: Any, text: EncodedText, row: int) -> int:
    if isinstance(wanted, bool) or not hasattr(wanted, "__index__"):
        raise TypeError(f"row {row}: position {wanted!r:.60} is neither an index, a (start, end) nor a Span.")
    index = operator.index(wanted)
    if not -text.length <= index < text.length:
        raise ValueError(
            f"row {row} has {text.length} tokens, special ones included; position {index} is out of range "
            f"({-text.length} to {text.length - 1})."
        )
    return index % text.length


def _span(wanted: Any, text: EncodedText, row: int, number: int) -> _Block:
    if not isinstance(wanted, Span):
        if not isinstance(wanted, tuple) or len(wanted) != 2:
            raise TypeError(
                f"row {row}: expected a span (start, end) or Span(start, end, pool=...). Got {wanted!r:.60}."
            )
        wanted = Span(*map(operator.index, wanted))
    if wanted.pool not in ("mean", "last", "first", "all"):
        raise ValueError(f"row {row}: pool={wanted.pool!r}; expected mean, last, first or all.")
    if text.text is None or text.offsets is None:
        raise ValueError(
            f"row {row} has no character offsets, which spans need. Give strings and use a fast tokenizer, or give "
            "token indices."
        )
    if not 0 <= wanted.start < wanted.end <= len(text.text):
        raise ValueError(
            f"row {row}: span ({wanted.start}, {wanted.end}) is empty or not inside the text's {len(text.text)} "
            "characters."
        )
    tokens = np.flatnonzero(_overlaps(text.offsets.numpy(), wanted.start, wanted.end))
    if not len(tokens):
        cut = f"; {text.n_dropped} tokens of it were cut off" if text.n_dropped else ""
        covered = text.text[wanted.start : wanted.end]
        raise ValueError(f"row {row}: span ({wanted.start}, {wanted.end}), {covered!r:.60}, covers no token{cut}.")
    if wanted.pool in ("first", "last"):
        tokens = tokens[:1] if wanted.pool == "first" else tokens[-1:]
    return _Block(tokens, wanted.pool == "mean", number)


def _overlaps(offsets: np.ndarray, start: int, end: int) -> Bool[np.ndarray, " position"]:
    first, stop = offsets[:, 0], offsets[:, 1]
    return np.maximum(first, start) < np.minimum(stop, end)


def _flatten(blocks: list[list[_Block]], texts: Sequence[EncodedText]) -> KeptPositions:
    text, position, size, span, tokens = [], [], [], [], []
    for row, of_text in enumerate(blocks):
        for block in of_text:
            kept = np.array([-1]) if block.is_mean else block.tokens
            position.append(kept)
            size.append(np.full(len(kept), len(block.tokens) if block.is_mean else 1))
            text.append(np.full(len(kept), row))
            span.append(np.full(len(kept), block.span))
            tokens.append(block.tokens)
    none = [np.zeros(0, dtype=np.int64)]  # where nothing is kept of any text
    return KeptPositions(
        text=np.concatenate(text or none),
        position=np.concatenate(position or none),
        size=np.concatenate(size or none),
        span=np.concatenate(span or none),
        tokens=np.concatenate(tokens or none),
        lengths=np.array([encoded.length for encoded in texts]),
    )

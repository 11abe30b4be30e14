"""Texts made of token ids that ask a head for one thing: repeat what came before, or copy a needle.

Repeated random tokens (Elhage et al. 2021; Olsson et al. 2022, arXiv:2209.11895): two copies of n random tokens. From
position t of the second copy an induction head looks at t - n + 1, the token behind the earlier copy of token t.
Control: 2 n random tokens without a repetition, the same places.

Needle: a key of 3 and a value of 5 random tokens stand early in natural text; the text ends with the key and the value
again. At the positions that say the value's next token, a retrieval head looks at the needle's value (after Wu et al.
2024, arXiv:2404.15574, who ask whether the token that is copied is the one with the largest weight). Control: the same
text with other random tokens where the needle was.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NO_KEY = -1
KEY, VALUE = 3, 5


@dataclass(frozen=True, eq=False)
class MarkedTexts:
    """Texts as token ids, all of one length, and what each query is asked for.

    Attributes:
        queries: positions that count.
        targets: `[query, target]` positions of the keys that it should look at; the first one is the token to copy.
    """

    texts: tuple[tuple[int, ...], ...]
    queries: np.ndarray
    targets: np.ndarray


def ordinary_ids(vocabulary: int, special: Sequence[int]) -> np.ndarray:
    """Every token id that is not special."""
    return np.setdiff1d(np.arange(vocabulary), np.array(list(special), dtype=int))


def repeated_tokens(ids: np.ndarray, *, copy: int, count: int, seed: int, bos: int | None = None) -> MarkedTexts:
    """`count` texts of a random sequence and its copy. Raises ValueError for too few ids to draw without repetition."""
    return _two_halves(ids, copy, count, seed, bos, is_repeated=True)


def unrepeated_tokens(ids: np.ndarray, *, copy: int, count: int, seed: int, bos: int | None = None) -> MarkedTexts:
    """The control: the second half is random too."""
    return _two_halves(ids, copy, count, seed, bos, is_repeated=False)


def _two_halves(
    ids: np.ndarray, copy: int, count: int, seed: int, bos: int | None, *, is_repeated: bool
) -> MarkedTexts:
    if copy < 2 or count < 1:
        raise ValueError(f"copies of {copy} tokens in {count} texts: expected at least 2 and 1.")
    rng, start, texts = np.random.default_rng(seed), int(bos is not None), []
    for _ in range(count):
        # without repetition inside a half, as long as there are ids enough; in the control in the whole text
        first = rng.choice(ids, copy, replace=len(ids) < copy)
        others = np.setdiff1d(ids, first)
        second = first if is_repeated else rng.choice(others if len(others) >= copy else ids, copy)
        texts.append((*([bos] * start), *map(int, first), *map(int, second)))
    queries = start + copy + np.arange(copy)
    return MarkedTexts(tuple(texts), queries, (queries - copy + 1)[:, None])


def needle_texts(
    ids: np.ndarray,
    natural: Sequence[Sequence[int]],
    *,
    length: int,
    count: int,
    seed: int,
    bos: int | None = None,
    with_needle: bool = True,
) -> MarkedTexts:
    """`count` texts of `length` tokens with a needle a quarter from the start; fillers are runs of the natural texts.

    Raises ValueError if no filler fits.
    """
    start, needle = int(bos is not None), KEY + VALUE
    room = length - start - 2 * needle + 1
    if room < 4:
        raise ValueError(f"{length} tokens have no room for a needle of {needle} twice and a filler of 4.")
    stream = np.array([token for text in natural for token in text if token != bos], dtype=int)
    if not len(stream):
        raise ValueError("there are no natural tokens to hide a needle in.")
    rng, texts = np.random.default_rng(seed), []
    before = room // 4
    for number in range(count):
        drawn = rng.choice(ids, needle, replace=len(ids) < needle)
        other = rng.choice(ids, needle)
        filler = np.resize(np.roll(stream, -number * room), room)
        hidden = drawn if with_needle else other
        parts = (filler[:before], hidden, filler[before:], drawn[:-1])
        texts.append((*([bos] * start), *(int(token) for part in parts for token in part)))
    value = start + before + KEY + np.arange(VALUE)
    queries = length - VALUE + np.arange(VALUE)
    # the token to copy first, then the others of the value
    targets = np.stack([np.roll(value, -i) for i in range(VALUE)])
    return MarkedTexts(tuple(texts), queries, targets)

"""Which tokens of a text are written over: a number of them drawn by the text alone, or all; sinks left out.

A draw depends on the seed and the text's token ids, not on the batch, the other texts or the condition: the first n of
one permutation of the tokens that may be chosen, so that the one token of n = 1 is among the five of n = 5. The last
token of a text, behind which nothing is scored, is chosen only with "all". Numbers of tokens beyond what a text offers
leave that text out of every number, so that all numbers are about the same texts.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

At = int | str
ALL = "all"


def checked_positions(at: Sequence[At] | At) -> tuple[At, ...]:
    """Numbers of tokens, or "all", each once.

    Raises:
        ValueError: none, one twice, a number below 1, another word.
    """
    given: tuple[At, ...] = (at,) if isinstance(at, int | str) else tuple(at)
    right = all((one == ALL) if isinstance(one, str) else one >= 1 for one in given)
    if not given or not right or len(set(given)) < len(given):
        raise ValueError(f"at is {at!r}. Give numbers of tokens from 1 on, or 'all', each once, such as (1, 5, 'all').")
    return given


def spliced_tokens(
    allowed: Bool[Tensor, "batch token"],
    has_next: Bool[Tensor, "batch token"],
    input_ids: Int[Tensor, "batch token"],
    is_real: Bool[Tensor, "batch token"],
    at: Sequence[At],
    seed: int,
) -> tuple[dict[At, Bool[Tensor, "batch token"]], Bool[Tensor, " batch"]]:
    """The tokens of each number, and which texts have too few for the largest of them and are left out of all.

    Args:
        allowed: tokens that may be chosen. has_next: those with a token behind them.
        input_ids, is_real: of the batch, padding on either side.
    """
    least = max([1, *(one for one in at if isinstance(one, int))])
    chosen = {one: torch.zeros_like(allowed) for one in at}
    left_out = torch.zeros(len(allowed), dtype=torch.bool)
    for row in range(len(allowed)):
        free = (allowed[row] & has_next[row]).nonzero()[:, 0].cpu().numpy()
        if len(free) < least:
            left_out[row] = True
            continue
        order = _generator(input_ids[row][is_real[row]], seed).permutation(free)
        for one in at:
            if isinstance(one, int):
                chosen[one][row, torch.from_numpy(order[:one])] = True
            else:
                chosen[one][row] = allowed[row]
    return chosen, left_out


def _generator(token_ids: Tensor, seed: int) -> np.random.Generator:
    said: Any = token_ids.long().cpu().numpy().tobytes()
    digest = hashlib.blake2b(said, digest_size=16, salt=seed.to_bytes(16, "little", signed=True)).digest()
    return np.random.default_rng(int.from_bytes(digest))

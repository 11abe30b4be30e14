"""Texts to batches: which texts run together, and how they are padded.

Sorted by length, the texts are cut into runs of neighbours, so that

    sum over batches of (rows x longest row + overhead)

is least, by dynamic programming over the cuts; a batch holds at most `max_tokens` padded tokens. The overhead of a
batch (launching every layer, reading the weights) is counted in tokens. Batches come longest first: what does not fit
into memory fails at once.

Measured on 512 texts of the sentiment set with SmolLM2's tokenizer: padding of 105 % in file-order batches of 16, 17 %
where batches are filled up to 2048 tokens, 3 % here (benchmarks/capture.py times it).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from microtome.capture.encoded_text import EncodedText

# One thread's CPU time of SmolLM2 on a shared machine: 195 tokens/s at 64 padded tokens, 267 at 512, 292 at 1024, 302
# at 2048, 252 at 4096 (length 8, one run); one batch costs 30 to 40 tokens beside its own. Not measured on a GPU.
MAX_TOKENS = 2048
MAX_ROWS = 256
OVERHEAD_TOKENS = 32


@dataclass(frozen=True)
class PaddingRecipe:
    """How a padded batch is laid out so that the model's activations are those without padding.

    Attributes:
        side: where the padding goes.
        position_ids: "cumsum" hands the model `cumsum(mask) - 1`, "none" leaves the numbering to the model.
    """

    side: Literal["left", "right"] = "right"
    position_ids: Literal["none", "cumsum"] = "none"


@dataclass(frozen=True)
class Batch:
    """Some texts, padded to one length.

    Attributes:
        row_ids: which texts these are, as numbers in the caller's list.
        attention_mask: 1 at real tokens, 0 at padding; always there.
        position_ids: None where the recipe leaves them to the model; 0 at padding.
        token_type_ids: None where the tokenizer makes none.
    """

    row_ids: tuple[int, ...]
    input_ids: Int[Tensor, "batch position"]
    attention_mask: Int[Tensor, "batch position"]
    position_ids: Int[Tensor, "batch position"] | None = None
    token_type_ids: Int[Tensor, "batch position"] | None = None

    def model_inputs(self) -> dict[str, Tensor]:
        """The tensors by the names that transformers models take them under."""
        names = ("input_ids", "attention_mask", "position_ids", "token_type_ids")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}


def plan_batches(
    lengths: Sequence[int],
    *,
    max_tokens: int = MAX_TOKENS,
    max_rows: int = MAX_ROWS,
    overhead_tokens: int = OVERHEAD_TOKENS,
) -> list[list[int]]:
    """Divide texts into batches at least cost: each text in exactly one, the longest batch first.

    Args:
        lengths: tokens of every text.
        max_tokens: padded tokens per batch. A text longer than that runs alone.
        max_rows: texts per batch.
        overhead_tokens: what one more batch costs, in tokens. Higher values give fewer, larger batches.

    Returns:
        Numbers of texts, batch by batch.

    Raises:
        ValueError: a length or limit below 1, a negative overhead.
    """
    for name, value, least in (
        ("max_tokens", max_tokens, 1),
        ("max_rows", max_rows, 1),
        ("overhead_tokens", overhead_tokens, 0),
    ):
        if value < least:
            raise ValueError(f"{name}={value}: expected at least {least}.")
    if short := [row for row, length in enumerate(lengths) if length < 1]:
        raise ValueError(f"row {short[0]} has length {lengths[short[0]]}: every text needs at least one token.")
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    cost = np.full(len(order) + 1, np.inf)  # cost[n]: the first n texts in their best batches
    cost[0] = 0
    start = np.zeros(len(order) + 1, dtype=np.int64)  # where the last of those batches begins
    for first, row in enumerate(order):
        longest = lengths[row]
        n_rows = min(max_rows, max(1, max_tokens // longest), len(order) - first)
        ends = slice(first + 1, first + n_rows + 1)
        here = cost[first] + overhead_tokens + longest * np.arange(1, n_rows + 1)
        is_cheaper = here < cost[ends]
        cost[ends][is_cheaper] = here[is_cheaper]
        start[ends][is_cheaper] = first
    batches, end = [], len(order)
    while end:
        batches.append(order[start[end] : end])
        end = int(start[end])
    return batches[::-1]


def make_batch(
    texts: Sequence[EncodedText],
    row_ids: Sequence[int],
    *,
    pad_id: int,
    recipe: PaddingRecipe,
    device: torch.device | str,
) -> Batch:
    """Pad some of the texts to the longest of them.

    Args:
        texts: all encoded texts.
        row_ids: which of them.
        pad_id: what fills the padding; any id of the vocabulary, since the mask says what is real (RoBERTa kinds,
            which read positions off it, need their own: `limits.pad_id`).
    """
    rows = [texts[row] for row in row_ids]
    shape = len(rows), max(row.length for row in rows)
    ids = torch.full(shape, pad_id, dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.long)
    has_types = rows[0].token_type_ids is not None
    types = torch.zeros(shape, dtype=torch.long) if has_types else None
    for place, row in enumerate(rows):
        real = slice(0, row.length) if recipe.side == "right" else slice(shape[1] - row.length, shape[1])
        ids[place, real] = row.token_ids
        mask[place, real] = 1
        if types is not None:
            types[place, real] = row.token_type_ids
    position_ids = (mask.cumsum(1) - 1).clamp(min=0) * mask if recipe.position_ids == "cumsum" else None
    moved = (None if tensor is None else tensor.to(device) for tensor in (ids, mask, position_ids, types))
    return Batch(tuple(row_ids), *moved)

"""Pairs of tokens whose attention weight is wanted: of each text, which row attends to which key, and their pooling.

Positions count real tokens; `in_batch` says where the pairs lie in a padded batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from microtome.capture.encoded_text import EncodedText
from microtome.capture.positions import resolve_positions

Pool = Literal["mean", "max"]
RELATIVE = {"self": 0, "previous": -1}  # keys that lie at a distance from the query


@dataclass(frozen=True)
class TokenPairs:
    """Pairs of tokens of all texts: `row` attends to `key`; real-token positions, ordered by text."""

    text: Int[np.ndarray, " pair"]
    row: Int[np.ndarray, " pair"]
    key: Int[np.ndarray, " pair"]

    @property
    def swapped(self) -> "TokenPairs":
        return TokenPairs(self.text, self.key, self.row)

    def mean_distance(self, n_texts: int) -> Float[np.ndarray, " text"]:
        counts = np.bincount(self.text, minlength=n_texts)
        return np.bincount(self.text, self.row - self.key, minlength=n_texts) / counts


@dataclass(frozen=True)
class BatchPairs:
    """Pairs of one padded batch.

    Attributes:
        queries: `[batch, row]`, the pattern rows that are read; texts with fewer get others.
        text, slot, key: of each pair its text in the batch, its row among `queries`, its column in the padding.
        owner: text x group of each pair.
        n_groups: key groups.
    """

    queries: Int[Tensor, "batch row"]
    text: Int[Tensor, " pair"]
    slot: Int[Tensor, " pair"]
    key: Int[Tensor, " pair"]
    owner: Int[Tensor, " pair"]
    n_groups: int

    def pooled(self, rows: Float[Tensor, "batch head row key"], pool: str) -> Float[Tensor, "batch head group"]:
        """Mean or largest weight of the pairs of each text and group."""
        weights = rows[self.text, :, self.slot, self.key]
        n = len(self.queries) * self.n_groups
        reduced = weights.new_zeros(n, weights.shape[1])
        index = self.owner[:, None].expand_as(weights)
        reduced = reduced.scatter_reduce(0, index, weights, "mean" if pool == "mean" else "amax", include_self=False)
        return reduced.view(len(self.queries), self.n_groups, -1).transpose(1, 2).contiguous()


def tokens_of(name: str, wanted: Any, texts: Sequence[EncodedText]) -> list[np.ndarray]:
    """Real-token positions of each text."""
    wanted = wanted.tolist() if hasattr(wanted, "tolist") else wanted
    if isinstance(wanted, Sequence) and not isinstance(wanted, str | tuple):
        wanted = list(wanted)
    try:
        kept = resolve_positions(wanted, texts)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error
    of_text = np.repeat(kept.text, kept.size)
    tokens = [np.unique(kept.tokens[of_text == text]) for text in range(len(texts))]
    if empty := [text for text, found in enumerate(tokens) if not len(found)]:
        raise ValueError(f"{name}: text {empty[0]} has no token. Every text needs at least one.")
    return tokens


def pairs_of(name: str, wanted: Any, queries: list[np.ndarray], texts: Sequence[EncodedText]) -> TokenPairs:
    """Key tokens (as `row`) and query tokens (as `key`) of every text, all with all or at one distance."""
    if isinstance(wanted, str) and wanted in RELATIVE:
        apart = [(found + RELATIVE[wanted], found) for found in queries]
        pairs = [(key[key >= 0], query[key >= 0]) for key, query in apart]
        if empty := [text for text, (key, _) in enumerate(pairs) if not len(key)]:
            raise ValueError(
                f"keys[{name!r}]: text {empty[0]} has no token before its query token, which is the first."
            )
    else:
        tokens = tokens_of(f"keys[{name!r}]", wanted, texts)
        grids = [np.meshgrid(key, query, indexing="ij") for key, query in zip(tokens, queries, strict=True)]
        pairs = [(key.ravel(), query.ravel()) for key, query in grids]
    text = np.repeat(np.arange(len(pairs)), [len(key) for key, _ in pairs])
    return TokenPairs(text, np.concatenate([key for key, _ in pairs]), np.concatenate([query for _, query in pairs]))


def pairs_in_batch(pairs: list[TokenPairs], row_ids: Sequence[int], mask: Int[Tensor, "batch position"]) -> BatchPairs:
    starts = mask.cpu().long().argmax(1).numpy()  # padding lies on one side
    width = mask.shape[1]
    place_of = {text: place for place, text in enumerate(row_ids)}
    columns: list[list[np.ndarray]] = [[], [], [], []]
    for number, group in enumerate(pairs):
        mine = np.isin(group.text, list(row_ids))
        text = np.array([place_of[t] for t in group.text[mine].tolist()], dtype=np.int64)
        found = (text, group.row[mine] + starts[text], group.key[mine] + starts[text], text * len(pairs) + number)
        for column, part in zip(columns, found, strict=True):
            column.append(part)
    text, row, key, owner = (np.concatenate(parts) for parts in columns)
    used = [np.unique(row[text == place]) for place in range(len(row_ids))]
    most = max(map(len, used))
    queries = np.zeros((len(row_ids), most), dtype=np.int64)
    slots = np.zeros((len(row_ids), width), dtype=np.int64)
    for place, own in enumerate(used):
        queries[place] = np.concatenate([own, np.setdiff1d(np.arange(width), own)[: most - len(own)]])
        slots[place, own] = np.arange(len(own))
    arrays = (queries, text, slots[text, row], key, owner)
    return BatchPairs(*(torch.from_numpy(array.astype(np.int64)).to(mask.device) for array in arrays), len(pairs))

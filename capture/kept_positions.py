"""Kept positions as flat arrays: where they lie in a padded batch, and the row table they become.

A kept row is one token, or the mean of several. Its tokens are `tokens[start : start + size]`, start the sum of the
sizes before it. In a batch, token k of a text is the k-th place where its mask is 1, on whichever side the padding is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from microtome.capture.encoded_text import EncodedText


@dataclass(frozen=True)
class BatchPositions:
    """What to take out of one padded batch. An entry is one token; a kept row consists of one entry, or is a mean.

    Attributes:
        kept_index: number of each kept row in the whole capture.
        row_index, position_index: place of each entry in the batch, padding counted.
        position: real-token position of each kept row; -1 for a mean.
        sizes: entries per kept row, None where each is one token.
        shape: rows and padded length of the batch.
    """

    kept_index: Int[Tensor, " kept"]
    row_index: Int[Tensor, " entry"]
    position_index: Int[Tensor, " entry"]
    position: Int[Tensor, " kept"]
    sizes: Int[Tensor, " kept"] | None
    shape: tuple[int, int]

    def select(self, values: Float[Tensor, "batch position ..."]) -> Float[Tensor, "kept ..."]:
        """The kept rows of a batch's values, as a copy; means are accumulated in float32 or wider.

        Raises:
            ValueError: values of another batch shape.
        """
        if tuple(values.shape[:2]) != self.shape:
            raise ValueError(
                f"These positions are of a batch {self.shape}; the values begin with {tuple(values.shape[:2])}."
            )
        entries = values.flatten(0, 1).index_select(0, self.row_index * self.shape[1] + self.position_index)
        if self.sizes is None:
            return entries
        wide = entries.to(torch.promote_types(entries.dtype, torch.float32))
        owner = torch.repeat_interleave(torch.arange(len(self.sizes), device=self.sizes.device), self.sizes)
        total = wide.new_zeros(len(self.sizes), *wide.shape[1:]).index_add_(0, owner, wide)
        return (total / self.sizes.view(-1, *[1] * (total.dim() - 1))).to(values.dtype)


@dataclass(frozen=True)
class KeptPositions:
    """What is kept of all texts, in the order of the texts.

    Attributes:
        text: number of the text of each kept row.
        position: its real-token position, -1 for a mean.
        size: how many tokens it is the mean of; 1 for a single token.
        span: number of the span among those of its text, -1 where no span was given.
        tokens: real-token indices of all kept rows, one after the other.
        lengths: tokens of every text.
    """

    text: Int[np.ndarray, " kept"]
    position: Int[np.ndarray, " kept"]
    size: Int[np.ndarray, " kept"]
    span: Int[np.ndarray, " kept"]
    tokens: Int[np.ndarray, " entry"]
    lengths: Int[np.ndarray, " text"]

    @property
    def n_kept(self) -> int:
        """Number of kept rows."""
        return len(self.text)

    @cached_property
    def _starts(self) -> tuple[np.ndarray, np.ndarray]:
        """Where each text's kept rows begin, and where each kept row's tokens begin; both with an end marker."""
        of_text = np.searchsorted(self.text, np.arange(len(self.lengths) + 1))
        return of_text, np.concatenate([[0], np.cumsum(self.size)])

    def in_batch(self, row_ids: Sequence[int], attention_mask: Int[Tensor, "batch position"]) -> BatchPositions:
        """Where the kept rows of some texts lie in their padded batch; tensors are on the mask's device.

        Raises:
            ValueError: the mask's real tokens are not as many as the texts have.
        """
        mask = attention_mask.cpu().numpy() != 0
        found, expected = mask.sum(1), self.lengths[list(row_ids)]
        if not np.array_equal(found, expected):
            raise ValueError(
                f"The mask has {found.tolist()} real tokens; texts {list(row_ids)} have {expected.tolist()}."
            )
        places = np.nonzero(mask)[1]  # row by row: token k of batch row b is places[first[b] + k]
        first = np.cumsum(found) - found
        text_start, token_start = self._starts
        kept = [np.arange(text_start[row], text_start[row + 1]) for row in row_ids]
        entries = [np.arange(token_start[text_start[row]], token_start[text_start[row + 1]]) for row in row_ids]
        rows = np.repeat(np.arange(len(entries)), [len(part) for part in entries])
        index, entry = np.concatenate(kept), np.concatenate(entries)
        sizes = self.size[index]
        has_means = bool((self.position[index] < 0).any())

        def on_device(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array.astype(np.int64)).to(attention_mask.device)

        return BatchPositions(
            kept_index=on_device(index),
            row_index=on_device(rows),
            position_index=on_device(places[first[rows] + self.tokens[entry]]),
            position=on_device(self.position[index]),
            sizes=on_device(sizes) if has_means else None,
            shape=(mask.shape[0], mask.shape[1]),
        )

    def table(self, texts: Sequence[EncodedText]) -> pd.DataFrame:
        """One row per kept row: `text`, `position` (-1 for a mean), `token`, and `span` where spans were given.

        A mean over a text has the token "", a mean over a span the characters its tokens cover.
        """
        starts = self._starts[1][:-1]
        columns = (array.tolist() for array in (self.text, self.position, starts, self.size, self.span))
        tokens = [
            texts[text].tokens[position]
            if position >= 0
            else _covered(texts[text], self.tokens[start : start + size], span)
            for text, position, start, size, span in zip(*columns, strict=True)
        ]
        table = pd.DataFrame({"text": self.text, "position": self.position, "token": pd.Series(tokens, dtype="str")})
        return table.assign(span=self.span) if bool((self.span >= 0).any()) else table


def _covered(text: EncodedText, tokens: np.ndarray, span: int) -> str:
    if span < 0 or text.text is None or text.offsets is None:
        return ""
    return text.text[int(text.offsets[tokens[0], 0]) : int(text.offsets[tokens[-1], 1])]

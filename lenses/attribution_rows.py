"""Which logits are split: the places in the texts, and the tokens there.

A place is a position in a text; the logit there is the score of the token that follows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Number
from operator import index
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from microtome.capture.encoded_text import EncodedText

# checked by the functions below, with a message; numbers of numpy and torch are welcome
Positions = Any  # a whole number for all texts, one per text, or several per text
Token = Any  # a string or an id
Tokens = Any  # one for all texts, one per text, or None


@dataclass(frozen=True, eq=False)
class Places:
    """Rows of one batch: which text, which position, and where that is in the padded tensors."""

    texts: Int[np.ndarray, " row"]
    positions: Int[np.ndarray, " row"]
    batch_row: Int[Tensor, " row"]
    column: Int[Tensor, " row"]
    first: Int[Tensor, " batch"]
    mask: Int[Tensor, "batch position"]

    @classmethod
    def of_batch(cls, row_ids: Sequence[int], mask: Int[Tensor, "batch position"], wanted: list[list[int]]) -> "Places":
        """The wanted positions of the texts in a batch."""
        first = mask.argmax(1)
        pairs = [(slot, text, place) for slot, text in enumerate(row_ids) for place in wanted[text]]
        slots, texts, places = (np.array(column, dtype=np.int64) for column in zip(*pairs, strict=True))
        batch_row = torch.from_numpy(slots).to(mask.device)
        return cls(texts, places, batch_row, first[batch_row] + torch.from_numpy(places).to(mask.device), first, mask)

    def pick(self, value: Tensor) -> Tensor:
        """`[batch, position, ...]` to `[row, ...]`."""
        return value[self.batch_row.to(value.device), self.column.to(value.device)]

    @property
    def queries(self) -> Int[Tensor, "batch slot"]:
        """Columns of each text's rows, filled up with its first."""
        counts = torch.bincount(self.batch_row, minlength=len(self.mask))
        filled = torch.zeros(len(self.mask), int(counts.max()), dtype=torch.long, device=self.mask.device)
        filled += self.first[:, None]
        filled[self.batch_row, self.slot] = self.column
        return filled

    @property
    def slot(self) -> Int[Tensor, " row"]:
        """Which of its text's rows each row is; rows of a text follow each other."""
        counts = torch.bincount(self.batch_row, minlength=len(self.mask))
        return torch.cat([torch.arange(int(n), device=self.mask.device) for n in counts])


def wanted_positions(positions: Positions, texts: Sequence[EncodedText]) -> list[list[int]]:
    """Positions of every text, from 0: one for all, one per text, or a list per text; negative from the end.

    Raises:
        ValueError: not one entry per text, or no position of a text.
        IndexError: a position that a text does not have.
        TypeError: positions that are no whole numbers.
    """
    if isinstance(positions, str):
        raise TypeError(
            f"positions={positions!r}: give whole numbers, one for all texts, one each, or a list for each."
        )
    given: list[Any] = [positions] * len(texts) if _is_one(positions) else list(positions)
    if len(given) != len(texts):
        raise ValueError(f"positions has {len(given)} entries for {len(texts)} texts. Pass one for all, or one each.")
    wanted = []
    for number, (entry, text) in enumerate(zip(given, texts, strict=True)):
        places = [_whole(place, "positions") for place in ([entry] if _is_one(entry) else entry)]
        if not places:
            raise ValueError(f"positions names none for text {number}. Leave the text out.")
        if wrong := [place for place in places if not -text.length <= place < text.length]:
            raise IndexError(f"text {number} has {text.length} tokens; there is no position {wrong[0]}.")
        wanted.append([place % text.length for place in places])
    return wanted


def token_numbers(tokens: Tokens, tokenizer: Any, vocab: int, n_texts: int, name: str) -> list[int] | None:
    """A token id for every text; None stays None.

    Raises:
        ValueError: a string that is not one token, an id outside the vocabulary, or not one entry per text.
        TypeError: a string where the model has no tokenizer, or what is no whole number.
    """
    if tokens is None:
        return None
    given = [tokens] * n_texts if _is_one(tokens) else list(tokens)
    if len(given) != n_texts:
        raise ValueError(f"{name} has {len(given)} tokens for {n_texts} texts. Pass one for all, or one each.")
    return [_number(token, tokenizer, vocab, name) for token in given]


def _number(token: Token, tokenizer: Any, vocab: int, name: str) -> int:
    if isinstance(token, str):
        if tokenizer is None:
            raise TypeError(f"{name}={token!r}, but the model has no tokenizer. Pass token ids, or a LoadedModel.")
        ids = tokenizer.encode(token, add_special_tokens=False)
        if len(ids) != 1:
            raise ValueError(
                f"{name}={token!r} is {len(ids)} tokens ({tokenizer.convert_ids_to_tokens(ids)}); a logit belongs to "
                "one. Words inside a sentence mostly begin with a space: ' Paris'."
            )
        return ids[0]
    token = _whole(token, name)
    if not 0 <= token < vocab:
        raise ValueError(f"{name}={token}: token ids of this model are 0 to {vocab - 1}.")
    return token


def _is_one(value: Any) -> bool:
    """Whether it is one entry for all texts, a number that is none included: `_whole` says so."""
    return isinstance(value, str | bytes | Number) or getattr(value, "ndim", None) == 0


def _whole(value: Any, name: str) -> int:
    if not isinstance(value, bool):
        try:
            return index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} holds {value!r}: give whole numbers{'' if name == 'positions' else ' or strings'}.")

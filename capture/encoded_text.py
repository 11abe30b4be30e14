"""One encoded text and the texts of one call: ids, special tokens, character offsets, token strings; no padding.

`position` counts real tokens from 0, special ones included.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

TextKind = Literal["strings", "messages", "token_ids"]


@dataclass(frozen=True)
class EncodedText:
    """One text as the model will see it.

    Attributes:
        length: number of positions.
        is_special: True at tokens such as BOS, [SEP] and chat marks.
        tokens: what each position decodes to ("" where there are no words, as in an image).
        token_ids: None for ready inputs that hold no ids.
        token_type_ids: where the tokenizer makes them.
        offsets: first and one-past-last character of `text` behind each token; (0, 0) for added tokens. None for
            token ids and for tokenizers that do not report them.
        text: the string, or the rendered message list.
        n_added: tokens that the tokenizer put before and behind the text.
        n_dropped: tokens that truncation removed.
    """

    length: int
    is_special: Bool[Tensor, " position"]
    tokens: tuple[str, ...]
    token_ids: Int[Tensor, " position"] | None = None
    token_type_ids: Int[Tensor, " position"] | None = None
    offsets: Int[Tensor, "position 2"] | None = None
    text: str | None = None
    n_added: tuple[int, int] = (0, 0)
    n_dropped: int = 0

    def cut(self, room: int, end: str, *, keep_first: int = 0) -> "EncodedText":
        """The text without the middle part that does not fit: at most `room` tokens, special ones included.

        Args:
            end: "left" drops the beginning of the text, "right" its end.
            keep_first: tokens at the start that stay in any case, beside those the tokenizer added.

        Raises:
            ValueError: no room for a single token of the text.
        """
        first, last = max(self.n_added[0], keep_first), self.n_added[1]
        body = room - first - last
        if body < 1:
            raise ValueError(f"{room} tokens leave no room for text beside {first + last} special tokens.")
        stop = self.length - last
        start = stop - body if end == "left" else first
        kept = [*range(first), *range(start, start + body), *range(stop, self.length)]
        index = torch.tensor(kept)
        return replace(
            self,
            length=len(kept),
            is_special=self.is_special[index],
            tokens=tuple(self.tokens[position] for position in kept),
            token_ids=None if self.token_ids is None else self.token_ids[index],
            token_type_ids=None if self.token_type_ids is None else self.token_type_ids[index],
            offsets=None if self.offsets is None else self.offsets[index],
            n_dropped=self.n_dropped + self.length - len(kept),
        )


@dataclass(frozen=True)
class EncodedTexts:
    """All texts of one call, in the caller's order.

    Attributes:
        rows: one `EncodedText` per text.
        kind: what was given.
        provenance: JSON-able: kind, counts, special-token and truncation settings, chat template hash, hash of the ids.
    """

    rows: tuple[EncodedText, ...]
    kind: TextKind
    provenance: dict[str, Any]

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of every text."""
        return [row.length for row in self.rows]

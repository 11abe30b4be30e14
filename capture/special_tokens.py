"""Which tokens of a text are special: marks such as BOS, [SEP] or chat delimiters, rather than words.

special = added around the text by the tokenizer, or an id that the tokenizer declares special. Beware: the unknown
token is declared special too, but where it stands for a word that the vocabulary lacks, it is that word. It counts as
special only where the text spells it out, or, for ids without a text, where the same id has another special role.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor


@dataclass(frozen=True)
class SpecialTokens:
    """The special ids of one tokenizer.

    Attributes:
        ids: every id that it declares special, the unknown token's left out unless it has another role as well.
        unknown_id: what it writes for a word outside its vocabulary.
        unknown_token: how a text spells that id.
    """

    ids: frozenset[int]
    unknown_id: int | None
    unknown_token: str | None

    @classmethod
    def of(cls, tokenizer) -> "SpecialTokens":
        """Read them off a transformers tokenizer; without a tokenizer no id is special."""
        if tokenizer is None:
            return cls(frozenset(), None, None)
        declared = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        roles = (getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad", "cls", "sep", "mask"))
        unknown = tokenizer.unk_token_id
        ids = (declared | set(tokenizer.all_special_ids)) - {unknown} | {role for role in roles if role is not None}
        return cls(frozenset(ids), unknown, tokenizer.unk_token)

    def mask(
        self,
        ids: Sequence[int],
        *,
        added: Sequence[int] | None = None,
        offsets: Sequence[tuple[int, int]] | None = None,
        text: str | None = None,
    ) -> Bool[Tensor, " position"]:
        """True at special tokens.

        Args:
            ids: the tokens of one text.
            added: 1 where the tokenizer added the token around the text.
            offsets: first and one-past-last character of each token in `text`; needs `text`.
        """
        special = [index in self.ids for index in ids]
        if offsets is not None and self.unknown_id is not None:
            for position, (index, (start, end)) in enumerate(zip(ids, offsets, strict=True)):
                if index == self.unknown_id:
                    special[position] = text[start:end] == self.unknown_token
        if added is not None:
            special = [is_special or bool(is_added) for is_special, is_added in zip(special, added, strict=True)]
        return torch.tensor(special, dtype=torch.bool)

"""Token ids as words: the one place where lenses spell tokens.

Each id is decoded alone, so that what the tokenizer joins (a character of several byte tokens) is not joined here.
"""

from collections.abc import Iterable
from typing import Any

from jaxtyping import Int
from torch import Tensor, nn

from microtome.capture.models import LoadedModel


def token_words(
    model: LoadedModel | nn.Module | None, ids: Iterable[Any] | Int[Tensor, "*any"], *, is_visible: bool = False
) -> list[str]:
    """Each token as text, in order; its number where there is no tokenizer.

    Args:
        ids: of tokens; those of a tensor are taken row by row.
        is_visible: for a list of words between spaces: a leading space is left out, other white space is made visible.
    """
    listed = [int(number) for number in (ids.reshape(-1).tolist() if isinstance(ids, Tensor) else ids)]
    tokenizer: Any = model.tokenizer if isinstance(model, LoadedModel) else None
    if tokenizer is None:
        return [str(number) for number in listed]
    known = {number: tokenizer.decode([number]) for number in dict.fromkeys(listed)}
    if is_visible:
        known = {number: _visible(word) for number, word in known.items()}
    return [known[number] for number in listed]


def _visible(word: str) -> str:
    bare = word[1:] if len(word) > 1 and word[0] == " " and not word[1].isspace() else word
    return bare.replace("\n", "\\n").replace("\t", "\\t").replace(" ", "␣") or "∅"

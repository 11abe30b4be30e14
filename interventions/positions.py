"""Where an edit acts: which tokens of the running forward, said outright and never inferred from a tensor's shape.

- "all": every real token. "rest": every one but the first, which is a sink of massive activations in many models.
- "prompt": the prompt's tokens. "generated": the prompt's last token, which says the first new one, and all behind it.
- "last": the newest token of each forward. With a cache that is "generated"; without one, earlier tokens are computed
  anew and clean at every step, which is another method.
- numbers: absolute positions, counted in real tokens from 0; negative ones from the prompt's end (-1 its last token).
  `ByText` has other numbers for each text.
- `Tokens`: tokens chosen by what they say, such as commas.

Every policy but "last" is a function of (text, position, token), so that padding, batch and cache change nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from microtome.capture.forward_call import ForwardCall
from microtome.capture.models import LoadedModel


@dataclass(frozen=True)
class Tokens:
    """Tokens chosen by their ids. `Tokens.saying(model, [","])` finds the ids of all tokens that read so.

    Attributes:
        ids: of the tokens at which an edit acts.
        text: what they say, for tables and errors.
    """

    ids: tuple[int, ...]
    text: str = ""

    def __post_init__(self):
        if not self.ids:
            raise ValueError(f"No token says {self.text!r}. Give words that are a token of their own.")

    @classmethod
    def saying(cls, model: LoadedModel, words: Iterable[str] | str) -> "Tokens":
        """Every token of the vocabulary that reads as one of the words, spaces around it aside.

        Raises ValueError for a word that is no token.
        """
        words = [words] if isinstance(words, str) else list(words)
        wanted = {word.strip() for word in words}
        tokenizer = model.require_tokenizer()
        strings = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
        found = {i: s.strip() for i, s in enumerate(strings) if s.strip() in wanted and s.strip()}
        if missing := sorted(wanted - set(found.values())):
            raise ValueError(
                f"{missing[0]!r} is not one token of this model. Give words that are a token of their own."
            )
        return cls(tuple(found), " ".join(sorted(wanted)))


@dataclass(frozen=True)
class ByText:
    """Positions of each text, as it is numbered in the call: a subject's place in its sentence.

    Attributes:
        numbers: for each text, absolute positions; negative ones from the prompt's end.
    """

    numbers: tuple[tuple[int, ...], ...]

    def __init__(self, numbers: Sequence[int | Sequence[int]]):
        held = tuple((one,) if isinstance(one, int) else tuple(one) for one in numbers)
        if not held or any(isinstance(n, bool) or not isinstance(n, int) for one in held for n in one):
            raise ValueError(f"ByText({numbers!r:.60}): give whole numbers for each text.")
        object.__setattr__(self, "numbers", held)

    def mask(self, call: ForwardCall) -> Bool[Tensor, "batch token"]:
        """Where the numbers of each row's text are. Raises ValueError for a text that has none."""
        texts, at = call.texts.tolist(), call.positions
        if max(texts) >= len(self.numbers):
            raise ValueError(f"Positions of {len(self.numbers)} texts, and text {max(texts)} runs: give some for each.")
        chosen = torch.zeros_like(call.is_real)
        for row, text in enumerate(texts):
            for number in self.numbers[text]:
                chosen[row] |= at[row] == (number if number >= 0 else int(call.prompt_tokens[row]) + number)
        return chosen


Positions = Literal["all", "rest", "prompt", "generated", "last"] | int | Sequence[int] | Tokens | ByText
NAMES = ("all", "rest", "prompt", "generated", "last")


def checked_positions(positions: object) -> Positions:
    """The positions as they are kept. Raises ValueError or TypeError for what is none."""
    if isinstance(positions, str):
        if positions not in NAMES:
            raise ValueError(
                f"positions={positions!r}: give one of {', '.join(NAMES)}, numbers, or Tokens.saying(model, ...)."
            )
        return positions  # pyright: ignore[reportReturnType]
    if isinstance(positions, Tokens | ByText):
        return positions
    numbers = (
        [positions] if isinstance(positions, int) else list(positions) if isinstance(positions, Iterable) else None
    )
    if numbers is None or any(isinstance(n, bool) or not isinstance(n, int) for n in numbers):
        raise TypeError(f"positions={positions!r:.60}: give one of {', '.join(NAMES)}, whole numbers, or Tokens.")
    if not numbers:
        raise ValueError("positions=[]: an edit that acts nowhere. Give at least one position.")
    return tuple(sorted(set(numbers)))


def position_mask(positions: Positions, call: ForwardCall) -> Bool[Tensor, "batch token"]:
    """True at the tokens of this forward at which the edit acts; never at padding.

    Raises ValueError where ids are asked for and the model was given embeddings.
    """
    real = call.is_real
    if isinstance(positions, Tokens):
        if call.token_ids is None:
            raise ValueError("Tokens chosen by text need token ids; this forward was given embeddings.")
        return torch.isin(call.token_ids, torch.tensor(positions.ids, device=real.device)) & real
    if positions == "all":
        return real
    at = call.positions
    if positions == "rest":
        return real & (at > 0)
    if isinstance(positions, ByText):
        return positions.mask(call) & real
    if positions == "last":
        return real & (at == at.max(1, keepdim=True).values)
    prompt = call.prompt_tokens[:, None].to(at.device)
    if positions == "prompt":
        return real & (at < prompt)
    if positions == "generated":
        return real & (at >= prompt - 1)
    numbers = (positions,) if isinstance(positions, int) else tuple(positions)  # pyright: ignore[reportArgumentType]
    chosen = torch.zeros_like(real)
    for number in numbers:
        chosen |= at == (number if number >= 0 else prompt + number)
    return chosen & real

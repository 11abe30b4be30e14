"""Contrastive activation addition: pairs of answers to one question that differ in their letter (Rimsky et al. 2023).

    question (A) one answer (B) the other, then "(A" or "(B"         e_k = mean over pairs of z_k[matching letter]
                                                                           - z_k[other letter]

The residual stream is read at the letter's own token, found by its place in the text. Letters are balanced exactly, or
the vector would hold the letters' embeddings. The vector acts from the prompt's last token on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from microtome.capture.models import LoadedModel
from microtome.capture.positions import Span
from microtome.interventions.contrast import ContrastRows, contrast_rows
from microtome.interventions.steering import Steering
from microtome.lenses.next_token import continuation_nll

LETTERS = ("A", "B")


@dataclass(frozen=True)
class Question:
    """A question with an answer that shows the behaviour and one that does not."""

    question: str
    matching: str
    other: str


@dataclass(frozen=True)
class LetterPair:
    """A question as it is asked.

    Attributes:
        prompt: up to and with the opening bracket of the answer.
        matching: the letter of the matching answer.
    """

    prompt: str
    matching: str

    @property
    def other(self) -> str:
        """The other letter."""
        return LETTERS[1 - LETTERS.index(self.matching)]


def letter_pairs(questions: Sequence[Question], *, seed: int = 0) -> list[LetterPair]:
    """Prompts in which the matching answer is A in one half of the questions and B in the other, at random.

    Raises ValueError for an odd number of questions, which cannot be balanced.
    """
    if len(questions) < 2 or len(questions) % 2:
        raise ValueError(
            f"{len(questions)} questions: letters are balanced only over an even number of them, 2 or more."
        )
    is_a = np.random.default_rng(seed).permutation(len(questions)) % 2 == 0
    found = []
    for one, first in zip(questions, is_a, strict=True):
        answers = (one.matching, one.other) if first else (one.other, one.matching)
        prompt = f"{one.question}\n\n(A) {answers[0]}\n(B) {answers[1]}\n\nAnswer: ("
        found.append(LetterPair(prompt, "A" if first else "B"))
    return found


def letter_rows(
    model: LoadedModel, pairs: Sequence[LetterPair], sites: Sequence[str] | str = "resid_post"
) -> ContrastRows:
    """Activations at the letter's token, a matching and another one for each pair.

    Raises ValueError if letters are not balanced, or a letter is no token of its own.
    """
    matching = sum(pair.matching == "A" for pair in pairs)
    if 2 * matching != len(pairs):
        raise ValueError(
            f"The matching answer is A in {matching} of {len(pairs)} questions: the vector would hold the letter. Make "
            "pairs with letter_pairs."
        )
    wanted = [pair.prompt + pair.matching + ")" for pair in pairs]
    unwanted = [pair.prompt + pair.other + ")" for pair in pairs]
    _require_own_tokens(model, [*wanted, *unwanted], [len(pair.prompt) for pair in pairs] * 2)
    spans = [Span(len(pair.prompt), len(pair.prompt) + 1) for pair in pairs]
    return contrast_rows(model, wanted, unwanted, sites, [*spans, *spans], paired=True)


def _require_own_tokens(model: LoadedModel, texts: Sequence[str], places: Sequence[int]) -> None:
    tokenizer = model.require_tokenizer()
    for text, place in zip(texts, places, strict=True):
        offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        held = [(int(start), int(end)) for start, end in offsets if start <= place < end]
        if held != [(place, place + 1)]:
            said = text[held[0][0] : held[0][1]] if held else ""
            raise ValueError(
                f"The letter {text[place]!r} is part of the token {said!r}: its vector would hold that token. Take "
                "prompts of another form, or a model whose tokenizer sets letters apart."
            )


def matching_probability(
    model: LoadedModel, pairs: Sequence[LetterPair], steering: Steering | None = None
) -> Float[np.ndarray, " question"]:
    """p(matching letter) / (p(A) + p(B)) after each prompt."""
    edits = None if steering is None else steering.edits(model)
    prompts = [pair.prompt for pair in pairs] * 2
    letters = [*(pair.matching for pair in pairs), *(pair.other for pair in pairs)]
    nats = continuation_nll(model, prompts, letters, edits=edits).nats.numpy()
    return 1 / (1 + np.exp(nats[: len(pairs)] - nats[len(pairs) :]))

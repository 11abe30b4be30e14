"""Which of two answers a model prefers: by the sum of log-probabilities, or by their mean over tokens.

margin = log p(true answer | prompt) - log p(false answer | prompt),     accuracy = share of margins above 0
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from microtome.capture.models import LoadedModel
from microtome.interventions.steering import Steering
from microtome.lenses.next_token import continuation_nll


@dataclass(frozen=True, eq=False)
class Choices:
    """Questions with a true and a false answer each.

    Attributes:
        table: prompt, true, false (answers with their leading space), group.
    """

    table: pd.DataFrame

    def __len__(self) -> int:
        return len(self.table)

    @classmethod
    def of_statements(cls, statements: pd.DataFrame) -> "Choices":
        """From pairs of statements that differ in their last words, as `cities` gives them: columns text, label,
        entity, object, template, group.

        Raises ValueError if no entity has both, or statements do not end in their object.
        """
        rows = []
        for (entity, template), pair in statements.groupby(["entity", "template"], sort=False):
            if set(pair["label"]) != {True, False}:
                continue
            true, false = (pair[pair["label"] == label].iloc[0] for label in (True, False))
            stems = [_stem(row["text"], row["object"]) for row in (true, false)]
            if stems[0] != stems[1]:
                raise ValueError(f"The statements on {entity!r} ({template}) do not begin alike: {stems}.")
            rows.append(
                {
                    "prompt": stems[0],
                    "true": f" {true['object']}",
                    "false": f" {false['object']}",
                    "group": true["group"],
                }
            )
        if not rows:
            raise ValueError("No pair of a true and a false statement on one entity. Give both of each.")
        return cls(pd.DataFrame(rows))

    def margins(self, model: LoadedModel, steering: Steering | None = None, *, by_token: bool = False) -> np.ndarray:
        """Of each question, nats; by_token: means over an answer's tokens in place of sums."""
        edits = None if steering is None else steering.edits(model)
        prompts = [*self.table["prompt"]] * 2
        answers: Sequence[str] = [*self.table["true"], *self.table["false"]]
        found = continuation_nll(model, prompts, answers, edits=edits)
        nats = found.nats.numpy()
        if by_token:
            nats = nats / found.tokens.numpy()
        true, false = nats[: len(self)], nats[len(self) :]
        return false - true


def _stem(text: str, answer: str) -> str:
    """What stands before the answer; a full stop may follow it."""
    whole = text.rstrip().removesuffix(".")
    if not whole.endswith(answer):
        raise ValueError(f"{text!r} does not end in {answer!r}: the answer has to come last.")
    return whole.removesuffix(answer).rstrip()

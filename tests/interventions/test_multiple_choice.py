"""Margins of answers: against transformers, one answer at a time, and by pairs of statements."""

import numpy as np
import pandas as pd
import pytest
import torch
from steering_steps import noise

from microtome.interventions.multiple_choice import Choices
from microtome.interventions.operations import Add
from microtome.interventions.steering import Intervention, Steering, steered

QUESTIONS = Choices(
    pd.DataFrame(
        {
            "prompt": ["the big city is", "a cat", "we saw the old"],
            "true": [" old", " sat in the house", " river"],
            "false": [" a small bird", " ran", " film and the book"],
            "group": [0, 1, 2],
        }
    )
)


@torch.no_grad()
def log_prob(model, prompt: str, answer: str) -> tuple[float, int]:
    before, after = (model.tokenizer(text)["input_ids"] for text in (prompt, answer))
    logits = model.module(input_ids=torch.tensor([before + after])).logits[0, len(before) - 1 : -1].double()
    found = torch.log_softmax(logits, -1)[range(len(after)), after]
    return float(found.sum()), len(after)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("by_token", [False, True])
def test_margins_are_differences_of_log_probabilities(loaded, kind, by_token):
    model = loaded(kind)
    found = QUESTIONS.margins(model, by_token=by_token)
    for number, row in QUESTIONS.table.iterrows():
        sides = [log_prob(model, row["prompt"], row[side]) for side in ("true", "false")]
        true, false = (total / n if by_token else total for total, n in sides)
        assert found[number] == pytest.approx(true - false, rel=1e-5, abs=1e-5)


def test_an_edit_of_generated_tokens_acts_from_the_prompts_last_token_on(llama):
    """As when the answers are written: the same margins as with the last prompt token's position said outright."""
    push = Add(2 * noise(32))
    found = QUESTIONS.margins(llama, Steering(Intervention("resid_post.1", push, "generated")))
    for number, row in QUESTIONS.table.iterrows():
        start = len(llama.tokenizer(row["prompt"])["input_ids"]) - 1
        with steered(llama, Steering(Intervention("resid_post.1", push, range(start, start + 4)))):
            true, false = (log_prob(llama, row["prompt"], row[side])[0] for side in ("true", "false"))
        assert found[number] == pytest.approx(true - false, rel=1e-4, abs=1e-4)
    assert not np.allclose(found, QUESTIONS.margins(llama), atol=1e-2)


def statements() -> pd.DataFrame:
    rows = [
        ("Paris is in France", True, "Paris", "France"),
        ("Paris is in Italy", False, "Paris", "Italy"),
        ("Rome is in France", False, "Rome", "France"),
        ("Rome is in Italy", True, "Rome", "Italy"),
        ("Oslo is in Norway", True, "Oslo", "Norway"),
    ]
    table = pd.DataFrame(rows, columns=["text", "label", "entity", "object"])
    return table.assign(template="is in", group=table["entity"])


def test_statements_become_questions_where_both_answers_are_known():
    table = Choices.of_statements(statements()).table
    assert table["prompt"].tolist() == ["Paris is in", "Rome is in"]
    assert table["true"].tolist() == [" France", " Italy"]
    assert table["false"].tolist() == [" Italy", " France"]
    assert table["group"].tolist() == ["Paris", "Rome"]
    assert len(Choices(table)) == 2


def test_statements_without_pairs_are_refused():
    with pytest.raises(ValueError, match="No pair"):
        Choices.of_statements(statements().query("label"))
    other = statements()
    other.loc[1, "text"] = "Paris lies in Italy"
    with pytest.raises(ValueError, match="do not begin alike"):
        Choices.of_statements(other)
    other.loc[1, "text"] = "Paris is in Italy, they say"
    with pytest.raises(ValueError, match="end in"):
        Choices.of_statements(other)
    other.loc[1, "text"] = "Paris is elsewhere"
    with pytest.raises(ValueError, match="end in"):
        Choices.of_statements(other)

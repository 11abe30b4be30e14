"""Two prompts' difference at the front of another: where, how much, and that what is written is left alone."""

import pytest
import torch

from microtome.capture import capture
from microtome.interventions.activation_addition import activation_addition
from microtome.interventions.generation import generate

PROMPTS = ["the cat sat in the old house .", "a man ran"]


def test_the_difference_is_added_position_by_position(llama) -> None:
    steering = activation_addition(llama, "good film", "bad city", "resid_post.0", strength=2.0)
    ids = [llama.tokenizer(text)["input_ids"] for text in ("good film", "bad city")]
    each = capture(llama, ids, ["resid_post.0"], "all", progress=False, add_special_tokens=False)["resid_post.0"]
    difference = each[:2] - each[2:]
    clean, edited = (
        capture(llama, PROMPTS, ["resid_post.0"], "all", edits=edits, progress=False)
        for edits in (None, steering.edits(llama))
    )
    moved = edited["resid_post.0"] - clean["resid_post.0"]
    place = torch.tensor(clean.rows["position"].to_numpy())
    for position in range(2):
        expected = 2 * difference[position].expand(2, -1)
        torch.testing.assert_close(moved[place == position], expected, rtol=1e-4, atol=1e-4)
    assert not moved[place > 1].any()


def test_it_acts_in_the_first_step_alone(llama) -> None:
    steering = activation_addition(llama, "good film", "bad city", "resid_post.0", strength=2.0)
    ledger = generate(llama, PROMPTS, steering, 4).ledger.to_frame()
    assert ledger.set_index("step")["tokens"].tolist() == [4, 0, 0, 0]


def test_front_leaves_first_positions_alone(llama) -> None:
    steering = activation_addition(llama, "good film", "bad city", "resid_post.0", front=1)
    clean, edited = (
        capture(llama, PROMPTS, ["resid_post.0"], "all", edits=edits, progress=False)
        for edits in (None, steering.edits(llama))
    )
    moved = (edited["resid_post.0"] - clean["resid_post.0"]).norm(dim=1)
    assert (moved[torch.tensor(clean.rows["position"].to_numpy()) == 0] == 0).all()
    assert (moved[torch.tensor(clean.rows["position"].to_numpy()) == 1] > 0).all()


def test_bad_prompts_are_refused(llama) -> None:
    with pytest.raises(ValueError, match="are the same"):
        activation_addition(llama, "good", "good", "resid_post.0")
    with pytest.raises(ValueError, match="no token"):  # this tokenizer drops spaces
        activation_addition(llama, "good film", "bad", "resid_post.0")
    with pytest.raises(ValueError, match="read the same"):
        activation_addition(llama, "cat good", "cat bad", "resid_pre.0", front=2)

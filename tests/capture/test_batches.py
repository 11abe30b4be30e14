"""Plans cover every text once and cost least; batches are the same texts on either side of the padding."""

import itertools

import numpy as np
import pytest
import torch

from microtome.capture.batches import Batch, PaddingRecipe, make_batch, plan_batches
from microtome.capture.texts import encode_texts


def random_lengths(seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return np.clip(np.exp(rng.normal(3, 1, rng.integers(1, 120))), 1, 400).astype(int).tolist()


def padded_tokens(plan: list[list[int]], lengths: list[int]) -> int:
    return sum(len(batch) * max(lengths[row] for row in batch) for batch in plan)


# Plans


@pytest.mark.parametrize("seed", range(40))
def test_every_text_is_in_one_batch_within_the_limits(seed):
    lengths = random_lengths(seed)
    rng = np.random.default_rng(seed)
    max_tokens, max_rows, overhead = (int(rng.integers(1, n)) for n in (600, 40, 100))
    plan = plan_batches(lengths, max_tokens=max_tokens, max_rows=max_rows, overhead_tokens=overhead)
    assert sorted(itertools.chain(*plan)) == list(range(len(lengths)))
    for batch in plan:
        assert len(batch) <= max_rows
        assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= max_tokens
    longest = [max(lengths[row] for row in batch) for batch in plan]
    assert longest == sorted(longest, reverse=True)


@pytest.mark.parametrize("seed", range(20))
def test_plan_costs_as_little_as_the_best_of_all_cuts(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, size=9).tolist()
    limits = {"max_tokens": int(rng.integers(30, 120)), "max_rows": int(rng.integers(2, 9))}
    overhead = int(rng.integers(0, 20))
    ordered = sorted(range(9), key=lambda row: -lengths[row])
    best = np.inf
    for cuts in itertools.product([False, True], repeat=8):
        plan, start = [], 0
        for end in [n + 1 for n in range(8) if cuts[n]] + [9]:
            plan.append(ordered[start:end])
            start = end
        fits = all(
            len(batch) == 1
            or (len(batch) <= limits["max_rows"] and padded_tokens([batch], lengths) <= limits["max_tokens"])
            for batch in plan
        )
        if fits:
            best = min(best, padded_tokens(plan, lengths) + overhead * len(plan))
    plan = plan_batches(lengths, overhead_tokens=overhead, **limits)
    assert padded_tokens(plan, lengths) + overhead * len(plan) == best


def test_order_of_the_texts_does_not_matter_to_the_batches():
    lengths = random_lengths(3)
    shuffled = np.random.default_rng(0).permutation(len(lengths))
    as_lengths = [[lengths[row] for row in batch] for batch in plan_batches(lengths)]
    again = plan_batches([lengths[row] for row in shuffled])
    assert [[lengths[shuffled[row]] for row in batch] for batch in again] == as_lengths
    assert plan_batches(lengths) == plan_batches(lengths)


def test_equal_lengths_need_no_padding_and_keep_their_order():
    assert plan_batches([7] * 10, max_tokens=70) == [list(range(10))]


def test_padding_is_a_few_percent_of_sentence_lengths():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.gamma(3, 8, 512), 1, 100).astype(int).tolist()
    in_file_order = [list(range(start, start + 16)) for start in range(0, 512, 16)]
    assert padded_tokens(in_file_order, lengths) / sum(lengths) > 1.8
    assert padded_tokens(plan_batches(lengths), lengths) / sum(lengths) < 1.05


@pytest.mark.parametrize(
    ("lengths", "limits", "message"),
    [
        ([3, 0], {}, "row 1 has length 0: every text needs at least one token"),
        ([3], {"max_tokens": 0}, "max_tokens=0: expected at least 1"),
        ([3], {"max_rows": 0}, "max_rows=0: expected at least 1"),
        ([3], {"overhead_tokens": -1}, "overhead_tokens=-1: expected at least 0"),
    ],
)
def test_impossible_plans(lengths, limits, message):
    with pytest.raises(ValueError, match=message):
        plan_batches(lengths, **limits)


# Batches

ROWS = encode_texts([[5, 6, 7], [8], [9, 10, 11, 12]], None).rows
RECIPES = [PaddingRecipe(side, ids) for side in ("left", "right") for ids in ("none", "cumsum")]


def batch_of(recipe: PaddingRecipe, row_ids: list[int] = (2, 0, 1)) -> Batch:
    return make_batch(ROWS, list(row_ids), pad_id=99, recipe=recipe, device="cpu")


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_the_mask_finds_the_texts_again(recipe):
    batch = batch_of(recipe)
    assert batch.row_ids == (2, 0, 1)
    assert batch.attention_mask.dtype == torch.int64
    for place, row in enumerate(batch.row_ids):
        real = batch.attention_mask[place].bool()
        assert batch.input_ids[place][real].tolist() == ROWS[row].token_ids.tolist()
        assert (batch.input_ids[place][~real] == 99).all()
        assert bool(real[0 if recipe.side == "right" else -1])
        if recipe.position_ids == "cumsum":
            assert batch.position_ids[place][real].tolist() == list(range(ROWS[row].length))
    assert (batch.position_ids is None) == (recipe.position_ids == "none")


def test_only_what_exists_goes_to_the_model():
    plain = batch_of(PaddingRecipe("right", "none"))
    assert set(plain.model_inputs()) == {"input_ids", "attention_mask"}
    assert set(batch_of(PaddingRecipe("left", "cumsum")).model_inputs()) == {
        "input_ids",
        "attention_mask",
        "position_ids",
    }


def test_token_types_are_padded_with_the_text():
    types = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
    types["token_type_ids"] = torch.tensor([[0, 1, 1], [1, 1, 0]])
    rows = encode_texts(types, None).rows
    batch = make_batch(rows, [1, 0], pad_id=0, recipe=PaddingRecipe("left", "none"), device="cpu")
    assert batch.model_inputs()["token_type_ids"].tolist() == [[0, 1, 1], [0, 1, 1]]


@pytest.mark.parametrize(("kind", "recipe"), [("gpt2", RECIPES[1]), ("llama", RECIPES[1]), ("gpt2", RECIPES[2])])
def test_a_text_in_a_batch_is_the_text_alone(tiny, kind, recipe):
    model = tiny(kind)
    batch = batch_of(recipe)
    with torch.no_grad():
        together = model(**batch.model_inputs()).logits
        for place, row in enumerate(batch.row_ids):
            alone = model(input_ids=ROWS[row].token_ids[None]).logits[0]
            torch.testing.assert_close(together[place][batch.attention_mask[place].bool()], alone, rtol=1e-5, atol=1e-4)


def test_the_pad_id_behind_the_mask_does_not_matter(tiny):
    model = tiny("llama")
    outputs = []
    for filler in (0, 50):
        batch = make_batch(ROWS, [0, 1, 2], pad_id=filler, recipe=PaddingRecipe("left", "cumsum"), device="cpu")
        with torch.no_grad():
            outputs.append(model(**batch.model_inputs()).logits[batch.attention_mask.bool()])
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)

"""On SmolLM2: strength 0, cache and batch, forms that are the same function, and that steering does what it says."""

import numpy as np
import pandas as pd
import pytest
import torch
from steering_steps import noise, step_logits

from microtome.capture import Generation, capture
from microtome.interventions.ablated_weights import ablated_copy
from microtome.interventions.contrast import contrast, contrast_rows
from microtome.interventions.controls import random_directions
from microtome.interventions.directional_ablation import ablation
from microtome.interventions.evaluation import Evaluation
from microtome.interventions.generation import generate
from microtome.interventions.head_bias import bias_form, biased_copy
from microtome.interventions.head_rows import head_rows
from microtome.interventions.iti import head_shifts
from microtome.interventions.looping import loop_report, looped, skipped
from microtome.interventions.multiple_choice import Choices
from microtome.interventions.operations import Add
from microtome.interventions.steering import Intervention, Steering
from microtome.interventions.targets import AttributeWords

pytestmark = pytest.mark.slow

GOOD = [
    "I love this film, it is wonderful.",
    "What a great day, everyone is happy.",
    "The food was excellent and the staff were kind.",
    "A beautiful song that makes me smile.",
    "This is the best phone I have ever had.",
    "She was delighted with the lovely gift.",
    "The hotel was charming, clean and quiet.",
    "An amazing book, warm and funny.",
]
BAD = [
    "I hate this film, it is terrible.",
    "What an awful day, everyone is angry.",
    "The food was disgusting and the staff were rude.",
    "An ugly song that makes me sad.",
    "This is the worst phone I have ever had.",
    "She was disappointed with the horrible gift.",
    "The hotel was dirty, loud and unpleasant.",
    "A boring book, cold and dull.",
]
PROMPTS = ["The weather today is", "My trip to the coast was", "The new teacher, they say,", "Dinner"]
SITE = "resid_post.20"


@pytest.fixture(scope="module")
def vector(smollm2):
    return contrast(smollm2, contrast_rows(smollm2, GOOD, BAD, [SITE]), names=("positive", "negative"))


def everywhere(vectors: torch.Tensor, strength: float, positions="generated") -> Steering:
    return Steering(
        Intervention(f"resid_post.{layer}", Add(row), positions, strength) for layer, row in enumerate(vectors)
    )


def test_strength_0_at_all_layers_is_the_model_to_the_bit(smollm2) -> None:
    vectors = noise(30, 576)
    for use_cache in (True, False):
        clean = step_logits(smollm2, PROMPTS, None, use_cache=use_cache)
        off = step_logits(smollm2, PROMPTS, everywhere(vectors, 0.0, "all"), use_cache=use_cache)
        assert all(torch.equal(one, other) for one, other in zip(clean, off, strict=True))


@pytest.mark.parametrize("positions", ["generated", "all", "rest"])
def test_cached_is_uncached_and_batched_is_alone(smollm2, positions) -> None:
    steering = everywhere(0.05 * noise(30, 576), 1.0, positions)
    cached = step_logits(smollm2, PROMPTS, steering, use_cache=True)
    plain = step_logits(smollm2, PROMPTS, steering, use_cache=False)
    size = max(float(one.abs().max()) for one in cached)
    for one, other in zip(cached, plain, strict=True):
        assert float((one - other).abs().max()) < 1e-4 * size
    alone = [step_logits(smollm2, [prompt], steering, use_cache=True)[0][0] for prompt in PROMPTS]
    for row, one in enumerate(alone):
        assert float((cached[0][row] - one).abs().max()) < 1e-4 * size


def test_last_without_a_cache_is_another_method(smollm2) -> None:
    steering = everywhere(0.2 * noise(30, 576), 1.0, "last")
    cached = step_logits(smollm2, PROMPTS, steering, use_cache=True)
    plain = step_logits(smollm2, PROMPTS, steering, use_cache=False)
    assert torch.allclose(cached[0], plain[0], atol=1e-2)
    assert float((cached[-1] - plain[-1]).abs().max()) > 1e-2
    same = step_logits(smollm2, PROMPTS, steering.at("generated"), use_cache=False)
    assert torch.allclose(cached[-1], same[-1], atol=1e-2)


def test_strengths_by_row_leave_their_neighbours_alone(smollm2, vector) -> None:
    plain = generate(smollm2, PROMPTS, None, 12)
    mixed = generate(smollm2, PROMPTS, vector.steering(smollm2), 12, strength=[0.0, 3.0, 0.0, 3.0])
    steered = generate(smollm2, PROMPTS, vector.steering(smollm2), 12, strength=3.0)
    assert [mixed.token_ids[row] for row in (0, 2)] == [plain.token_ids[row] for row in (0, 2)]
    assert [mixed.token_ids[row] for row in (1, 3)] == [steered.token_ids[row] for row in (1, 3)]
    assert plain.token_ids != steered.token_ids


def test_a_direction_moves_what_it_is_meant_to_and_random_ones_less(smollm2, vector) -> None:
    words = AttributeWords.of(smollm2, ["good", "great", "wonderful"], ["bad", "terrible", "awful"])
    neutral = ["The river runs through the old part of the town and into the sea.", "He wrote the letter at his desk."]
    evaluation = Evaluation(smollm2, PROMPTS, [words], neutral, Generation(max_new_tokens=4))
    base = evaluation.run("base").texts["word_odds"].to_numpy()
    moved = {
        strength: evaluation.run(f"{strength}", vector.steering(smollm2, strength=strength)) for strength in (-2.0, 2.0)
    }
    gains = {s: (record.texts["word_odds"].to_numpy() - base).mean() for s, record in moved.items()}
    assert gains[2.0] > 0.5
    assert gains[-2.0] < -0.5
    assert moved[2.0].kl > 0
    drawn = [
        (words.log_odds(smollm2, PROMPTS, one.steering(smollm2, strength=2.0)) - base).mean()
        for one in random_directions(vector, 5)
    ]
    assert max(np.abs(drawn)) < gains[2.0]


def test_the_weight_form_of_ablation(smollm2, vector) -> None:
    made = ablated_copy(smollm2, vector.vector())
    edits = ablation(smollm2, vector.vector()).steering(smollm2).edits(smollm2)
    hook = capture(smollm2, PROMPTS, ["logits"], "last", edits=edits, progress=False)["logits"]
    weights = capture(made, PROMPTS, ["logits"], "last", progress=False)["logits"]
    assert float((hook - weights).abs().max()) < 1e-4 * float(hook.abs().max())


def test_head_shifts_and_their_bias_are_one_function(smollm2) -> None:
    labels = [True] * 8 + [False] * 8
    shifts = head_shifts(head_rows(smollm2, [*GOOD, *BAD]), labels, [*range(8), *range(8)])
    found = shifts.artefact(smollm2, 24, positions="all")
    edits = [found.steering(smollm2, strength=3.0), bias_form(smollm2, found, 3.0).steering(smollm2)]
    one, other = (
        capture(smollm2, PROMPTS, ["logits"], "last", edits=each.edits(smollm2), progress=False)["logits"]
        for each in edits
    )
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
    biased = capture(biased_copy(smollm2, found, 3.0), PROMPTS, ["logits"], "last", progress=False)["logits"]
    torch.testing.assert_close(one, biased, rtol=1e-4, atol=1e-3)


def test_blocks_again_and_left_out(smollm2) -> None:
    clean = generate(smollm2, PROMPTS, None, 6).token_ids
    with looped(smollm2, 10, 14, 1):
        assert generate(smollm2, PROMPTS, None, 6).token_ids == clean
    for context in (lambda: looped(smollm2, 10, 14, 2), lambda: skipped(smollm2, [0, 12])):
        with context():
            cached = generate(smollm2, PROMPTS, None, 6).token_ids
            assert generate(smollm2, PROMPTS, None, 6, use_cache=False).token_ids == cached
    report = loop_report(smollm2, [GOOD[0], BAD[0]], 10, 14, 3)
    assert report["kl"].iloc[0] > 0
    assert (report["cosine"] > 0.9).all()


def test_margins_are_those_of_the_sentences(smollm2) -> None:
    table = pd.DataFrame(
        [
            {
                "text": f"Paris is in {country}.",
                "label": country == "France",
                "entity": "Paris",
                "object": country,
            }
            for country in ("France", "Japan")
        ]
    ).assign(template="in", group=0)
    choices = Choices.of_statements(table)
    assert choices.margins(smollm2)[0] > 0.5

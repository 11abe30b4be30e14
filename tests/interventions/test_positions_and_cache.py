"""Where edits act: with and without a cache, alone and in a padded batch, by absolute position and by token."""

import pytest
import torch
from steering_steps import noise, step_logits

from microtome.capture import Generation, batch_rows, capture, taps
from microtome.interventions.generation import generate
from microtome.interventions.operations import Add
from microtome.interventions.positions import Tokens, checked_positions
from microtome.interventions.steering import Intervention, Steering, steered

PROMPTS = ["the cat", "she liked the good old film", "a man and a woman saw the big red river"]
KINDS = ["llama", "gpt2", "gemma2", "qwen3", "neox"]


def push(positions="all", strength=1.0, site="resid_post.1", size=2.0) -> Steering:
    return Steering(Intervention(site, Add(size * noise(32)), positions, strength))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", ["all", "generated", "prompt", (0, 3), (-1,), 5])
def test_a_cached_step_is_the_step_of_a_whole_forward(loaded, kind, positions):
    model = loaded(kind)
    cached, whole = (step_logits(model, PROMPTS, push(positions), use_cache=cache) for cache in (True, False))
    for one, other in zip(cached, whole, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_last_with_a_cache_is_generated_without_one(llama):
    last = step_logits(llama, PROMPTS, push("last"), use_cache=True)
    generated = step_logits(llama, PROMPTS, push("generated"), use_cache=False)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(last, generated, strict=True))


def test_last_without_a_cache_is_another_method(llama):
    cached, whole = (step_logits(llama, PROMPTS, push("last"), use_cache=cache) for cache in (True, False))
    assert torch.allclose(cached[0], whole[0], atol=1e-4)
    assert not torch.allclose(cached[-1], whole[-1], atol=1e-2)


def test_tokens_are_met_wherever_they_stand(llama):
    the = Tokens.saying(llama, "the")
    cached, whole = (step_logits(llama, PROMPTS, push(the), use_cache=cache) for cache in (True, False))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(cached, whole, strict=True))
    with steered(llama, push(the), ["resid_post.1"]) as (tape, ledger):
        ids = llama.tokenizer(PROMPTS[2], return_tensors="pt")["input_ids"]
        llama.module(input_ids=ids)
    clean = capture(llama, [PROMPTS[2]], ["resid_post.1"], "all", progress=False)["resid_post.1"]
    moved = (tape["resid_post.1"][0] - clean).norm(dim=1) > 1e-3
    assert moved.tolist() == [word == "the" for word in PROMPTS[2].split()]
    assert ledger.to_frame()["tokens"].tolist() == [1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", ["all", "generated", "prompt", "last", (1, 2), (-2,)])
def test_a_text_gets_the_same_edit_alone_and_in_a_batch(loaded, kind, positions):
    model = loaded(kind)
    together = generate(model, PROMPTS, push(positions), 6, sites=["resid_post.2"])
    alone = generate(model, PROMPTS[1:2], push(positions), 6, sites=["resid_post.2"])
    assert together.token_ids[1] == alone.token_ids[0]
    rows = together.activations.rows["text"] == 1
    a, b = together.activations["resid_post.2"][rows.tolist()], alone.activations["resid_post.2"]
    assert torch.allclose(a, b, atol=1e-4)


def test_strengths_follow_their_texts_through_reordered_batches(llama):
    strengths = [0.0, 3.0, 0.5]
    steering = push("all", strengths)
    batched = capture(
        llama, PROMPTS, ["resid_post.2"], "last", edits=steering.edits(llama), max_tokens=8, progress=False
    )
    for number, strength in enumerate(strengths):
        one = push("all", strength)
        alone = capture(llama, [PROMPTS[number]], ["resid_post.2"], "last", edits=one.edits(llama), progress=False)
        assert torch.allclose(batched["resid_post.2"][number], alone["resid_post.2"][0], atol=1e-4)
    said = generate(llama, PROMPTS, push(), 5, strength=strengths, max_tokens=16)
    for number, strength in enumerate(strengths):
        assert (
            said.token_ids[number]
            == generate(llama, PROMPTS[number : number + 1], push(), 5, strength=strength).token_ids[0]
        )


def test_the_prompts_length_may_be_said(llama):
    ids = llama.tokenizer("the cat sat in the old house", return_tensors="pt")["input_ids"]
    clean = capture(llama, [ids[0].tolist()], ["resid_post.1"], "all", progress=False)["resid_post.1"]
    with batch_rows([0], [3]), taps(llama, ["resid_post.1"], push("generated").edits(llama)) as tape, torch.no_grad():
        llama.module(input_ids=ids)
    moved = (tape["resid_post.1"][0] - clean).norm(dim=1) > 1e-3
    assert moved.tolist() == [False, False, True, True, True, True, True]


def test_growing_texts_without_a_cache_have_to_say_where_prompts_end(llama):
    ids = llama.tokenizer("the cat sat in the old house", return_tensors="pt")["input_ids"]

    def grow():
        with taps(llama, (), push("generated").edits(llama)):
            for n in (4, 5):
                llama.module(input_ids=ids[:, :n])

    with pytest.raises(ValueError, match="without a cache"):
        grow()


def test_generation_by_the_models_own_generate_is_known_too(llama):
    llama.tokenizer.padding_side = "left"
    inputs = llama.tokenizer(PROMPTS, return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    with steered(llama, push("generated")) as (_, ledger):
        out = llama.module.generate(**inputs, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    ours = generate(llama, PROMPTS, push("generated"), 5)
    fresh = out[:, inputs["input_ids"].shape[1] :].tolist()
    assert [row[: len(own)] for row, own in zip(fresh, ours.token_ids, strict=True)] == ours.token_ids
    assert ledger.to_frame()["step"].tolist() == [0, 1, 2, 3, 4]


def test_prompts_end_is_counted_from_the_end(llama):
    assert checked_positions(-1) == (-1,)
    ids = llama.tokenizer("the cat sat in", return_tensors="pt")["input_ids"]
    with steered(llama, push((-2,)), ["resid_post.1"]) as (tape, _), torch.no_grad():
        llama.module(input_ids=ids)
    clean = capture(llama, [ids[0].tolist()], ["resid_post.1"], "all", progress=False)["resid_post.1"]
    assert ((tape["resid_post.1"][0] - clean).norm(dim=1) > 1e-3).tolist() == [False, False, True, False]


@pytest.mark.parametrize("wrong", ["first", [], [1.5], None, True, {"a": 1}])
def test_positions_that_are_none_are_refused(wrong):
    with pytest.raises((TypeError, ValueError), match="positions"):
        Intervention("resid_post.1", Add(noise(32)), wrong)


def test_a_word_of_several_tokens_is_no_token(llama):
    with pytest.raises(ValueError, match="not one token"):
        Tokens.saying(llama, "umbrella")


def test_sampling_is_the_same_for_a_seed_and_recorded(llama):
    draw = Generation(max_new_tokens=8, do_sample=True, temperature=1.5, seed=3)
    one, other = (generate(llama, PROMPTS, push(), draw) for _ in range(2))
    assert one.token_ids == other.token_ids
    assert one.settings["temperature"] == 1.5
    assert one.settings["seed"] == 3
    assert one.settings["use_cache"] is True
    assert (
        generate(llama, PROMPTS, push(), Generation(8, do_sample=True, temperature=1.5, seed=4)).token_ids
        != one.token_ids
    )

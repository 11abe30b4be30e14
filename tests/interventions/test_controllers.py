"""P, PI and PID over layers: against an independent loop over the blocks, closed forms, and reset between forwards."""

import pytest
import torch
from steering_steps import noise, step_logits

from microtome.capture import capture
from microtome.capture.forward_call import ForwardCall
from microtome.capture.live_taps import EditContext
from microtome.capture.sites import Site
from microtome.interventions.contrast import contrast, contrast_rows
from microtome.interventions.controllers import Controller, controlled, open_loop
from microtome.interventions.generation import generate
from microtome.interventions.operations import Feedback
from microtome.interventions.steering import Intervention, Steering, steered

GOOD = ["the happy cat ran to the river .", "she liked the good film .", "a great big city .", "we saw good trees ."]
BAD = ["the sad cat sat in the house .", "she hated the bad film .", "an awful old town", "we saw bad small books ."]
SITES = ["resid_post.0", "resid_post.1", "resid_post.2"]
PID = {"kp": 0.4, "ki": 0.2, "kd": 0.1}


@pytest.fixture(scope="module")
def means(llama):
    return contrast(llama, contrast_rows(llama, GOOD, BAD, SITES), positions="all")


def place() -> EditContext:
    """A site in a forward of its own."""
    ids = torch.zeros(2, 3, dtype=torch.long)
    return EditContext(Site.parse("resid_post.0"), 0, ForwardCall({"input_ids": ids}))


def loop(law, v, setpoint, x, layers, *, gap=1.0):
    """States entering each of some identity blocks, all steered along v in one forward."""
    at, states = place(), [x]
    for _ in range(layers):
        x = x + law.at(v, setpoint, gap).delta(x, torch.ones(*x.shape[:2], 1, dtype=x.dtype), at)
        states.append(x)
    return states


def test_the_scalar_loop_shrinks_by_one_minus_the_gain():
    """Gains of q, r, q_f = .1, 1, .1 with A = 1: 4.8e-4 of the gap is left after 26 blocks."""
    q, r, s = 0.1, 1.0, 0.1
    gains = []
    for _ in range(26):
        gains.append(s / (r + s))
        s = q + r * s / (r + s)
    v = noise(8).double()
    v = v / v.norm()
    x, at, left = torch.zeros(1, 1, 8, dtype=torch.float64), place(), 1.0
    for gain in reversed(gains):
        x = x + Controller(gain).at(v, 1.0, 1.0).delta(x, torch.ones(1, 1, 1, dtype=torch.float64), at)
        left *= 1 - gain
        assert 1 - float(x[0, 0] @ v) == pytest.approx(left, rel=1e-10)
    assert left == pytest.approx(4.8e-4, rel=0.02)
    assert gains[0] == pytest.approx(0.091, abs=5e-4)
    assert gains[-1] == pytest.approx(0.270, abs=5e-4)


def test_a_constant_error_adds_up_layer_by_layer():
    v = torch.eye(4)[0]
    at, law, x = place(), Controller(0.0, ki=1.0, windup=1000.0), torch.zeros(2, 3, 4)
    for layer in range(6):
        u = law.at(v, 0.7, 1.0).delta(x, torch.ones(2, 3, 1), at)
        assert torch.allclose(u[..., 0], torch.full((2, 3), 0.7 * (layer + 1)))


def test_the_sum_is_clamped_and_the_derivative_is_of_the_change():
    v = torch.eye(4)[0]
    at, law, x = place(), Controller(0.0, ki=1.0, windup=2.0), torch.zeros(1, 1, 4)
    pushes = [float(law.at(v, 0.7, 1.0).delta(x, torch.ones(1, 1, 1), at)[0, 0, 0]) for _ in range(6)]
    assert pushes == pytest.approx([0.7, 1.4, 2.0, 2.0, 2.0, 2.0])
    at, law = place(), Controller(0.0, kd=1.0)
    setpoints = [0.5, 0.8, 0.2, 0.2]
    pushes = [float(law.at(v, s, 1.0).delta(x, torch.ones(1, 1, 1), at)[0, 0, 0]) for s in setpoints]
    assert pushes == pytest.approx([0.0, 0.3, -0.6, 0.0], abs=1e-6)


def test_one_sided_leaves_what_is_beyond_alone():
    v, x = torch.eye(4)[0], torch.tensor([[[0.0, 1, 1, 1], [2.0, 1, 1, 1]]])
    u = Controller(0.5, one_sided=True).at(v, 1.0, 1.0).delta(x, torch.ones(1, 2, 1), place())
    assert u[0, :, 0].tolist() == [0.5, 0.0]
    u = Controller(0.5).at(v, 1.0, 1.0).delta(x, torch.ones(1, 2, 1), place())
    assert u[0, :, 0].tolist() == [0.5, -0.5]


@pytest.mark.parametrize("kp", [0.3, 1.0, 1.7, 2.5])
def test_p_converges_below_two_and_not_above(kp):
    states = loop(Controller(kp), noise(8), 1.0, torch.zeros(1, 1, 8, dtype=torch.float64), 40)
    v = noise(8) / noise(8).norm()
    gaps = [abs(1 - float(x[0, 0] @ v.double())) for x in states]
    assert (gaps[-1] < 1e-4) == (kp < 2)


def by_hand(llama, means, texts, kp, ki, kd, level, *, windup=10.0):
    """The stream behind every block of one text, by running the model's own blocks one after the other."""
    ids = llama.tokenizer([texts], return_tensors="pt")["input_ids"]
    trunk = llama.module.model
    x = trunk.embed_tokens(ids)
    rotary = trunk.rotary_emb(x, torch.arange(ids.shape[1])[None])
    mask = torch.full((ids.shape[1],) * 2, float("-inf")).triu(1)[None, None]
    states, total, last = [], 0.0, None
    for k, block in enumerate(trunk.layers):
        out = block(x, attention_mask=mask, position_embeddings=rotary, position_ids=torch.arange(ids.shape[1])[None])
        x = out[0] if isinstance(out, tuple) else out
        if f"resid_post.{k}" in means.sites:
            e = means.tensors["vector"][k]
            v, n = e / e.norm(), float(e.norm())
            gap = float(means.offset[k]) + level * n - x @ v
            total = (total + gap).clamp(-windup * n, windup * n)
            x = x + (kp * gap + ki * total + kd * (gap - (gap if last is None else last)))[..., None] * v
            last = gap
        states.append(x[0])
    return states


@torch.no_grad()
@pytest.mark.parametrize("gains", [{"kp": 0.4}, {"kp": 0.4, "ki": 0.3}, PID])
def test_the_closed_loop_is_the_law_run_block_by_block(llama, means, gains):
    edits = controlled(llama, means, level=1.5, **gains).edits(llama)
    acts = capture(llama, GOOD[:1], SITES, "all", edits=edits, progress=False)
    states = by_hand(llama, means, GOOD[0], gains["kp"], gains.get("ki", 0), gains.get("kd", 0), 1.5)
    for site, state in zip(SITES, states, strict=False):
        assert torch.allclose(acts[site], state, atol=1e-4)


def test_without_memory_it_is_feedback(llama, means):
    p = controlled(llama, means, kp=0.4, level=1.2)
    feedback = []
    for k, site in enumerate(SITES):
        e = means.tensors["vector"][k]
        v = e / e.norm()
        feedback.append(Intervention(site, Feedback(v, 0.4 * v, float(means.offset[k] + 1.2 * e.norm())), "all"))
    found = [
        capture(llama, BAD, ["logits"], "all", edits=s.edits(llama), progress=False)["logits"]
        for s in (p, Steering(feedback))
    ]
    assert torch.allclose(*found, atol=1e-5)


def test_gains_of_zero_are_p_to_the_bit(llama, means):
    found = [
        capture(llama, BAD, ["logits"], "all", edits=s.edits(llama), progress=False)["logits"]
        for s in (
            controlled(llama, means, kp=0.4),
            controlled(llama, means, kp=0.4, ki=0.0, kd=0.0),
            controlled(llama, means, kp=0.4, ki=1e-30, kd=1e-30),
        )
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_strength_zero_is_the_model_to_the_bit(llama, means):
    clean = capture(llama, BAD, ["logits"], "all", progress=False)["logits"]
    for strength in (0.0, [0.0, 0.0, 1.0, 0.0]):
        edits = controlled(llama, means, **PID, strength=strength).edits(llama)
        acts = capture(llama, BAD, ["logits"], "all", edits=edits, progress=False)
        same = torch.tensor((acts.rows["text"] != 2).tolist()) if isinstance(strength, list) else slice(None)
        assert torch.equal(acts["logits"][same], clean[same])


def test_the_same_prompt_twice_is_the_same(llama, means):
    steering = controlled(llama, means, **PID, positions="all")
    with steered(llama, steering, ["logits"]) as (tape, _):
        ids = llama.tokenizer([GOOD[0]], return_tensors="pt")["input_ids"]
        for _ in range(2):
            llama.module(input_ids=ids)
        assert torch.equal(*tape.all("logits"))
    writes = [generate(llama, GOOD[:2], steering, 6).token_ids for _ in range(2)]
    assert writes[0] == writes[1]


def test_nothing_is_carried_from_token_to_token(llama, means):
    steering = controlled(llama, means, **PID, positions="all")
    prompts = ["the cat", "she liked the good old film"]
    cached, whole = (step_logits(llama, prompts, steering, use_cache=cache) for cache in (True, False))
    for one, other in zip(cached, whole, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_setpoints_are_those_measured(llama, means):
    typical = controlled(llama, means, level=0.0)
    for one, offset in zip(typical, means.offset, strict=True):
        assert one.operation.setpoint == pytest.approx(float(offset), abs=1e-6)
    wanted = contrast_rows(llama, GOOD, BAD, SITES)
    for one, site in zip(controlled(llama, means, level=1.0), SITES, strict=True):
        mean = wanted.activations[site][wanted.wanted].mean(0)
        assert one.operation.setpoint == pytest.approx(float(mean @ one.operation.direction), abs=1e-5)
    for one, norm in zip(controlled(llama, means, level=1.5, from_zero=True), means.raw_norm, strict=True):
        assert one.operation.setpoint == pytest.approx(1.5 * float(norm), rel=1e-5)


def test_setpoints_at_an_inputs_own_projections_push_nothing(llama, means):
    clean = capture(llama, GOOD[:1], SITES, "last", progress=False)
    law = Controller(0.5, 0.3, 0.2)
    parts = []
    for k, site in enumerate(SITES):
        v = means.tensors["vector"][k]
        v = v / v.norm()
        parts.append(Intervention(site, law.at(v, float(clean[site][0] @ v), 1.0), "last"))
    edits = Steering(parts).edits(llama)
    again = capture(llama, GOOD[:1], SITES, "last", edits=edits, progress=False)
    for site in SITES:
        assert torch.allclose(again[site], clean[site], atol=1e-5)


def test_open_loop_of_p_alone_starts_as_the_difference_of_means(llama, means):
    found = open_loop(llama, GOOD, BAD, SITES, kp=1.0, ki=0.0, kd=0.0, progress=False)
    assert torch.allclose(found.tensors["vector"][0], means.tensors["vector"][0], atol=1e-5)
    assert not torch.allclose(found.tensors["vector"][1], means.tensors["vector"][1], atol=1e-3)


@pytest.mark.parametrize(("extraction", "positions"), [("last", "generated"), ("mean", "all")])
def test_open_loop_is_the_law_on_differences_of_the_model_steered_so_far(llama, extraction, positions):
    gains = {"kp": 0.5, "ki": 0.25, "kd": 0.125}
    found = open_loop(llama, GOOD, BAD, SITES, **gains, extraction=extraction, positions=positions, progress=False)
    steering = found.steering(llama)
    aims = capture(llama, GOOD, SITES, extraction, progress=False)
    total, last = torch.zeros(32), None
    for k, site in enumerate(SITES):
        edits = Steering(list(steering)[:k]).edits(llama) if k else {}
        gap = aims[site].mean(0) - capture(llama, BAD, [site], extraction, edits=edits, progress=False)[site].mean(0)
        total = total + gap
        u = 0.5 * gap + 0.25 * total + 0.125 * (gap - (gap if last is None else last))
        assert torch.allclose(found.tensors["vector"][k], u, atol=1e-5)
        last = gap


def test_p_of_one_in_the_open_loop_ends_every_site_at_the_wanted_mean(llama):
    found = open_loop(llama, GOOD, BAD, SITES, kp=1.0, ki=0.0, kd=0.0, progress=False)
    aims = capture(llama, GOOD, SITES, "last", progress=False)
    edited = capture(llama, BAD, SITES, "last", edits=found.steering(llama).edits(llama), progress=False)
    for site in SITES:
        assert torch.allclose(edited[site].mean(0), aims[site].mean(0), atol=1e-5)


@pytest.mark.parametrize("gains", [{"kp": float("nan")}, {"kp": 1.0, "ki": float("inf")}, {"kp": 1.0, "windup": 0.0}])
def test_gains_are_numbers(gains):
    with pytest.raises(ValueError, match="finite numbers, and a windup above 0"):
        Controller(**gains)


def test_what_cannot_be_controlled_is_refused(llama, means):
    with pytest.raises(ValueError, match="zero"):
        Controller(0.5).at(torch.zeros(4), 1.0, 1.0)
    with pytest.raises(ValueError, match="setpoint"):
        Controller(0.5).at(torch.ones(4), float("nan"), 1.0)
    with pytest.raises(ValueError, match="level"):
        controlled(llama, means, level=float("nan"))
    with pytest.raises(ValueError, match="order of depth"):
        controlled(llama, means.only(SITES[::-1]))
    with pytest.raises(ValueError, match="order of depth"):
        open_loop(llama, GOOD, BAD, SITES[::-1], progress=False)
    with pytest.raises(ValueError, match="offsets"):
        controlled(llama, open_loop(llama, GOOD, BAD, SITES, progress=False))

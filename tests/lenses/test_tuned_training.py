import runpy
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from microtome.capture import LoadedModel, taps
from microtome.lenses import tuned_training
from microtome.lenses.linear_map import LinearMap, identity_map
from microtome.lenses.tuned_training import TunedSettings, fit_tuned_lens
from microtome.lenses.unembedding import unembedding_of

SCRIPT = Path(__file__).with_name("killed_tuned_training.py")
QUICK = TunedSettings(steps=6, tokens=24, batch_tokens=64, evaluate_every=2, checkpoint_every=2, held_out_tokens=40)
SITES = ["resid_pre.0", "resid_post.0", "resid_post.1"]


@pytest.fixture(scope="module")
def texts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 120, (10,), generator=generator).tolist() for _ in range(30)]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam"])
def test_a_killed_training_ends_bit_for_bit_where_another_does(optimizer, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finished = subprocess.run([sys.executable, str(SCRIPT), str(killed), optimizer], check=False)
    assert finished.returncode == -signal.SIGKILL
    train = runpy.run_path(str(SCRIPT), run_name="killed")["train"]
    one, two = train(whole, optimizer), train(killed, optimizer)
    assert torch.equal(one.weight, two.weight)
    assert torch.equal(one.bias, two.bias)
    pd.testing.assert_frame_equal(one.history, two.history)
    assert one.weight.abs().max() > 0


def test_a_training_stopped_in_this_process_goes_on(tiny, texts, tmp_path, monkeypatch):
    model = tiny("gpt2")
    whole = fit_tuned_lens(model, texts, settings=QUICK)
    learn = tuned_training._Training.learn

    def stopped(self, *arguments):
        if self.step == 5:
            raise KeyboardInterrupt
        learn(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(tuned_training._Training, "learn", stopped)
        with pytest.raises(KeyboardInterrupt):
            fit_tuned_lens(model, texts, settings=QUICK, checkpoint=tmp_path)
    resumed = fit_tuned_lens(model, texts, settings=QUICK, checkpoint=tmp_path)
    assert torch.equal(whole.weight, resumed.weight)
    pd.testing.assert_frame_equal(whole.history, resumed.history)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "neox", "gemma2", "qwen3"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_training_lowers_the_held_out_kl_of_every_kind(kind, optimizer, tiny, texts):
    settings = replace(
        QUICK, steps=20, evaluate_every=10, optimizer=optimizer, rate=0.01 if optimizer == "adam" else None
    )
    lens = fit_tuned_lens(tiny(kind), texts, settings=settings)
    assert list(lens.sites) == SITES
    best = lens.history.groupby("site", sort=False)["kl"].min()
    logit = lens.history.groupby("site", sort=False)["logit_kl"].first()
    assert best["resid_pre.0"] < 0.95 * logit["resid_pre.0"]
    assert (best <= logit + 1e-7).all()


def test_a_step_is_that_of_one_depth_alone(tiny, texts):
    model = tiny("llama")
    together = fit_tuned_lens(model, texts, settings=QUICK)
    alone = fit_tuned_lens(model, texts, settings=QUICK, depths=[1])
    assert alone.sites == ("resid_post.0",)
    torch.testing.assert_close(together.weight[1], alone.weight[0], rtol=1e-4, atol=1e-6)


def test_the_first_step_follows_the_clipped_gradient_of_the_dense_kl(tiny, texts, monkeypatch):
    model = tiny("gpt2")
    seen = []
    learn = tuned_training._Training.learn

    def watched(self, states, final, end):
        before = self.weight.detach().clone()
        learn(self, states, final, end)
        seen.append((states, final, before, self.weight.detach().clone()))

    monkeypatch.setattr(tuned_training._Training, "learn", watched)
    fit_tuned_lens(model, texts, settings=replace(QUICK, steps=1, weight_decay=0.0, momentum=0.0, clip=0.05))
    states, final, before, after = seen[0]
    end = unembedding_of(model)
    weight, bias = torch.zeros(32, 32, requires_grad=True), torch.zeros(32, requires_grad=True)
    p = end.logits_of_normed(final).log_softmax(-1).detach()
    q = end.logits(states[1] + states[1] @ weight + bias).log_softmax(-1)
    by_weight, by_bias = torch.autograd.grad((p.exp() * (p - q)).sum(-1).mean(), [weight, bias])
    norm = (by_weight.square().sum() + by_bias.square().sum()).sqrt()
    assert norm > 0.05
    torch.testing.assert_close(after[1] - before[1], -0.1 * by_weight * 0.05 / norm, rtol=1e-3, atol=1e-6)


def test_first_tokens_and_held_out_documents_never_train(tiny, texts, monkeypatch):
    model = tiny("gpt2")  # its learned positions tell the same token at two places apart
    seen = []
    learn = tuned_training._Training.learn
    monkeypatch.setattr(
        tuned_training._Training, "learn", lambda self, x, final, end: (seen.append(x[0]), learn(self, x, final, end))
    )
    documents = [row // 3 for row in range(30)]
    fit_tuned_lens(model, texts, documents=documents, settings=replace(QUICK, steps=30, tokens=10**6))
    trained = torch.cat(seen)
    by_text = []
    for text in texts:
        with taps(model, ["resid_pre.0"]) as tape, torch.no_grad():
            model(torch.tensor([text]))
        stream = tape["resid_pre.0"][0]
        by_text.append([bool((trained - row).abs().amax(1).min() < 1e-6) for row in stream])
    assert not any(found[0] for found in by_text)
    used = [all(found[1:]) for found in by_text]
    left_out = {number for number, is_used in zip(documents, used, strict=True) if not is_used}
    assert len(left_out) == 2
    assert all(used[row] == (documents[row] not in left_out) for row in range(30))


def test_a_start_of_maps_is_the_map_at_step_zero(tiny, texts):
    model = tiny("llama")
    start = {site: identity_map(32) for site in SITES}
    shifted = {site: LinearMap(torch.eye(32) * 1.5, torch.full((32,), 0.3)) for site in SITES}
    same = fit_tuned_lens(model, texts, start=start, settings=QUICK).history
    assert same["start_kl"].tolist() == pytest.approx(same["logit_kl"].tolist())
    other = fit_tuned_lens(model, texts, start=shifted, settings=QUICK).history
    assert (other["start_kl"] - other["logit_kl"]).abs().max() > 1e-3
    with pytest.raises(ValueError, match=r"no map for resid_post\.1"):
        fit_tuned_lens(model, texts, start={site: start[site] for site in SITES[:2]}, settings=QUICK)
    with pytest.raises(ValueError, match="31 to 31"):
        fit_tuned_lens(model, texts, start=dict.fromkeys(SITES, identity_map(31)), settings=QUICK)


def test_training_stops_when_no_depth_gets_better(tiny, texts):
    settings = replace(QUICK, steps=50, evaluate_every=1, patience=3, rate=0.0)
    lens = fit_tuned_lens(tiny("llama"), texts, settings=settings)
    assert lens.facts["steps"] == 3
    assert not lens.weight.any()


def test_an_autocast_around_the_call_reaches_no_translator(tiny, texts):
    model = tiny("llama")
    batch = torch.randn(3, 9, 32), torch.randn(9, 32)
    found = []
    for is_on in (False, True):
        run = tuned_training._Training(QUICK, tuple(SITES), torch.zeros(3, 32, 32), torch.zeros(3, 32), "")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
            run.learn(*batch, unembedding_of(model))
            run.learn(*batch, unembedding_of(model))
            kl = tuned_training._evaluate(run.weight, run.bias, batch, unembedding_of(model))
        found.append((run.weight.detach(), kl))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_switched_off_around_the_call_do_not_matter(mode, tiny, texts):
    model = tiny("llama")
    plain = fit_tuned_lens(model, texts, settings=QUICK)
    with mode():
        inside = fit_tuned_lens(model, texts, settings=QUICK)
    assert torch.equal(plain.weight, inside.weight)
    assert not inside.weight.is_inference()


def test_a_checkpoint_of_other_held_out_texts_or_of_edited_weights_is_refused(tiny, texts, tmp_path):
    loaded = LoadedModel.from_module(tiny("llama"), name="tiny")
    documents = [row // 3 for row in range(30)]
    first = fit_tuned_lens(loaded, texts, documents=documents, settings=QUICK, checkpoint=tmp_path)
    held_out = tuned_training._split(30, documents, QUICK)[1]
    others = [texts[row][::-1] if row in held_out else texts[row] for row in range(30)]
    with pytest.raises(ValueError, match="held_out differ"):
        fit_tuned_lens(loaded, others, documents=documents, settings=QUICK, checkpoint=tmp_path)
    with torch.no_grad():
        loaded.module.model.layers[1].mlp.down_proj.weight.mul_(3)
    with pytest.raises(ValueError, match="weights were changed"):
        fit_tuned_lens(loaded, texts, documents=documents, settings=QUICK, checkpoint=tmp_path)
    with torch.no_grad():
        loaded.module.model.layers[1].mlp.down_proj.weight.div_(3)
    again = fit_tuned_lens(loaded, texts, documents=documents, settings=QUICK, checkpoint=tmp_path)
    assert torch.equal(again.weight, first.weight)
    file = tmp_path / "training.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="damaged"):
        fit_tuned_lens(loaded, texts, documents=documents, settings=QUICK, checkpoint=tmp_path)


def test_a_stream_that_is_not_finite_is_no_matter_of_the_rate(tiny, texts):
    model = tiny("llama").half()
    with torch.no_grad():
        model.model.embed_tokens.weight[50] = torch.nan
    with pytest.raises(ValueError, match=r"NaN or infinity|not finite"):
        fit_tuned_lens(model, [[*text, 50, 51] for text in texts], settings=QUICK)


@pytest.mark.parametrize("change", [{"rate": -1.0}, {"rate": float("nan")}, {"clip": -1.0}, {"momentum": -0.5}])
def test_settings_are_numbers_that_make_sense(change):
    with pytest.raises(ValueError, match=f"{next(iter(change))} is .*finite number"):
        replace(QUICK, **change)


def test_what_cannot_be_trained_is_refused(tiny, texts, tmp_path):
    model = tiny("llama")
    with pytest.raises(ValueError, match="depths 0 to 2"):
        fit_tuned_lens(model, texts, depths=[3])
    with pytest.raises(ValueError, match="one document"):
        fit_tuned_lens(model, texts, documents=[0] * 30)
    with pytest.raises(ValueError, match="Give the document of every text"):
        fit_tuned_lens(model, texts, documents=[0])
    with pytest.raises(ValueError, match="'zero', or maps"):
        fit_tuned_lens(model, texts, start="best")
    with pytest.raises(ValueError, match="no token but first"):
        fit_tuned_lens(model, [[5], [6], [7]])
    held_out = tuned_training._split(30, None, QUICK)[1]
    with pytest.raises(ValueError, match="texts to train on"):
        fit_tuned_lens(model, [texts[row] if row in held_out else [5] for row in range(30)], settings=QUICK)
    with pytest.raises(ValueError, match="'sgd' or 'adam'"):
        TunedSettings(optimizer="lion")
    with pytest.raises(ValueError, match="steps is 0"):
        TunedSettings(steps=0)
    with pytest.raises(FloatingPointError, match=r"not finite at step .*Lower the rate"):
        fit_tuned_lens(model, texts, settings=replace(QUICK, optimizer="adam", rate=1e37))
    fit_tuned_lens(model, texts, settings=QUICK, checkpoint=tmp_path)
    with pytest.raises(ValueError, match="another training"):
        fit_tuned_lens(model, texts, settings=replace(QUICK, seed=1), checkpoint=tmp_path)
    with pytest.raises(ValueError, match="weight_sha256"):
        fit_tuned_lens(tiny("llama", seed=1), texts, settings=QUICK, checkpoint=tmp_path)

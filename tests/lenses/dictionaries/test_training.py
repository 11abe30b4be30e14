import runpy
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import normalize

from microtome.capture import taps
from microtome.lenses.dictionaries import training
from microtome.lenses.dictionaries.site_rows import NO_SINKS, site_rows
from microtome.lenses.dictionaries.training import DictionarySettings, split_documents, train_dictionary
from microtome.lenses.dictionaries.training_state import TrainingState, geometric_median
from microtome.lenses.strata import TokenRule

SCRIPT = Path(__file__).with_name("killed_dictionary.py")
QUICK = DictionarySettings(steps=10, batch=32, evaluate_every=5, checkpoint_every=2, held_out_rows=64, rate=0.01)
SITE = "resid_post.0"


@pytest.fixture(scope="module")
def texts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 120, (10,), generator=generator).tolist() for _ in range(30)]


@pytest.fixture(scope="module")
def killed():
    return runpy.run_path(str(SCRIPT), run_name="killed")


def planted(rows=4000, width=24, features=48, k=3):
    generator = torch.Generator().manual_seed(4)
    directions = normalize(torch.randn(features, width, generator=generator), dim=1)
    places = torch.stack([torch.randperm(features, generator=generator)[:k] for _ in range(rows)])
    strengths = 0.5 + torch.rand(rows, k, generator=generator)
    x = torch.zeros(rows, features).scatter_(1, places, strengths) @ directions
    return directions, 7 * x + torch.randn(width, generator=generator)


def learned(rows, features, k, settings, steps):
    state = TrainingState.begun(rows, features, k, settings, torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _ in range(steps):
            state.learn(rows[torch.randint(len(rows), (settings.batch,), generator=generator)])
    return state


def test_a_planted_dictionary_is_found():
    directions, rows = planted()
    settings = DictionarySettings(steps=800, batch=256, rate=3e-3, dead_after=5000)
    state = learned(rows, 64, 3, settings, 800)
    found = state.dictionary({"site": SITE}, "planted").directions(unit=True)
    cosine = (directions @ found.T).amax(1)
    start = TrainingState.begun(rows, 64, 3, settings, torch.device("cpu")).weights.decoder
    assert float((directions @ start.T).amax(1).mean()) < 0.6
    assert float(cosine.mean()) > 0.95
    assert state.explained(rows) > 0.9


def test_dead_features_come_back_with_the_second_term():
    _, rows = planted()
    dead = {}
    for weight in (0.0, 1 / 32):
        settings = DictionarySettings(steps=300, batch=128, rate=3e-3, dead_after=1000, aux_weight=weight)
        state = TrainingState.begun(rows, 96, 3, settings, torch.device("cpu"))
        state.weights.encoder_bias[48:] = -2  # half of the features never among the largest
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for _ in range(300):
                state.learn(rows[torch.randint(len(rows), (128,), generator=generator)])
        dead[weight] = float(state.dead.float().mean())
    assert dead[0.0] > 0.3, dead
    assert dead[1 / 32] < dead[0.0] / 3


def test_what_is_trained_is_what_is_given(tiny, texts):
    """The dictionary in the site's units rebuilds as the state in scaled units does; its decoder rows are unit."""
    _, rows = planted()
    state = learned(rows, 64, 3, DictionarySettings(steps=50, batch=64, rate=3e-3), 50)
    found = state.dictionary({"site": SITE}, "planted")
    residual = found(rows) - rows
    explained = 1 - residual.square().sum() / (rows - rows.mean(0)).square().sum()
    assert float(explained) == pytest.approx(state.explained(rows), abs=1e-5)
    torch.testing.assert_close(found.decoder.norm(dim=1), torch.ones(64))
    assert (found.encode(rows) > 0).sum(1).max() <= 3


def test_the_geometric_median_minimises_distances():
    rows = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    rows[:5] += 100
    found = geometric_median(rows).double()
    least = (rows - found).norm(dim=1).sum()
    for step in 0.01 * torch.cat([torch.eye(3), -torch.eye(3)]).double():
        assert (rows - found - step).norm(dim=1).sum() > least
    torch.testing.assert_close(geometric_median(torch.ones(4, 3)), torch.ones(3))


@pytest.mark.slow
@pytest.mark.parametrize("buffer", [1000, 60])
def test_a_killed_training_ends_bit_for_bit_where_another_does(buffer, killed, tmp_path):
    finished = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path / "killed"), str(buffer)], check=False)
    assert finished.returncode == -signal.SIGKILL
    one, two = killed["train"](tmp_path / "whole", buffer), killed["train"](tmp_path / "killed", buffer)
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, two.tensors[name])
    assert one.facts == two.facts
    assert max(one.facts["history"]["dead"]) > 0


@pytest.mark.parametrize("buffer", [1000, 60])
def test_a_training_stopped_in_this_process_goes_on(buffer, killed, tmp_path, monkeypatch):
    whole = killed["train"](None, buffer)
    learn = TrainingState.learn

    def stopped(self, rows):
        if self.step == 7:
            raise KeyboardInterrupt
        learn(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingState, "learn", stopped)
        with pytest.raises(KeyboardInterrupt):
            killed["train"](tmp_path, buffer)
    resumed = killed["train"](tmp_path, buffer)
    for name, tensor in whole.tensors.items():
        assert torch.equal(tensor, resumed.tensors[name])
    assert whole.facts == resumed.facts
    again = killed["train"](tmp_path, buffer)
    assert torch.equal(again.decoder, whole.decoder)


def test_a_checkpoint_of_another_training_is_refused(killed, tmp_path):
    killed["train"](tmp_path, 1000)
    with pytest.raises(ValueError, match=r"of another training \(settings differ\)"):
        killed["train"](tmp_path, 1000, rate=0.02)
    (tmp_path / training.CHECKPOINT).write_bytes(b"cut off")
    with pytest.raises(ValueError, match="is damaged"):
        killed["train"](tmp_path, 1000)


@pytest.mark.parametrize(
    "state", [None, {}, {"other": "1"}, {"state": "{"}, {"state": "[]"}, {"state": '{"facts": {}}'}]
)
def test_a_checkpoint_that_lacks_something_is_damaged(state, killed, tmp_path):
    save_file({"encoder": torch.zeros(2)}, tmp_path / training.CHECKPOINT, metadata=state)
    with pytest.raises(ValueError, match="is damaged"):
        killed["train"](tmp_path, 1000)


def test_weights_changed_in_memory_are_noticed(tiny, texts, tmp_path):
    model = tiny("llama")
    options = {"features": 40, "k": 4, "settings": QUICK, "checkpoint": tmp_path, "progress": False}
    train_dictionary(model, texts, SITE, **options)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.5)
    with pytest.raises(ValueError, match="first_rows"):
        train_dictionary(model, texts, SITE, **options)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_training_explains_more_than_its_start(kind, tiny, texts):
    settings = replace(QUICK, steps=120, evaluate_every=40)
    found = train_dictionary(tiny(kind), texts, SITE, features=64, k=4, settings=settings, progress=False)
    history = found.facts["history"]
    assert history["step"] == [40, 80, 120]
    assert history["explained"][-1] > history["explained"][0] > 0
    assert (found.site, found.kind, found.k, found.features) == (SITE, "topk", 4, 64)
    found.require_width(32)


def streams(model, texts):
    values = []
    for text in texts:
        with taps(model, [SITE]) as tape, torch.no_grad():
            model(torch.tensor([text]))
        values.append(tape[SITE][0])
    return torch.stack(values)


def nearest(rows, stream):
    return (rows[:, None] - stream).abs().amax(-1).amin(1) < 1e-5


def seen_rows(monkeypatch, run):
    seen, learn = [], TrainingState.learn
    with monkeypatch.context() as patch:
        patch.setattr(TrainingState, "learn", lambda self, rows: (seen.append(rows), learn(self, rows))[1])
        run()
    return torch.cat(seen)


@pytest.mark.parametrize("buffer", [10**6, 100])
def test_sinks_and_held_out_documents_never_train_and_all_others_do(buffer, tiny, texts, monkeypatch):
    model = tiny("gpt2")  # its learned positions tell the same token at two places apart
    documents = [row // 3 for row in range(30)]
    settings = replace(QUICK, steps=24, batch=30, buffer=buffer, held_out_share=0.2)
    options = {"features": 40, "k": 4, "settings": settings, "documents": documents, "progress": False}
    trained = seen_rows(monkeypatch, lambda: train_dictionary(model, texts, SITE, **options, max_tokens=60))
    training_rows, held_out = split_documents(30, documents, 0.2, 0)
    assert {documents[row] for row in held_out}.isdisjoint(documents[row] for row in training_rows)
    assert len(held_out) == 6
    stream = streams(model, texts)
    used = torch.stack([nearest(row, trained) for row in stream])
    assert not used[:, 0].any()
    assert not used[held_out].any()
    assert used[training_rows, 1:].float().mean() > 0.95  # the rest of a block's last batch waits for another epoch
    with_sinks = seen_rows(monkeypatch, lambda: train_dictionary(model, texts, SITE, **options, rule=NO_SINKS))
    assert nearest(stream[training_rows[0], :1], with_sinks).all()


def test_massive_tokens_are_left_out(tiny, texts):
    model = tiny("gpt2")
    with torch.no_grad():
        model.transformer.wte.weight[7] = 1e5
    kept = site_rows(model, texts, SITE).of_batches((0,))
    everything = site_rows(model, texts, SITE, rule=TokenRule(massive=False)).of_batches((0,))
    sevens = sum(text[1:].count(7) for text in texts)
    assert sevens > 0
    assert len(everything) - len(kept) == sevens
    assert kept.abs().max() < 100 < everything.abs().max()
    mlp = site_rows(model, texts, "mlp_out.0")
    assert mlp.rule.looked_at == (SITE,)
    assert len(mlp.of_batches((0,))) == len(kept)


def test_heads_are_laid_side_by_side(tiny, texts):
    model = tiny("llama")
    whole, one = site_rows(model, texts, "z.1"), site_rows(model, texts, "z.1.1")
    assert whole.width > one.width
    assert torch.equal(whole.of_batches((0,))[:, one.width : 2 * one.width], one.of_batches((0,)))


def test_requests_that_make_no_sense_are_refused(tiny, texts):
    model, options = tiny("llama"), {"features": 40, "k": 4, "settings": QUICK, "progress": False}
    with pytest.raises(ValueError, match="k=50 of 40 features"):
        train_dictionary(model, texts, SITE, **options | {"k": 50})
    with pytest.raises(ValueError, match="of 1 document"):
        train_dictionary(model, texts, SITE, **options, documents=[0] * 30)
    with pytest.raises(ValueError, match="no token but sinks"):
        train_dictionary(model, [[5], [6], [7]], SITE, **options)
    with pytest.raises(ValueError, match="stands for 3 sites"):
        train_dictionary(model, texts, "resid_post", **options)
    with pytest.raises(KeyError):
        train_dictionary(model, texts, "router.0", **options)
    with pytest.raises(ValueError, match="steps is 0"):
        replace(QUICK, steps=0)
    with pytest.raises(ValueError, match="held_out_share is 1"):
        replace(QUICK, held_out_share=1.0)
    with pytest.raises(FloatingPointError, match="not finite at step"):
        train_dictionary(model, texts, SITE, **options | {"settings": replace(QUICK, rate=1e30)})


def test_rates_rise_and_fall():
    settings = DictionarySettings(steps=100, rate_factor=1.0)
    rates = np.array([settings.rate_at(step, 2**12) for step in range(100)])
    assert rates.max() == pytest.approx(4e-4)
    assert rates[0] == pytest.approx(4e-4 / 5)
    assert rates[-1] == pytest.approx(4e-4 / 20)
    assert (np.diff(rates[80:]) < 0).all()

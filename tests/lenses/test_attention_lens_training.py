"""Training: a planted lens is found, the best held-out weights are kept, it goes on after a kill, bad input is told."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from microtome.capture.models import LoadedModel
from microtome.capture.taps import taps
from microtome.lenses import attention_lens_training
from microtome.lenses.attention_lens import AttentionLens
from microtome.lenses.attention_lens_files import load_attention_lens, save_attention_lens
from microtome.lenses.attention_lens_loss import best_bias
from microtome.lenses.attention_lens_rows import LensRows, lens_rows
from microtome.lenses.attention_lens_scores import causal_agreement, lens_cosine, score_attention_lens
from microtome.lenses.attention_lens_start import folded_unembedding, plain_weight
from microtome.lenses.attention_lens_training import fit_attention_lens, train_attention_lens
from microtome.lenses.head_writes import head_maps
from microtome.lenses.unembedding import unembedding_of

KINDS = ["llama", "gpt2", "gemma2"]
TEXTS = [[(7 * i + 3 * j * j + i * j) % 110 + 5 for j in range(14)] for i in range(36)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def models(tiny, word_tokenizer) -> dict[str, LoadedModel]:
    return {kind: LoadedModel.from_module(tiny(kind), tokenizer=word_tokenizer, name=kind) for kind in KINDS}


@pytest.fixture(scope="module")
def shards(models) -> dict[str, dict[str, LensRows]]:
    return {kind: lens_rows(models[kind], TEXTS, 1, with_stream=True).split() for kind in KINDS}


@pytest.fixture(scope="module")
def planted(shards) -> tuple[dict[str, LensRows], torch.Tensor]:
    """Rows whose final state is a linear map of the mixed values of heads 0 and 2: heads 1 and 3 say nothing."""
    mapping = random(4, 8, 32, seed=5) / 3
    mapping[[1, 3]] = 0
    rows = {}
    for i, name in enumerate(("fit", "validation", "test")):
        mixed = random([2000, 400, 400][i], 4, 8, seed=i)
        blank = torch.zeros(len(mixed), dtype=torch.long)
        normed = torch.einsum("the,hed->td", mixed, mapping)
        rows[name] = LensRows(1, mixed, normed, normed.flip(0), *[blank] * 5)
    return rows, mapping


@pytest.mark.parametrize("form", ["small", "original"])
@pytest.mark.parametrize("start", ["zero", "closed_form"])
def test_a_planted_lens_is_found(models, planted, form: str, start: str) -> None:
    """The KL goes to 0, heads that say nothing cost nothing, M is the planted map up to what no lens can tell."""
    rows, mapping = planted
    run = fit_attention_lens(
        models["llama"],
        rows,
        form=form,
        start=start,
        steps=400 if start == "zero" else 10,
        learning_rate=0.05,
        evaluate_every=50,
    )
    assert run.scores.kl < 0.02 * run.scores.kl_bias
    assert run.scores.explained > 0.98
    assert run.scores.drop_kl[[1, 3]].abs().max() < 0.02
    assert run.scores.drop_kl[[0, 2]].min() > 0.2
    assert run.scores.peer_r2.abs().max() < 0.05
    end = unembedding_of(models["llama"])
    expected = AttentionLens(
        1, "joint", mapping @ end.weight.T, torch.zeros(1, end.vocab), torch.zeros(4, 8), torch.zeros(4)
    )
    assert lens_cosine(run.lens, expected)[[0, 2]].min() > 0.98


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["joint", "independent", "shared", "residual"])
def test_every_mode_improves_on_its_start(models, shards, kind: str, mode: str) -> None:
    settings = {"start": "zero", "steps": 40, "evaluate_every": 20, "learning_rate": 0.01, "batch_rows": 128}
    run = fit_attention_lens(models[kind], shards[kind], mode=mode, **settings)
    history = run.history
    assert history["validation_kl"].min() < history["validation_kl"][0]
    assert run.scores.kl < run.start_kl
    assert run.closed_form_kl < run.start_kl
    assert run.lens.mode == mode
    assert run.scores.rows == len(shards[kind]["test"])
    assert history["step"].tolist()[0] == 0
    assert "cannot say whose" in repr(run)
    assert run.scores.documents == len(set(shards[kind]["test"].document.tolist()))
    first = repr(run.scores).splitlines()[0]
    assert f"{len(shards[kind]['test'])} held-out rows of {run.scores.documents} documents: KL" in first
    assert f"closed form {run.closed_form_kl:.3f}, bias alone {run.scores.kl_bias:.3f}" in first
    table = run.scores.to_frame()
    assert ("kl" in table, "drop_kl" in table) == ((True, False) if mode == "independent" else (False, True))
    assert not table.isna().any(axis=None)


@pytest.mark.parametrize("kind", KINDS)
def test_closed_form_is_no_worse_than_the_plain_start(models, shards, kind: str) -> None:
    """Also for the original form, whose start is the same lens."""
    runs = [
        fit_attention_lens(models[kind], shards[kind], form=form, start="unembedding", steps=1, learning_rate=1e-9)
        for form in ("small", "original")
    ]
    assert runs[0].closed_form_kl <= runs[0].start_kl
    assert runs[1].start_kl == pytest.approx(runs[0].start_kl, rel=1e-4)
    assert runs[1].closed_form_kl == runs[0].closed_form_kl
    assert runs[0].lens.facts["closed_form"][0]["validation_r2"] > 0


def test_equal_loss_and_parameters_of_the_two_forms(models, shards) -> None:
    """From the same closed form the two forms are the same lens before the first step, at 4 x the parameters here."""
    small, original = (
        fit_attention_lens(models["llama"], shards["llama"], form=form, steps=1, learning_rate=1e-9)
        for form in ("small", "original")
    )
    assert original.start_kl == pytest.approx(small.start_kl, rel=1e-4)
    assert original.readout.parameters == 4 * small.readout.parameters


def test_independent_heads_are_fits_of_single_heads(models, shards) -> None:
    """Each head's lens is the joint lens of a layer that has that head alone."""
    model, rows = models["gpt2"], shards["gpt2"]
    settings = {"steps": 10, "evaluate_every": 10, "start": "zero"}
    run = fit_attention_lens(model, rows, mode="independent", **settings)
    others = {name: replace(part, mixed=part.mixed.clone()) for name, part in rows.items()}
    for part in others.values():
        part.mixed[:, [0, 1, 3]] = 0
    alone = fit_attention_lens(model, others, mode="joint", **settings)
    torch.testing.assert_close(run.lens.weight[2], alone.lens.weight[2], rtol=1e-3, atol=1e-6)
    assert float(run.scores.head_kl[2]) == pytest.approx(alone.scores.kl, rel=1e-4)
    assert run.scores.kl == pytest.approx(float(run.scores.head_kl.mean()))
    assert run.scores.drop_kl is None


def test_weights_of_the_best_evaluation_are_kept_and_patience_ends_it(models, shards) -> None:
    """A rate that ruins the lens: the start is the best there was, and nothing is trained to the end."""
    run = fit_attention_lens(
        models["llama"], shards["llama"], steps=400, evaluate_every=5, patience=2, learning_rate=5.0
    )
    assert run.best_step == 0
    assert run.history["step"].tolist() == [0, 5, 10]
    assert run.scores.kl == pytest.approx(run.start_kl, rel=1e-4)


def test_shrink_pulls_towards_the_plain_unembedding(models, shards) -> None:
    model, rows = models["llama"], shards["llama"]
    plain = plain_weight(head_maps(model, 1)[0], folded_unembedding(unembedding_of(model)))

    def distance(shrink: float) -> float:
        settings = {"start": "zero", "steps": 40, "evaluate_every": 40, "learning_rate": 0.01}
        run = fit_attention_lens(model, rows, shrink=shrink, **settings)
        return float((run.lens.weight - plain).norm())

    assert distance(1.0) < 0.9 * distance(0.0)


def test_the_model_stays_as_it_is(models) -> None:
    model = models["llama"].module
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train_attention_lens(model, TEXTS, 1, steps=3, mode="residual", positions="last")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_same_seed_same_lens_and_another_seed_another(models, shards) -> None:
    args = models["llama"], shards["llama"]
    settings = {"steps": 10, "evaluate_every": 5, "batch_rows": 64, "learning_rate": 0.01}
    state = torch.random.get_rng_state()
    one, again, other = (fit_attention_lens(*args, seed=seed, **settings) for seed in (0, 0, 1))
    assert torch.equal(one.lens.weight, again.lens.weight)
    assert not torch.equal(one.lens.weight, other.lens.weight)
    assert (lens_cosine(one.lens, other.lens) > 0.9).all()
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("mode", ["joint", "residual"])
def test_it_goes_on_where_it_was_stopped(models, shards, tmp_path, monkeypatch, mode: str) -> None:
    args = models["llama"], shards["llama"]
    settings = {"mode": mode, "steps": 20, "evaluate_every": 4, "batch_rows": 64, "learning_rate": 0.01}
    settings |= {"start": "zero", "patience": 9}
    whole = fit_attention_lens(*args, **settings)
    save, count = attention_lens_training.save_training_state, []

    def stop(*given) -> None:
        save(*given)
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(attention_lens_training, "save_training_state", stop)
    with pytest.raises(KeyboardInterrupt):
        fit_attention_lens(*args, folder=tmp_path, **settings)
    monkeypatch.setattr(attention_lens_training, "save_training_state", save)
    steps = []
    batch = attention_lens_training._batch
    monkeypatch.setattr(attention_lens_training, "_batch", lambda *given: steps.append(given[2]) or batch(*given))
    resumed = fit_attention_lens(*args, folder=tmp_path, **settings)
    assert steps == list(range(12, 20))
    assert torch.equal(whole.lens.weight, resumed.lens.weight)
    assert torch.equal(whole.lens.bias, resumed.lens.bias)
    assert whole.history.equals(resumed.history)
    kept = load_attention_lens(tmp_path / "lens.safetensors")
    assert torch.equal(kept.weight, whole.lens.weight)
    assert kept.facts["scores"]["kl"] == whole.scores.kl
    with pytest.raises(ValueError, match=r"is of other learning_rate\. Give another folder"):
        fit_attention_lens(*args, folder=tmp_path, **settings | {"learning_rate": 0.5})


@pytest.mark.slow
def test_killed_at_any_write_it_goes_on_to_the_same_bytes(tmp_path) -> None:
    script = Path(__file__).with_name("killed_training.py")
    path = os.pathsep.join([str(Path(__file__).parents[1] / "families"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MICROTOME_CACHE": str(tmp_path / "c"), "PYTHONPATH": path}
    command = [sys.executable, str(script), str(tmp_path), "4"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"kills": 4, "same": True}


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_what_they_are_said_to_be(models, shards, kind: str) -> None:
    """By brute force on dense logits: KL, bias alone, drop-one-head, precision, words."""
    model, rows = models[kind], shards[kind]["test"]
    end = unembedding_of(model)
    lens = AttentionLens(
        1, "joint", 0.5 * random(4, 8, 120), random(1, 120), random(4, 8, seed=3), torch.tensor([0.1, 0.2, 0.3, 0.4])
    )
    plain = plain_weight(head_maps(model, 1)[0], folded_unembedding(end))
    bias = best_bias(shards[kind]["fit"].normed, end)
    scores = score_attention_lens(lens, rows, end, bias=bias, plain=plain, top=5)
    p = end.logits_of_normed(rows.normed).log_softmax(-1)

    def kl(logits: torch.Tensor) -> float:
        return float((p.exp() * (p - logits.log_softmax(-1))).sum(-1).mean())

    assert scores.kl == pytest.approx(kl(lens.logits(rows.mixed)), rel=1e-4)
    assert scores.kl_bias == pytest.approx(kl(bias.expand(len(rows), -1)), rel=1e-4)
    assert scores.kl_uniform == pytest.approx(kl(torch.zeros_like(p)), rel=1e-4)
    assert scores.explained == pytest.approx(1 - scores.kl / scores.kl_bias)
    best = [set(row.tolist()) for row in p.topk(5).indices]
    for head in range(4):
        without = rows.mixed.clone()
        without[:, head] = lens.mean[head]
        drop = kl(lens.logits(without)) - kl(lens.logits(rows.mixed))
        assert float(scores.drop_kl[head]) == pytest.approx(drop, abs=1e-4)
        own = lens.head_logits(rows.mixed, head).topk(5).indices
        shared = [len(best[i] & set(row.tolist())) / 5 for i, row in enumerate(own)]
        assert float(scores.precision[head]) == pytest.approx(np.mean(shared), abs=1e-6)
        token, share = scores.words[head][0]
        assert share == pytest.approx(float((own == token).sum()) / len(rows))
    frame = scores.to_frame(model)
    assert frame["peer_r2"].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert len(frame["words"][0].split()) == 8
    assert "cannot say whose" in repr(scores)
    assert "closed form" not in repr(scores)
    assert scores.to_frame()["words"][0].split()[0] == str(scores.words[0][0][0])


def test_causal_agreement_ablates_the_real_heads(models) -> None:
    """The fall of the top token's logit is that of a forward with the head's value at its mean; ranks are SciPy's."""
    model = models["gemma2"]
    rows = lens_rows(model, TEXTS, 1)
    lens = AttentionLens(1, "joint", random(4, 8, 120), random(1, 120), rows.mixed.mean(0), torch.zeros(4))
    found = causal_agreement(model, lens, TEXTS[:6])
    assert found.logit_fall.shape == (6, 4)
    for text in (0, 5):
        ids = torch.tensor([TEXTS[text]])
        with torch.no_grad():
            whole = model.module(ids).logits[0, -1]
            token = int(whole.argmax())
            for head in range(4):
                mean = lens.mean[head]
                with taps(model, edits={f"z.1.{head}": lambda value, mean=mean: mean - value}):
                    without = model.module(ids).logits[0, -1]
                expected = float(whole[token] - without[token])
                assert float(found.logit_fall[text, head]) == pytest.approx(expected, abs=1e-3)
        ranks = spearmanr(found.lens_logit[text].numpy(), found.logit_fall[text].numpy()).statistic
        assert float(found.spearman[text]) == pytest.approx(ranks, abs=1e-9)
    assert found.mean == pytest.approx(float(found.spearman.mean()))


def test_files_say_what_is_wrong_with_them(tmp_path) -> None:
    lens = AttentionLens(1, "joint", random(4, 8, 9), random(1, 9), random(4, 8), torch.ones(4), facts={"rows": 3})
    path = save_attention_lens(lens, tmp_path / "deep" / "lens.safetensors")
    again = load_attention_lens(path)
    assert torch.equal(again.weight, lens.weight)
    assert (again.layer, again.mode, again.log_mean_p, dict(again.facts)) == (1, "joint", None, {"rows": 3})
    with pytest.raises(ValueError, match=r"does not end in .safetensors"):
        save_attention_lens(lens, tmp_path / "lens.bin")
    with pytest.raises(FileNotFoundError, match="no file"):
        load_attention_lens(tmp_path / "none.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="is damaged"):
        load_attention_lens(path)
    attention_lens_training.save_training_state(path, {"weight": random(3)}, {})
    with pytest.raises(ValueError, match="expected 'attention lens', format 1"):
        load_attention_lens(path)


def test_bad_requests_are_told(models, shards, monkeypatch) -> None:
    model, rows = models["llama"], shards["llama"]
    for wrong, message in (
        ({"mode": "both"}, "mode='both'. Give one of 'joint'"),
        ({"form": "large"}, "form='large'. Give one of 'small', 'original'"),
        ({"start": "random"}, "start='random'"),
        ({"steps": 0}, "steps=0; give at least 1"),
        ({"batch_rows": 0}, "batch_rows=0"),
        ({"learning_rate": 0.0}, "the rate is above 0"),
        ({"shrink": 0.1, "form": "original"}, "shrink=0.1 pulls M of the small form"),
    ):
        with pytest.raises(ValueError, match=message):
            fit_attention_lens(model, rows, **wrong)
    with pytest.raises(ValueError, match="no rows in shard 'test'"):
        fit_attention_lens(model, {name: rows[name] for name in ("fit", "validation")})
    bare = {name: replace(part, stream=None) for name, part in rows.items()}
    with pytest.raises(ValueError, match="residual mode needs the stream"):
        fit_attention_lens(model, bare, mode="residual")
    broken = replace(rows["fit"], mixed=rows["fit"].mixed * torch.nan)
    with pytest.raises(ValueError, match="shard 'fit' holds NaN or infinity in mixed"):
        fit_attention_lens(model, rows | {"fit": broken})
    lens = AttentionLens(1, "joint", random(4, 8, 120), random(1, 120), random(4, 8), torch.zeros(4))
    none, end = rows["test"].take(torch.tensor([], dtype=torch.long)), unembedding_of(model)
    with pytest.raises(ValueError, match="no rows to score"):
        score_attention_lens(lens, none, end, bias=lens.bias[0], plain=lens.weight)
    with pytest.raises(ValueError, match="lenses of shape"):
        lens_cosine(lens, replace(lens, weight=random(4, 4, 120), mean=random(4, 4)))
    monkeypatch.setattr("microtome.lenses.attention_lens_rows.free_memory", lambda: 1000)
    with pytest.raises(MemoryError, match=r"joint lens, original form, .* parameters take .* Use form='small'"):
        fit_attention_lens(model, rows, form="original")


def test_a_model_without_heads_to_read_is_refused(models, tiny) -> None:
    with pytest.raises(ValueError, match="has no end that a lens can use"):
        lens_rows(tiny("bert"), [[5, 6, 7]], 1)
    with pytest.raises((IndexError, KeyError)):
        lens_rows(models["llama"], [[5, 6, 7]], 9)


def test_a_lens_knows_whose_it_is(models, tiny, word_tokenizer, tmp_path) -> None:
    """Shapes and even rows may be another model's too: an unembedding that was changed is another teacher."""
    settings = {"steps": 4, "evaluate_every": 2, "seed": 1}
    run = train_attention_lens(models["llama"], TEXTS, 1, folder=tmp_path, **settings)
    assert run.lens.facts["weight_sha256"] == models["llama"].provenance.weight_sha256
    changed = tiny("llama")
    with torch.no_grad():
        changed.lm_head.weight.neg_()
    other = LoadedModel.from_module(changed, word_tokenizer, name="other")
    with pytest.raises(ValueError, match="is of other weights"):
        train_attention_lens(other, TEXTS, 1, folder=tmp_path, **settings)
    for use in (
        lambda: load_attention_lens(tmp_path / "lens.safetensors").decode(other, TEXTS[:1]),
        lambda: causal_agreement(other, run.lens, TEXTS[:2]),
    ):
        with pytest.raises(ValueError, match="the lens was made for weights"):
            use()
    with pytest.raises(ValueError, match="a shard of rows was made for weights"):
        fit_attention_lens(other, lens_rows(models["llama"], TEXTS, 1).split())
    with pytest.raises(ValueError, match="max_rows=0"):
        lens_rows(other, TEXTS, 1, max_rows=0)


def test_a_stream_of_nan_is_told(models, shards) -> None:
    rows = shards["llama"]
    broken = replace(rows["test"], stream=rows["test"].stream * torch.nan)
    with pytest.raises(ValueError, match="shard 'test' holds NaN or infinity in stream"):
        fit_attention_lens(models["llama"], rows | {"test": broken}, mode="residual", start="zero")

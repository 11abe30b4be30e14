"""Attribution: completeness on several families, brute force by head and token, refusals that say why."""

import functools

import numpy as np
import pandas as pd
import pytest
import torch
from perturbation import perturb
from sklearn.linear_model import LogisticRegression
from transformers import GraniteConfig, GraniteForCausalLM

from microtome.capture.activations import Activations
from microtome.capture.models import LoadedModel
from microtome.capture.taps import taps
from microtome.probes.attribution import attribute
from microtome.probes.sweep import sweep

IDS = [[5, 9, 30, 4, 77, 8, 21], [11, 6, 90], [3, 44, 17, 60, 12]]


def probe(width: int = 32, seed: int = 0) -> tuple[np.ndarray, float]:
    return np.random.default_rng(seed).normal(size=width), 0.7


@pytest.fixture(scope="module")
def known(tiny):
    """Tiny models by kind, built and dissected once for this file."""
    return functools.cache(tiny)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "neox"])
def test_parts_sum_to_the_score(known, kind: str) -> None:
    model = known(kind)
    weight, intercept = probe()
    for site in ("resid_post.2", "resid_pre.1", "resid_post.0"):
        scores = []
        for ids in IDS:
            with torch.no_grad(), taps(model, site) as tape:  # without padding
                model(torch.tensor([ids]))
            scores.append(float(tape[site][0, -1].double() @ torch.tensor(weight)) + intercept)
        for split in ("layer", "head", "token"):
            found = attribute(model, IDS, probe(), site=site, split=split)
            by_text = found.table.groupby("text")["value"]
            size = by_text.agg(lambda values: values.abs().sum())
            assert bool(((by_text.sum() - scores).abs() < 1e-5 * size).all())
            assert bool((np.abs(found.scores.numpy() - scores) < 1e-5 * size).all())
            assert found.error < 1e-5


def test_heads_and_tokens_are_what_the_heads_write(known) -> None:
    model = known("llama")
    weight, _ = probe()
    heads = attribute(model, IDS, probe(), site="resid_post.2", split="head", positions=[4, -1, 2]).table
    tokens = attribute(model, IDS, probe(), site="resid_post.2", split="token", positions=[4, -1, 2])
    for text, place in enumerate([4, 2, 2]):
        with torch.no_grad(), taps(model, ["head_out.1", "mlp_out.1", "embed"]) as tape:
            model(torch.tensor([IDS[text]]))
        wanted = tape["head_out.1"][0, place].double() @ torch.tensor(weight)
        some = heads[(heads["text"] == text) & (heads["layer"] == 1)]
        np.testing.assert_allclose(some.loc[some["component"] == "attention", "value"], wanted, rtol=1e-4, atol=1e-5)
        mlp = float(tape["mlp_out.1"][0, place].double() @ torch.tensor(weight))
        assert some.loc[some["component"] == "mlp", "value"].item() == pytest.approx(mlp, rel=1e-4)
        embed = heads[(heads["text"] == text) & (heads["component"] == "embed")]["value"].item()
        assert embed == pytest.approx(float(tape["embed"][0, place].double() @ torch.tensor(weight)), rel=1e-5)
        # a source token's part: what the head reads from that position alone
        moved = tokens.table[(tokens.table["text"] == text) & (tokens.table["layer"] == 1)]
        by_head = moved[moved["component"] == "attention"].groupby("head")["value"].sum()
        np.testing.assert_allclose(by_head, wanted, rtol=1e-4, atol=1e-5)
        later = moved[(moved["component"] == "attention") & (moved["position"] > place)]
        assert bool((later["value"] == 0).all())  # causal


def test_a_source_token_is_the_change_when_its_value_is_taken_out(known) -> None:
    model = known("gpt2")
    weight, _ = probe()
    tokens = attribute(model, IDS[:1], probe(), site="resid_post.0", split="token").by_token()
    ids = torch.tensor(IDS[:1])

    def without(place: int):
        def edit(v: torch.Tensor) -> torch.Tensor:
            delta = torch.zeros_like(v)
            delta[:, place] = -v[:, place]
            return delta

        return edit

    def moved_by(edits: dict) -> float:
        with torch.no_grad(), taps(model, "attn_out.0", edits=edits) as tape:
            model(ids)
        return float(tape["attn_out.0"][0, -1].double() @ torch.tensor(weight))

    for place in range(7):
        change = moved_by({}) - moved_by({"v.0": without(place)})
        assert tokens.set_index("position")["value"].loc[place] == pytest.approx(change, abs=1e-4)


def test_factors_on_the_way_are_counted() -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    config = GraniteConfig(**shape, num_key_value_heads=2, vocab_size=120, residual_multiplier=0.3, pad_token_id=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GraniteForCausalLM(config).eval()
    perturb(model, 0)
    assert attribute(model, IDS, probe(), site="resid_post.2", split="token").error < 1e-5


def test_several_classes_and_centring(known) -> None:
    model = known("llama")
    with torch.no_grad(), taps(model, "resid_post.1") as tape:
        ids = torch.randint(3, 120, (60, 5), generator=torch.Generator().manual_seed(0))
        model(ids)
    X, y = tape["resid_post.1"][:, -1].numpy(), np.arange(60) % 3
    fitted = LogisticRegression(max_iter=500).fit(X, y)
    found = attribute(model, ids[:4].tolist(), fitted, site="resid_post.1", output=2)
    expected = fitted.decision_function(X[:4])
    np.testing.assert_allclose(found.scores, expected[:, 2] - expected.mean(1), atol=1e-4)
    reference = attribute(model, ids[4:].tolist(), fitted, site="resid_post.1", output=2)
    centred = found.centred(reference)
    sums = centred.groupby("text")["centred"].sum()
    np.testing.assert_allclose(sums, found.scores - reference.scores.mean(), atol=1e-4)
    assert centred.loc[centred["component"] == "intercept", "centred"].abs().max() < 1e-12
    with pytest.raises(ValueError, match="3 classes; say which"):
        attribute(model, IDS, fitted, site="resid_post.1")


def test_a_sweep_is_a_probe_and_classes_have_names(known) -> None:
    model = known("llama")
    with torch.no_grad(), taps(model, "resid_post.1") as tape:
        ids = torch.randint(3, 120, (60, 5), generator=torch.Generator().manual_seed(0))
        model(ids)
    acts = Activations.from_arrays({"resid_post.1": tape["resid_post.1"][:, -1]})
    names = np.array(["ant", "bee", "cat"])[np.arange(60) % 3]
    quick = {"groups": "rows", "permutations": 0, "bootstraps": 100, "progress": False, "folds": 2, "inner_folds": 2}
    result, texts = sweep(acts, names, **quick), ids[:4].tolist()
    wanted = result.decision(acts)[0, :4]
    found = attribute(model, texts, result, site="resid_post.1", output="cat")
    np.testing.assert_allclose(found.scores, wanted[:, 2] - wanted.mean(1), atol=1e-4)
    assert torch.equal(found.scores, attribute(model, texts, result, site="resid_post.1", output=2).scores)
    with pytest.raises(ValueError, match=r"3 classes; say which with output=0 to 2, or by name .'ant', 'bee', 'cat'"):
        attribute(model, texts, result, site="resid_post.1")
    with pytest.raises(ValueError, match="output='dog': its classes are 'ant', 'bee', 'cat'"):
        attribute(model, texts, result, site="resid_post.1", output="dog")
    with pytest.raises(KeyError, match=r"resid_post\.0 was not probed"):
        attribute(model, texts, result, site="resid_post.0", output="cat")
    two = sweep(acts, names == "bee", **quick)
    plain, yes, no = (
        attribute(model, texts, two, site="resid_post.1", output=o).scores for o in (None, "True", "False")
    )
    np.testing.assert_allclose(plain, two.decision(acts)[0, :4], atol=1e-4)
    assert torch.equal(plain, yes)
    np.testing.assert_allclose(plain, -no, atol=1e-9)
    fitted = LogisticRegression(max_iter=500).fit(acts["resid_post.1"].numpy(), names)
    by_name, by_number = (attribute(model, texts, fitted, site="resid_post.1", output=o).scores for o in ("bee", 1))
    assert torch.equal(by_name, by_number)
    with pytest.raises(ValueError, match="output='bee': this probe names no classes"):
        attribute(model, texts, probe(), site="resid_post.1", output="bee")


def test_strings_carry_their_tokens(known, word_tokenizer) -> None:
    model = LoadedModel.from_module(known("llama"), word_tokenizer, name="tiny")
    found = attribute(model, ["the cat sat", "a dog ran to it"], probe(), site="resid_post.1", split="token")
    assert found.by_token()["token"].tolist() == ["the", "cat", "sat", "a", "dog", "ran", "to", "it"]
    assert "2 texts by token" in repr(found)
    assert isinstance(found.table, pd.DataFrame)
    assert set(found.table["component"]) == {"intercept", "embed", "attention", "attention bias", "mlp"}


def test_refusals_say_why(known) -> None:
    model, normed = known("llama"), known("gemma2")
    with pytest.raises(ValueError, match=r"norm .* is on the trunk"):
        attribute(known("bert"), IDS, probe(), site="resid_post.1")
    assert attribute(normed, IDS, probe(), site="resid_post.1", split="layer").error < 1e-5
    with pytest.raises(ValueError, match=r"not the sum of its heads.*split='layer'"):
        attribute(normed, IDS, probe(), site="resid_post.1")
    with pytest.raises(ValueError, match="not a place on the stream"):
        attribute(model, IDS, probe(8), site="z.1.2")
    with pytest.raises(ValueError, match="the stream has 32 features"):
        attribute(model, IDS, probe(31), site="resid_post.1")
    with pytest.raises(ValueError, match="give 'layer', 'head' or 'token'"):
        attribute(model, IDS, probe(), site="resid_post.1", split="tokens")
    with pytest.raises(IndexError, match="text 1 has 3 tokens; there is no position 4"):
        attribute(model, IDS, probe(), site="resid_post.1", positions=4)
    with pytest.raises(ValueError, match="2 entries for 3 texts"):
        attribute(model, IDS, probe(), site="resid_post.1", positions=[0, 1])
    by_layer = attribute(model, IDS, probe(), site="resid_post.1", split="layer")
    with pytest.raises(ValueError, match="split='token'"):
        by_layer.by_token()
    with pytest.raises(ValueError, match="cannot be centred"):
        by_layer.centred(attribute(model, IDS, probe(), site="resid_post.1"))
    with pytest.raises(ValueError, match="another model or site"):
        by_layer.centred(attribute(model, IDS, probe(), site="resid_post.0", split="layer"))


@pytest.mark.parametrize("classes", [2, 3])
def test_a_sweep_gives_the_probe_of_its_site(known, classes: int) -> None:
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.arange(60) % classes)
    rows = {name: rng.normal(size=(60, 32)) + labels[:, None] for name in ("resid_post.0", "resid_post.1")}
    options = {"folds": 3, "inner_folds": 2, "permutations": 0, "bootstraps": 100, "progress": False}
    found = sweep(rows, labels, groups="rows", target="binary" if classes == 2 else "classes", **options)
    pair = (found.coef("resid_post.1"), found.intercepts[1])
    output = None if classes == 2 else 2
    by_sweep, by_pair = (
        attribute(known("llama"), IDS, given, site="resid_post.1", output=output) for given in (found, pair)
    )
    assert torch.equal(by_sweep.scores, by_pair.scores)
    with pytest.raises(KeyError, match=r"resid_post.2 was not probed"):
        attribute(known("llama"), IDS, found, site="resid_post.2", output=output)


@pytest.mark.parametrize("given", [np.ones(32), torch.ones(32), "weights", None, (np.ones(32),)])
def test_what_has_no_weights_and_intercept_is_no_probe(known, given) -> None:
    with pytest.raises(TypeError, match=r"give \(weights, intercept\), an estimator"):
        attribute(known("llama"), IDS, given, site="resid_post.1")


@pytest.mark.slow
def test_smollm2_is_complete_to_1e_5(smollm2) -> None:
    texts = ["The film was a delight from start to end.", "I have never been so bored."]
    found = attribute(smollm2, texts, probe(576), site="resid_post.20", split="token")
    assert found.error < 1e-5
    assert found.table.groupby("text")["value"].sum().to_numpy() == pytest.approx(found.scores.numpy(), rel=1e-3)

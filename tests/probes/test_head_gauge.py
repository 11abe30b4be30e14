"""Contributions at the width of a head: same inner products and same ridge as the writes into the stream."""

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm

from microtome.capture.collect import capture
from microtome.capture.models import LoadedModel
from microtome.capture.output_weights import output_weights
from microtome.probes.head_gauge import gauge, gauged, gauged_heads

TEXTS = ["the cat sat on the big red house .", "a dog ran", "she liked the film", "good", "it was a bad day ."]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def test_the_root_is_that_of_scipy() -> None:
    weights = torch.randn(2, 3, 4, 9, generator=torch.Generator().manual_seed(0))
    roots = gauge(weights)
    for layer in range(2):
        for head in range(3):
            product = (weights[layer, head] @ weights[layer, head].T).double().numpy()
            np.testing.assert_allclose(roots[layer, head].numpy(), sqrtm(product).real, atol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_writes_of_heads_sum_to_what_attention_adds_and_have_the_gauges_inner_products(
    tiny, word_tokenizer, kind: str
) -> None:
    model = LoadedModel.from_module(tiny(kind), word_tokenizer, name=kind)
    acts = capture(model, TEXTS, ["z", "head_out", "attn_out"], "all", progress=False)
    weights = output_weights(model)
    assert [str(site) for site in weights] == ["z.0", "z.1", "z.2"]
    narrow = gauged_heads(acts, weights)
    for layer in range(3):
        delta = torch.einsum("rhd,hdm->rhm", acts["z", layer], weights[acts.sites[layer]])
        assert relative(delta, acts["head_out", layer]) < 1e-5
        missing = acts["attn_out", layer] - delta.sum(1)  # the bias, the same in every row
        assert float((missing - missing[:1]).abs().max()) < 1e-5
        gram = torch.einsum("rhm,shm->hrs", delta, delta)
        o = narrow[f"z_gauged.{layer}"]
        assert o.shape == acts["z", layer].shape
        assert relative(torch.einsum("rhd,shd->hrs", o, o), gram) < 1e-5
    together = gauged(torch.stack([acts["z", n] for n in range(3)]), torch.stack(list(weights.values())))
    assert torch.equal(together[1], narrow["z_gauged.1"])


def test_some_layers(tiny) -> None:
    weights = output_weights(tiny("gpt2"), layers=[2])
    assert [str(site) for site in weights] == ["z.2"]
    assert next(iter(weights.values())).shape == (4, 8, 32)


def ridge_scores(x: torch.Tensor, y: torch.Tensor, strength: float) -> torch.Tensor:
    x = x.flatten(1).double()
    return x @ torch.linalg.solve(x.T @ x + strength * torch.eye(x.shape[1]), x.T @ y)


def dual_scores(x: torch.Tensor, y: torch.Tensor, strength: float) -> torch.Tensor:
    """The same from inner products alone, for many columns."""
    gram = x.flatten(1).double() @ x.flatten(1).double().T
    return gram @ torch.linalg.solve(gram + strength * torch.eye(len(y)), y)


def test_ridge_gives_the_same_predictions_as_on_the_writes_and_others_than_on_z() -> None:
    generator = torch.Generator().manual_seed(0)
    z, weights = torch.randn(30, 3, 4, generator=generator), torch.randn(3, 4, 20, generator=generator)
    y = torch.randn(30, generator=generator).double()
    delta = ridge_scores(torch.einsum("rhd,hdm->rhm", z, weights), y, 30.0)
    assert float((ridge_scores(gauged(z.double(), weights), y, 30.0) - delta).abs().max()) < 1e-5
    assert float((ridge_scores(z, y, 30.0) - delta).abs().max()) > 0.05


def test_bad_input_says_what_to_do(tiny, word_tokenizer) -> None:
    with pytest.raises(ValueError, match=r"z is \[5, 3, 4\], W_O \[2, 4, 9\].*same heads"):
        gauged(torch.zeros(5, 3, 4), torch.zeros(2, 4, 9))
    model = LoadedModel.from_module(tiny("llama"), word_tokenizer, name="llama")
    weights = output_weights(model, layers=1)
    with pytest.raises(KeyError, match=r"no z site of z\.1"):
        gauged_heads(capture(model, TEXTS, "z.0", progress=False), weights)
    with pytest.raises(ValueError, match=r"z\.1\.2 is one head"):
        gauged_heads(capture(model, TEXTS, "z.1.2", progress=False), weights)
    with pytest.raises(IndexError):
        output_weights(model, layers=7)


@pytest.mark.slow
def test_smollm2(smollm2) -> None:
    acts = capture(
        smollm2,
        ["A quiet triumph of a film.", "Two hours lost.", "It rained."],
        ["z", "head_out", "attn_out"],
        "all",
        progress=False,
    )
    weights = output_weights(smollm2)
    narrow = gauged_heads(acts, weights)
    y = torch.randn(acts.n_rows, generator=torch.Generator().manual_seed(0)).double()
    for layer in range(30):
        delta = acts["head_out", layer]
        assert relative(delta.sum(1), acts["attn_out", layer]) < 1e-5  # no bias
        o = narrow[f"z_gauged.{layer}"].double()
        gram = torch.einsum("rhm,shm->hrs", delta.double(), delta.double())
        assert relative(torch.einsum("rhd,shd->hrs", o, o), gram) < 1e-5
        strength = float(gram.sum(0).diagonal().mean())
        assert relative(ridge_scores(o, y, strength), dual_scores(delta, y, strength)) < 1e-5

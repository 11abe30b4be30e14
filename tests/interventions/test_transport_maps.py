"""AcT: maps by channel against closed forms and independent fits, their order over sites, and FiLM."""

import copy

import numpy as np
import pytest
import torch
from scipy.stats import linregress

from microtome.capture import capture
from microtome.interventions.operations import Affine
from microtome.interventions.steering import Intervention, Steering
from microtome.interventions.transport_maps import channel_map, film_of_classes, retained_variance, transport_maps

GOOD = [
    "the happy cat ran to the river .",
    "she liked the good film .",
    "a great big city .",
    "we saw good green trees .",
]
BAD = ["the sad cat sat in the house .", "she hated the bad film .", "an awful old town", "we saw bad small books ."]
SITES = ["mlp_out.0", "attn_out.1", "mlp_out.1"]


def samples(rows=40, channels=5, seed=0) -> torch.Tensor:
    return torch.randn(rows, channels, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def acted(found, x):
    """The edit at strength 1, at once and in float64."""
    operation = Affine(found.gain, found.bias, found.low, found.high)
    return x + operation.delta(x[None], torch.ones(1, len(x), 1, dtype=x.dtype), None)[0]


def test_an_affine_target_is_found_exactly():
    a, c, m = samples(), torch.tensor([0.5, 1.0, 2.0, 3.0, 0.1]).double(), samples(1, seed=2)[0]
    found = channel_map(a, c * a + m)
    assert torch.allclose(found.gain.double(), c, rtol=1e-6)
    assert torch.allclose(found.bias.double(), m, atol=1e-6)


def test_the_linear_map_is_the_regression_of_sorted_samples():
    a, b = samples(), samples(seed=1).exp()
    found = channel_map(a, b)
    for j in range(a.shape[1]):
        line = linregress(np.sort(a[:, j].numpy()), np.sort(b[:, j].numpy()))
        assert float(found.gain[j]) == pytest.approx(line.slope, rel=1e-6)
        assert float(found.bias[j]) == pytest.approx(line.intercept, rel=1e-5, abs=1e-6)


def test_order_of_samples_means_nothing_and_slopes_are_not_negative():
    a, b = samples(), -3 * samples()
    found = channel_map(a, b)
    again = channel_map(a[torch.randperm(len(a))], b[torch.randperm(len(b))])
    assert (found.gain > 0).all()
    for name in ("gain", "bias", "low", "high"):
        assert torch.allclose(getattr(found, name), getattr(again, name), atol=1e-6)


def test_of_gaussians_the_slope_goes_to_the_ratio_of_deviations():
    a, b = 2 * samples(20_000), 3 + 5 * samples(20_000, seed=1)
    for kind in ("linear", "gaussian"):
        found = channel_map(a, b, kind)
        assert torch.allclose(found.gain, torch.full((5,), 2.5), rtol=0.03)
    assert torch.allclose(channel_map(a, b, "gaussian").gain.double(), b.std(0) / a.std(0), rtol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "mean", "gaussian"])
@pytest.mark.parametrize("n_target", [40, 57])
def test_strength_one_reaches_the_targets_mean_and_zero_nothing(kind, n_target):
    a, b = samples(), samples(n_target, seed=1).exp()
    found = channel_map(a.float(), b.float(), kind)
    x = a.float().double()
    new = acted(found, x)
    assert torch.allclose(new.mean(0), b.float().double().mean(0), atol=1e-6)
    if kind == "mean":
        assert (found.gain == 1).all()
    if kind == "gaussian":
        assert torch.allclose(new.std(0), b.std(0), rtol=1e-5)
    zero = Affine(found.gain, found.bias, found.low, found.high).delta(x[None], torch.zeros(1, 40, 1).double(), None)
    assert not zero.any()


def test_strength_one_keeps_the_squared_correlation_of_the_variance():
    a, b = samples().float(), samples(seed=1).exp().float()
    new = acted(channel_map(a, b), a.double())
    kept = torch.tensor([np.corrcoef(np.sort(a[:, j]), np.sort(b[:, j]))[0, 1] ** 2 for j in range(5)])
    assert torch.allclose(new.var(0) / b.double().var(0), kept, rtol=1e-5)
    assert torch.allclose(torch.from_numpy(retained_variance(a, b)), kept, rtol=1e-5)
    assert (kept < 0.99).any()


def test_a_channel_that_never_varies_is_only_shifted():
    a, b = samples(), samples(seed=1)
    a[:, 0] = 3.0
    for kind in ("linear", "gaussian"):
        found = channel_map(a, b, kind)
        assert float(found.gain[0]) == 1.0
        assert float(found.bias[0]) == pytest.approx(float(b[:, 0].mean()) - 3.0, rel=1e-5)


def test_the_support_is_the_sources_quantiles():
    a = samples(101)
    found = channel_map(a, samples(101, seed=1), quantile=0.05)
    low, high = np.quantile(a.numpy(), [0.05, 0.95], axis=0)
    assert np.allclose(found.low, low)
    assert np.allclose(found.high, high)
    new = acted(found, a)
    outside = (a < found.low) | (a > found.high)
    assert outside.any()
    assert torch.equal(new[outside], a[outside])


def test_film_is_act_in_other_words():
    a, b = samples(), 2 * samples(seed=1) + 1
    gamma, beta = film_of_classes(a, b)
    strength = torch.full((1, 40, 1), 0.3, dtype=torch.float64)
    x = a[None]
    film = (1 + 0.3 * (gamma.double() - 1)) * x + 0.3 * beta.double()
    assert torch.allclose(x + Affine(gamma, beta).delta(x, strength, None), film, rtol=1e-10)
    assert torch.allclose((gamma.double() * a + beta.double()).mean(0), b.mean(0), atol=1e-6)


def test_film_of_a_norms_output_is_another_gain_and_bias(gpt2):
    d = gpt2.module.config.n_embd
    gamma, beta = 1 + 0.3 * samples(1, d)[0].float(), samples(1, d, seed=1)[0].float()
    edits = Steering(Intervention("final_norm", Affine(gamma, beta))).edits(gpt2)
    edited = capture(gpt2, GOOD, ["logits"], "all", edits=edits, progress=False)["logits"]
    clean = capture(gpt2, GOOD, ["logits"], "all", progress=False)["logits"]
    module = copy.deepcopy(gpt2.module)
    with torch.no_grad():
        module.transformer.ln_f.weight.mul_(gamma)
        module.transformer.ln_f.bias.mul_(gamma).add_(beta)
    other = type(gpt2).from_module(module, gpt2.tokenizer, name="edited")
    folded = capture(other, GOOD, ["logits"], "all", progress=False)["logits"]
    assert torch.allclose(edited, folded, atol=1e-5)
    assert not torch.allclose(clean, folded, atol=1e-2)


def fitted(model, **options):
    return transport_maps(model, GOOD, BAD, SITES, progress=False, **options)


@pytest.mark.parametrize("kind", ["linear", "mean", "gaussian"])
def test_in_steps_every_site_ends_at_the_wanted_mean(llama, kind):
    found = fitted(llama, kind=kind, extraction="last", positions="last")
    aims = capture(llama, GOOD, SITES, "last", progress=False)
    edited = capture(llama, BAD, SITES, "last", edits=found.steering(llama).edits(llama), progress=False)
    for site in SITES:
        assert torch.allclose(edited[site].mean(0), aims[site].mean(0), atol=1e-4)


def test_at_once_only_the_first_site_does(llama):
    found = fitted(llama, kind="mean", order="at once", extraction="last", positions="last")
    steps = fitted(llama, kind="mean", extraction="last", positions="last")
    for name in found.tensors:
        assert torch.equal(found.tensors[name][0], steps.tensors[name][0])
        if name == "bias":
            assert not torch.allclose(found.tensors[name][1:], steps.tensors[name][1:], atol=1e-4)
    aims = capture(llama, GOOD, SITES, "last", progress=False)
    edited = capture(llama, BAD, SITES, "last", edits=found.steering(llama).edits(llama), progress=False)
    assert torch.allclose(edited[SITES[0]].mean(0), aims[SITES[0]].mean(0), atol=1e-5)
    assert not torch.allclose(edited[SITES[2]].mean(0), aims[SITES[2]].mean(0), atol=1e-4)


def test_at_once_is_one_map_of_two_captures(llama):
    found = fitted(llama, order="at once")
    good, bad = (capture(llama, texts, SITES, "mean", progress=False) for texts in (GOOD, BAD))
    for number, site in enumerate(SITES):
        one = channel_map(bad[site], good[site])
        assert torch.equal(found.tensors["gain"][number], one.gain)
        assert torch.equal(found.tensors["bias"][number], one.bias)


def test_what_cannot_be_fitted_is_refused(llama):
    a = samples()
    with pytest.raises(ValueError, match="at least two"):
        channel_map(a[:1], a)
    with pytest.raises(ValueError, match="finite"):
        channel_map(a * torch.nan, a)
    with pytest.raises(ValueError, match="order of depth"):
        transport_maps(llama, GOOD, BAD, ["mlp_out.1", "mlp_out.0"], progress=False)
    with pytest.raises(ValueError, match="order of depth"):
        transport_maps(llama, GOOD, BAD, ["mlp_out.1", "attn_out.1"], progress=False)
    with pytest.raises(ValueError, match="needs both"):
        transport_maps(llama, [], BAD, SITES, progress=False)
    with pytest.raises(ValueError, match="quantile"):
        channel_map(a, a, quantile=0.6)

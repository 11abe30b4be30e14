"""LayerMixProbe: the informative layer gets the weight, whatever the norms; the optimum is one."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import Tensor

from microtome.probes.layer_mix import LayerMixProbe, fit_layer_mix


@parametrize_with_checks([LayerMixProbe()])
def test_scikit_learns_contract(estimator, check) -> None:
    check(estimator)


def planted(informative: int = 2, n_rows: int = 400, width: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Five layers of noise, each longer than the one before; one of them carries the label."""
    generator = torch.Generator().manual_seed(seed)
    positive = torch.rand(n_rows, generator=generator) > 0.5
    features = torch.randn(5, n_rows, width, generator=generator, dtype=torch.float64)
    direction = torch.randn(width, generator=generator, dtype=torch.float64)
    features[informative] += (2.0 * positive[:, None] - 1) * direction
    return features * torch.tensor([1.0, 2, 4, 8, 16])[:, None, None] + 3, positive


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("informative", [0, 2, 4])
def test_one_informative_layer_takes_the_weight(informative: int, normalize: bool) -> None:
    features, positive = planted(informative)
    train = torch.arange(400)[None] < 300
    fits = fit_layer_mix(features, positive[None], train, normalize=normalize)
    assert fits.shares[0, 0, informative] > 0.9
    assert fits.gradient.max() < 1e-5
    torch.testing.assert_close(fits.shares.sum(-1), torch.ones(1, 1, dtype=torch.float64))
    is_right = (fits.logits(features)[0, 0] > 0) == positive
    assert is_right[300:].float().mean() > 0.85


def test_shares_are_weights_times_the_mean_norm_of_training_rows() -> None:
    features, positive = planted()
    # the same layer twice, once far from the origin: alike to the probe, not in norm
    twice = torch.stack([features[2], features[2] + 40])
    train = torch.arange(400)[None] < 300
    fits = fit_layer_mix(twice, positive[None], train)
    torch.testing.assert_close(fits.weights[0, 0], torch.tensor([0.5, 0.5], dtype=torch.float64))
    norms = twice[:, :300].norm(dim=-1).mean(1)
    torch.testing.assert_close(fits.shares[0, 0], norms / norms.sum())
    assert fits.shares[0, 0, 1] > 0.7


def test_one_layer_is_logistic_regression() -> None:
    features, positive = planted()
    fits = fit_layer_mix(
        features[2:3], positive[None], torch.ones(1, 400, dtype=torch.bool), strength=0.5, tolerance=1e-9
    )
    centred = features[2] - features[2].mean(0)
    unit = float(centred.square().mean().sqrt())
    other = LogisticRegression(C=0.5, tol=1e-10, solver="newton-cholesky").fit(centred / unit, positive)
    np.testing.assert_allclose(fits.coefficients[0, 0] * unit, other.coef_[0], atol=1e-4)
    np.testing.assert_allclose(fits.logits(features[2:3])[0, 0], other.decision_function(centred / unit), atol=1e-4)


def test_no_small_step_lowers_the_objective() -> None:
    features, positive = planted(n_rows=80)
    fits = fit_layer_mix(features, positive[None], torch.ones(1, 80, dtype=torch.bool), strength=0.1)
    centred = features - features.mean(1, keepdim=True)
    unit = centred.square().mean().sqrt()

    def objective(weights: Tensor, w: Tensor, b: Tensor) -> float:
        z = weights @ (features @ w) + b
        return float((w * unit).square().sum() / 2 + 0.1 * (z.exp().log1p() - positive * z).sum())

    best = (fits.weights[0, 0], fits.coefficients[0, 0], fits.intercept[0, 0])
    lowest = objective(*best)
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        moved = [value + 1e-2 * value.abs().mean() * torch.randn(value.shape, generator=generator) for value in best]
        moved[0] = (best[0].log() + 1e-2 * torch.randn(5, generator=generator)).softmax(0)
        assert objective(*moved) > lowest


def test_rows_outside_the_fold_change_no_bit_and_labellings_do_not_mix() -> None:
    features, positive = planted()
    train = torch.stack([torch.arange(400) < 300, torch.arange(400) >= 100])
    labels = torch.stack([positive, positive.roll(7)])
    fits = fit_layer_mix(features, labels, train)
    spoiled = features.clone()
    spoiled[:, 350] = 1e9
    alone = fit_layer_mix(spoiled, labels[1:], train[:1])
    for before, after in ((fits.weights, alone.weights), (fits.coefficients, alone.coefficients)):
        torch.testing.assert_close(before[1, 0], after[0, 0], atol=0, rtol=0)


def test_the_estimator_is_the_function() -> None:
    features, positive = planted()
    X = features.transpose(0, 1).flatten(1).numpy()
    for normalize in (False, True):
        probe = LayerMixProbe(5, normalize=normalize).fit(X, positive.numpy())
        fits = fit_layer_mix(features, positive[None], torch.ones(1, 400, dtype=torch.bool), normalize=normalize)
        np.testing.assert_allclose(probe.decision_function(X), fits.logits(features)[0, 0], atol=1e-9)
        np.testing.assert_array_equal(probe.layer_shares_, fits.shares[0, 0])
        assert np.linalg.norm(probe.direction_) == pytest.approx(1)
    assert probe.coef_.shape == (1, 60)


def test_bad_input_says_what_to_do() -> None:
    X, y = np.arange(24.0).reshape(4, 6), np.array([0, 1, 0, 1])
    with pytest.raises(ValueError, match="n_layers=4 does not divide"):
        LayerMixProbe(4).fit(X, y)
    with pytest.raises(ValueError, match=r"y has 1 class\(es\)"):
        LayerMixProbe(2).fit(X, np.ones(4))
    with pytest.raises(ValueError, match="C is finite and above 0"):
        LayerMixProbe(2, C=0).fit(X, y)
    features, positive = planted()
    train = torch.ones(1, 400, dtype=torch.bool)
    spoiled = features.clone()
    spoiled[1, 2] = torch.inf
    with pytest.raises(ValueError, match="layer 1, row 2, feature 0"):
        fit_layer_mix(spoiled, positive[None], train)
    with pytest.raises(ValueError, match="labels covers 399 rows"):
        fit_layer_mix(features, positive[None, 1:], train)
    with pytest.raises(ValueError, match="fewer than two classes"):
        fit_layer_mix(features, positive[None], positive[None])

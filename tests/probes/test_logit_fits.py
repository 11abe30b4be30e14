"""Scores to logits, against scikit-learn's logistic regression on standardised scores."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from microtome.probes.logit_fits import fit_logits


def test_two_classes_agree_with_scikit_learn():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, size=(4, 300))
    scores = 7 + rng.normal(size=(4, 300)) * [[0.1], [1], [10], [100]] + labels * [[0.2], [1], [3], [90]]
    weights = rng.uniform(0.5, 2, size=300)
    fitted = fit_logits(torch.from_numpy(scores), torch.from_numpy(labels), torch.from_numpy(weights))
    for number, (s, y) in enumerate(zip(scores, labels, strict=True)):
        centre = np.average(s, weights=weights)
        unit = np.sqrt(np.average((s - centre) ** 2, weights=weights))
        other = LogisticRegression(C=1, solver="newton-cholesky", tol=1e-12)
        other.fit(((s - centre) / unit)[:, None], y, sample_weight=weights)
        logits = other.decision_function(((s - centre) / unit)[:, None])
        ours = fitted.slope[number].item() * s + fitted.intercept[number].item()
        np.testing.assert_allclose(ours, logits, atol=1e-6)
        bits = log_loss(y, 1 / (1 + np.exp(-logits)), sample_weight=weights) / np.log(2)
        assert fitted.loss_bits[number].item() == pytest.approx(bits, abs=1e-8)


def test_several_classes_share_a_slope_and_two_agree_with_the_binary_form():
    rng = np.random.default_rng(1)
    labels = torch.from_numpy(rng.integers(0, 3, size=(2, 400)))
    hot = torch.nn.functional.one_hot(labels, 3).double()
    scores = torch.from_numpy(rng.normal(size=(2, 400, 3))) + 2 * hot + torch.tensor([0.0, 3.0, -1.0])
    ones = torch.ones(400, dtype=torch.float64)
    fitted = fit_logits(scores, labels, ones)
    logits = (fitted.slope[:, None, None] * scores + fitted.intercept[:, None]).requires_grad_()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    (gradient,) = torch.autograd.grad(loss, logits)
    # at the optimum each class's probabilities sum to its rows, and along the slope the loss balances the penalty
    np.testing.assert_allclose(gradient.sum(dim=1), 0, atol=1e-6)
    apart = scores - scores[..., :1]
    squares = (apart - apart.mean(dim=1, keepdim=True)).square().sum(dim=(1, 2)) / 400 / 2
    torch.testing.assert_close((gradient * scores).sum(dim=(1, 2)), -fitted.slope * squares, rtol=1e-5, atol=1e-6)
    # the scores are a softmax's logits times 1: p(x | y) ∝ exp(2 t_y)
    np.testing.assert_allclose(fitted.slope, 2, atol=0.35)
    two = labels[:1] % 2
    pair = fit_logits(scores[:1, :, :2], two, ones)
    single = fit_logits(scores[:1, :, 1] - scores[:1, :, 0], two, ones)
    torch.testing.assert_close(pair.slope, single.slope, rtol=1e-6, atol=0)
    torch.testing.assert_close(pair.intercept[:, 1], single.intercept, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(pair.loss_bits, single.loss_bits)


def test_separated_constant_and_reversed_scores_stay_finite_and_keep_their_order():
    labels = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]]).expand(3, -1)
    scores = torch.stack([labels[0] * 100.0, torch.full((8,), 4.0), -labels[0].double()]).double()
    fitted = fit_logits(scores, labels, torch.ones(8, dtype=torch.float64))
    logits = fitted.slope[:, None] * scores + fitted.intercept[:, None]
    assert logits.isfinite().all()
    assert (fitted.slope > 0).all()
    assert fitted.loss_bits[0] < 0.5
    np.testing.assert_allclose(logits[1].sigmoid(), 5 / 8, atol=1e-9)
    np.testing.assert_allclose(logits[2].sigmoid(), 5 / 8, atol=5e-3)
    base = -(3 / 8 * np.log2(3 / 8) + 5 / 8 * np.log2(5 / 8))
    assert fitted.loss_bits[1].item() == pytest.approx(base)


def test_a_class_without_rows_is_refused():
    with pytest.raises(ValueError, match="Class 1 has no row to calibrate scores by"):
        fit_logits(torch.randn(1, 5).double(), torch.zeros(1, 5, dtype=torch.int64), torch.ones(5).double())

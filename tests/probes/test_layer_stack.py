"""stack_layers: no weight is negative, the optimum is scikit-learn's where that is inside, folds are held out."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from microtome.probes.layer_stack import stack_layers


def planted(n_rows: int = 400, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scores of four sites: two that know, one that does not, one that errs."""
    generator = torch.Generator().manual_seed(seed)
    positive = torch.rand(n_rows, generator=generator) > 0.4
    signal = torch.tensor([1.0, 0.6, 0.0, -1.0])[:, None] * (2.0 * positive - 1)
    return signal + torch.randn(4, n_rows, generator=generator), positive


def test_no_weight_is_negative_and_the_useful_ones_lead() -> None:
    scores, positive = planted()
    stack = stack_layers(scores, positive)
    assert (stack.weights >= 0).all()
    assert stack.weights[3] == 0
    assert stack.weights[0] > stack.weights[1] > stack.weights[2]
    cost = stack.bits_without - stack.bits
    assert cost[0] > cost[1] > cost[2] > -1e-6
    assert cost[3] == pytest.approx(0, abs=1e-6)


def test_agrees_with_scikit_learn_where_no_bound_binds() -> None:
    scores, positive = planted()
    stack = stack_layers(scores[:2], positive, ridge=0.01)
    other = LogisticRegression(C=1 / (0.01 * 400), tol=1e-10, solver="newton-cholesky").fit(scores[:2].T, positive)
    np.testing.assert_allclose(stack.weights, other.coef_[0], atol=1e-6)
    np.testing.assert_allclose(stack.scores, other.decision_function(scores[:2].T), atol=1e-5)


def test_a_fold_is_scored_by_the_weights_of_the_others() -> None:
    scores, positive = planted()
    test = torch.arange(400) % 4 == torch.arange(4)[:, None]
    stack = stack_layers(scores, positive, test=test)
    own = stack_layers(scores[:, ~test[2]], positive[~test[2]])
    torch.testing.assert_close(stack.scores[test[2]], own.weights @ scores[:, test[2]].double() + own.intercept)
    assert not torch.allclose(own.weights, stack.weights)


def test_separable_scores_get_finite_weights() -> None:
    positive = torch.arange(20) % 2 == 0
    stack = stack_layers((2.0 * positive - 1)[None].repeat(2, 1), positive)
    assert stack.weights.isfinite().all()
    torch.testing.assert_close(stack.weights[0], stack.weights[1])


def test_without_its_only_site_the_class_shares_are_left() -> None:
    scores, positive = planted()
    share = positive.double().mean().item()
    entropy = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
    assert stack_layers(scores[:1], positive).bits_without.item() == pytest.approx(entropy)


def test_bad_input_says_what_to_do() -> None:
    scores, positive = planted()
    with pytest.raises(ValueError, match="NaN"):
        stack_layers(scores * torch.nan, positive)
    with pytest.raises(ValueError, match="finite logits"):
        stack_layers(scores / 0, positive)
    with pytest.raises(ValueError, match="ridge=0"):
        stack_layers(scores, positive, ridge=0)
    with pytest.raises(ValueError, match="400 of 400 rows"):
        stack_layers(scores, torch.ones_like(positive))
    with pytest.raises(ValueError, match="exactly one fold"):
        stack_layers(scores, positive, test=torch.ones(2, 400, dtype=torch.bool))

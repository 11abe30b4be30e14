import pytest
import torch
from sklearn.linear_model import LogisticRegression

from microtome.probes.leave_one_out import loo_logits
from microtome.probes.logistic_solver import fit_logistic


def problem(sites: int = 1):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(sites, 400, 40, dtype=torch.float64, generator=generator) * 3 + 1
    noise = torch.randn(400, dtype=torch.float64, generator=generator)
    return features, features[0, :, :5].sum(1) - 5 + 6 * noise > 0


@pytest.mark.parametrize("strength", [0.01, 1.0])
def test_within_a_twentieth_of_refitting(strength) -> None:
    features, positive = problem()
    features = (features - features.mean(1)) / features.std(1, correction=0)
    found = loo_logits(features, positive, strength)[0]
    full = fit_logistic(features, positive, torch.ones_like(positive), [strength]).decision(features)[0, 0, 0, 0]
    exact = torch.empty_like(found)
    x, y = features[0].numpy(), positive.numpy()
    for row in range(0, 400, 4):
        kept = [i for i in range(400) if i != row]
        probe = LogisticRegression(C=strength, solver="newton-cholesky", tol=1e-10).fit(x[kept], y[kept])
        exact[row] = probe.decision_function(x[row : row + 1])[0]
    assert (found - exact)[::4].abs().max() < 0.05
    moved = (full - exact)[::4].abs().max()
    assert moved > (0.3 if strength == 1 else 0.06)
    assert (found - exact)[::4].abs().max() < moved / 5


def test_sites_and_units_do_not_matter_and_a_constant_feature_does_nothing() -> None:
    features, positive = problem(2)
    both = loo_logits(features, positive, 0.1)
    torch.testing.assert_close(both[1:], loo_logits(features[1:] * 7 + 2, positive, 0.1), rtol=0, atol=1e-6)
    constant = torch.cat([features, torch.full_like(features[..., :1], 4.0)], -1)
    torch.testing.assert_close(both, loo_logits(constant, positive, 0.1), rtol=0, atol=1e-6)


def test_one_class_has_no_fit() -> None:
    features, positive = problem()
    with pytest.raises(ValueError, match="one class only"):
        loo_logits(features, torch.ones_like(positive), 0.1)

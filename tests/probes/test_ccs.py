"""CCSProbe: `fit_ccs` with scikit-learn's contract, where pairs are whole."""

import numpy as np
import pytest
import torch
from sklearn.utils.estimator_checks import check_estimator
from torch import Tensor

from microtome.probes.ccs import CCSProbe
from microtome.probes.ccs_fits import fit_ccs

QUICK = {"steps": 300, "learning_rate": 0.02}


def pairs(n_sites: int = 1, n_pairs: int = 300, width: int = 8, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Truth along a direction of its own at each site, and a mark of the side that is easier to see."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.rand(n_pairs, generator=generator) > 0.5
    direction = torch.randn(n_sites, 1, width, generator=generator)
    topic = torch.randn(n_sites, n_pairs, width, generator=generator)
    sides = []
    for sign in (1, -1):
        noise = 0.5 * torch.randn(n_sites, n_pairs, width, generator=generator)
        sides.append(topic + noise + sign * (2.0 * truth[:, None] - 1) * direction + 5 * sign)
    return (*sides, truth)


def test_the_estimator_is_the_function() -> None:
    ours, theirs, truth = pairs()
    X = torch.cat([ours, theirs], -1)[0].numpy()
    probe = CCSProbe(**QUICK).fit(X[:200], np.where(truth, "yes", "no")[:200])
    fits = fit_ccs(ours[:, :200], theirs[:, :200], torch.ones(1, 200, dtype=torch.bool), truth[:200], **QUICK)
    np.testing.assert_allclose(probe.decision_function(X), fits.scores(ours, theirs)[0, 0], atol=1e-12)
    assert probe.score(X[200:], np.where(truth, "yes", "no")[200:]) > 0.9
    # which side's logit is higher decides
    margin = X[200:] @ probe.coef_[0] + probe.intercept_[0]
    np.testing.assert_array_equal(margin > 0, probe.predict(X[200:]) == "yes")
    np.testing.assert_allclose(probe.predict_proba(X).sum(1), 1)


def test_scikit_learns_contract_where_the_number_of_features_is_even() -> None:
    results = check_estimator(CCSProbe(steps=20), on_skip=None, on_fail=None)
    failed = {result["check_name"]: str(result["exception"]) for result in results if result["status"] == "failed"}
    assert {name for name, said in failed.items() if "needs an even number" not in said} == set()
    assert len(failed) < len(results) / 2


def test_the_estimator_refuses_half_a_pair() -> None:
    with pytest.raises(ValueError, match="needs an even number"):
        CCSProbe().fit(np.ones((4, 3)), [0, 1, 0, 1])
    with pytest.raises(ValueError, match="must hold both answers"):
        CCSProbe().fit(np.ones((4, 2)), [1, 1, 1, 1])

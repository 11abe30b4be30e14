"""Recursive least squares against batch ridge regression."""

import numpy as np
import pytest
from sklearn.linear_model import Ridge
from sklearn.utils.estimator_checks import parametrize_with_checks

from microtome.probes.recursive_least_squares import RecursiveLeastSquares


@parametrize_with_checks([RecursiveLeastSquares()])
def test_scikit_learns_contract(estimator, check) -> None:
    check(estimator)


def data(rows=1200, width=10, outputs=2, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, width)) * np.logspace(-1, 1, width) + 30
    return X, X @ rng.normal(size=(width, outputs)) + rng.normal(size=(rows, outputs)) + 100


@pytest.mark.parametrize("size", [1, 7, 300])
def test_many_blocks_equal_one_batch(size) -> None:
    X, y = data()
    probe = RecursiveLeastSquares(2.5)
    for start in range(0, len(X), size):
        probe.partial_fit(X[start : start + size], y[start : start + size])
    batch = Ridge(alpha=2.5, solver="svd").fit(X, y)
    np.testing.assert_allclose(probe.coef_, batch.coef_, rtol=1e-8)
    np.testing.assert_allclose(probe.intercept_, batch.intercept_, rtol=1e-8)
    assert probe.rows_seen_ == len(X)
    single = RecursiveLeastSquares(2.5).fit(X, y[:, 0])
    np.testing.assert_allclose(single.predict(X), batch.predict(X)[:, 0], rtol=1e-8)


@pytest.mark.parametrize("size", [1, 50])
def test_forgetting_weighs_rows_by_age(size) -> None:
    X, y = data(rows=400, outputs=1)
    probe = RecursiveLeastSquares(2.5, forgetting=0.99)
    for start in range(0, 400, size):
        probe.partial_fit(X[start : start + size], y[start : start + size])
    weight = 0.99 ** np.arange(399, -1, -1.0)
    batch = Ridge(alpha=2.5 * 0.99**400, solver="svd").fit(X, y, sample_weight=weight)
    np.testing.assert_allclose(probe.coef_, batch.coef_.reshape(1, -1), rtol=1e-7)
    changed = RecursiveLeastSquares(1.0, forgetting=0.95).fit(X, y[:, 0]).partial_fit(X, -y[:, 0])
    assert changed.score(X, -y[:, 0]) > 0.5 > RecursiveLeastSquares().fit(X, y[:, 0]).score(X, -y[:, 0])


def test_bad_input_says_what_to_do() -> None:
    X, y = data(rows=50)
    with pytest.raises(ValueError, match="finite value above 0"):
        RecursiveLeastSquares(0.0).fit(X, y)
    with pytest.raises(ValueError, match="above 0, at most 1"):
        RecursiveLeastSquares(forgetting=1.1).fit(X, y)
    with pytest.raises(ValueError, match="y has 1 outputs; earlier rows had 2"):
        RecursiveLeastSquares().fit(X, y).partial_fit(X, y[:, 0])

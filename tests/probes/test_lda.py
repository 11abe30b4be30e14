"""LDAProbe: scikit-learn's contract and answers, planted ones, left-out rows against refits."""

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.covariance import ledoit_wolf
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from microtome.probes.lda import SHRINKAGES, LDAProbe


@parametrize_with_checks([LDAProbe(), LDAProbe("left_out")])
def test_scikit_learns_contract(estimator, check) -> None:
    check(estimator)


def data(rows=200, width=6, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(rows) % classes)
    X = rng.normal(size=(rows, width)) @ rng.normal(size=(width, width)) + rng.normal(size=(classes, width))[y]
    return X * np.logspace(-1, 1, width) + 5, y


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("shrinkage", [0.0, 0.01, 0.5, 1.0])
def test_agrees_with_scikit_learn(classes, shrinkage) -> None:
    X, y = data(classes=classes)
    ours = LDAProbe(shrinkage, standardize=False).fit(X, y)
    for solver in ("lsqr", "eigen"):
        other = LinearDiscriminantAnalysis(solver=solver, shrinkage=shrinkage).fit(X, y)
        np.testing.assert_allclose(ours.predict_proba(X), other.predict_proba(X), atol=1e-8)
    other = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage).fit(StandardScaler().fit_transform(X), y)
    standardised = LDAProbe(shrinkage).fit(X, y)
    expected = other.predict_proba(StandardScaler().fit_transform(X))
    np.testing.assert_allclose(standardised.predict_proba(X), expected, atol=1e-8)
    np.testing.assert_allclose(ours.means_, other.means_ * X.std(axis=0) + X.mean(axis=0))
    if classes == 2:
        np.testing.assert_allclose(standardised.coef_ * X.std(axis=0), other.coef_, rtol=1e-8)


def test_ledoit_wolf_is_of_rows_about_their_class_means() -> None:
    X, y = data()
    Z = StandardScaler().fit_transform(X)
    apart = Z - np.stack([Z[y == k].mean(axis=0) for k in range(3)])[y]
    assert LDAProbe("ledoit_wolf").fit(X, y).shrinkage_ == pytest.approx(ledoit_wolf(apart, assume_centered=True)[1])


@pytest.mark.parametrize("classes", [2, 4])
def test_left_out_losses_agree_with_refits(classes) -> None:
    X, y = data(rows=40, width=12, classes=classes)
    Z = StandardScaler().fit_transform(X)
    probe = LDAProbe("left_out").fit(X, y)
    for shrinkage, found in zip(SHRINKAGES, probe.left_out_loss_, strict=True):
        bits = 0.0
        for row in range(40):
            kept = np.arange(40) != row
            other = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage).fit(Z[kept], y[kept])
            bits -= other.predict_log_proba(Z[[row]])[0, y[row]] / np.log(2)
        assert found == pytest.approx(bits / 40, rel=1e-6)
    assert probe.shrinkage_ == SHRINKAGES[int(np.argmin(probe.left_out_loss_))]


def test_planted_direction_reaches_bayes_accuracy() -> None:
    rng = np.random.default_rng(3)
    deviation = np.logspace(-1, 1, 64)
    step = 0.18 * deviation ** np.linspace(0.2, 1.5, 64)
    y = rng.integers(0, 2, 20000)
    X = rng.normal(size=(20000, 64)) * deviation + np.where(y == 1, 0.5, -0.5)[:, None] * step
    bayes = norm.cdf(0.5 * np.linalg.norm(step / deviation))
    for shrinkage in ("ledoit_wolf", 0.0):
        assert LDAProbe(shrinkage).fit(X[:10000], y[:10000]).score(X[10000:], y[10000:]) == pytest.approx(
            bayes, abs=0.01
        )


def test_constant_features_weigh_nothing_and_direction_points_to_the_second_class() -> None:
    X, y = data(classes=2)
    probe = LDAProbe(0.1).fit(np.column_stack([X, np.full(len(y), 3.25)]), np.where(y == 1, "yes", "no"))
    assert probe.coef_[0, -1] == 0
    assert np.linalg.norm(probe.direction_) == pytest.approx(1)
    assert (X[y == 1] @ probe.direction_[:-1]).mean() > (X[y == 0] @ probe.direction_[:-1]).mean()


def test_bad_input_says_what_to_do() -> None:
    X, y = data()
    with pytest.raises(ValueError, match="a number from 0 to 1"):
        LDAProbe("auto").fit(X, y)
    with pytest.raises(ValueError, match="a number from 0 to 1"):
        LDAProbe(1.5).fit(X, y)
    with pytest.raises(ValueError, match="one class only"):
        LDAProbe().fit(X, np.zeros(len(y)))
    with pytest.raises(ValueError, match="singular at shrinkage 0"):
        LDAProbe(0.0).fit(X[:5], y[:5])
    assert LDAProbe("left_out").fit(X[:5], [0, 0, 0, 0, 1]).left_out_loss_[0] == np.inf

"""MassMeanProbe: scikit-learn's contract, closed formulas, and when it loses to LDA."""

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.neighbors import NearestCentroid
from sklearn.utils.estimator_checks import parametrize_with_checks

from microtome.probes.mass_mean import MassMeanProbe


@parametrize_with_checks([MassMeanProbe(), MassMeanProbe(corrected=True)])
def test_scikit_learns_contract(estimator, check) -> None:
    check(estimator)


def data(rows=240, width=5, classes=2, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(rows) % classes)
    X = rng.normal(size=(rows, width)) @ rng.normal(size=(width, width)) + rng.normal(size=(classes, width))[y]
    return X + 5, y


def test_the_direction_is_the_difference_of_means_and_the_threshold_between_them() -> None:
    X, y = data()
    kept = ~((y == 1) & (np.arange(len(y)) < 100))  # unequal classes
    X, y = X[kept], y[kept]
    probe = MassMeanProbe().fit(X, y)
    theta = X[y == 1].mean(axis=0) - X[y == 0].mean(axis=0)
    np.testing.assert_allclose(probe.coef_[0], theta)
    np.testing.assert_allclose(probe.direction_, theta / np.linalg.norm(theta))
    middle = (X[y == 1].mean(axis=0) + X[y == 0].mean(axis=0)) / 2
    assert probe.decision_function(middle[None]).item() == pytest.approx(np.log((y == 1).sum() / (y == 0).sum()))


@pytest.mark.parametrize("classes", [2, 3])
def test_several_classes_are_the_nearest_mean_and_corrected_is_lda(classes) -> None:
    X, y = data(classes=classes)
    assert (MassMeanProbe().fit(X, y).predict(X) == NearestCentroid().fit(X, y).predict(X)).all()
    lda = LinearDiscriminantAnalysis(solver="lsqr").fit(X, y)
    corrected = MassMeanProbe(corrected=True, tolerance=0).fit(X, y)
    scores, expected = corrected.decision_function(X), lda.decision_function(X)
    if classes > 2:
        scores, expected = scores - scores[:, :1], expected - expected[:, :1]
    np.testing.assert_allclose(scores, expected, atol=1e-8)


def test_the_correction_leaves_out_directions_without_variance() -> None:
    X, y = data()
    rng = np.random.default_rng(1)
    doubled = np.column_stack([X, X[:, 0] + 1e-6 * rng.normal(size=len(y))])
    plain = MassMeanProbe(corrected=True).fit(X, y)
    cut = MassMeanProbe(corrected=True).fit(doubled, y)
    np.testing.assert_allclose(cut.decision_function(doubled), plain.decision_function(X), atol=0.05)
    assert np.abs(MassMeanProbe(corrected=True, tolerance=0).fit(doubled, y).coef_).max() > 1000


def test_a_difference_of_means_has_its_own_accuracy_below_bayes() -> None:
    rng = np.random.default_rng(3)
    deviation = np.logspace(-0.7, 0.7, 64)
    step = 0.4 * deviation**0.5 * np.where(np.arange(64) % 2, 1, 0.3)
    y = rng.integers(0, 2, 40000)
    X = rng.normal(size=(40000, 64)) * deviation + np.where(y == 1, 0.5, -0.5)[:, None] * step
    bayes = norm.cdf(0.5 * np.linalg.norm(step / deviation))
    expected = norm.cdf(0.5 * step @ step / np.linalg.norm(step * deviation))
    found = [MassMeanProbe(corrected).fit(X[:20000], y[:20000]).score(X[20000:], y[20000:]) for corrected in (0, 1)]
    assert expected < bayes - 0.1
    assert found == pytest.approx([expected, bayes], abs=0.01)


def test_bad_input_says_what_to_do() -> None:
    X, y = data()
    with pytest.raises(ValueError, match="one class only"):
        MassMeanProbe().fit(X, np.zeros(len(y)))
    with pytest.raises(ValueError, match="a variance of 0 or more"):
        MassMeanProbe(tolerance=-1).fit(X, y)


@pytest.mark.parametrize("unit", [1e-60, 1e-8, 1e8, 1e60])
def test_classes_of_equal_size_are_told_apart_in_any_unit(unit) -> None:
    y = np.arange(80) % 2
    X = np.random.default_rng(0).normal(size=(80, 3)) + 2 * y[:, None]
    np.testing.assert_array_equal(
        MassMeanProbe().fit(X * unit, y).predict(X * unit), MassMeanProbe().fit(X, y).predict(X)
    )


def test_the_corrected_form_leaves_out_a_feature_that_is_the_label() -> None:
    y = np.arange(200) % 2
    X = np.c_[y, np.random.default_rng(0).normal(size=(200, 2))]
    assert MassMeanProbe().fit(X, y).score(X, y) == 1
    corrected = MassMeanProbe(corrected=True).fit(X, y)
    assert corrected.coef_[0, 0] == pytest.approx(0, abs=1e-3)
    assert corrected.score(X, y) < 0.7

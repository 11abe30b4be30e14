"""LogisticProbe: scikit-learn's contract, and its answers."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from microtome.probes.logistic import LogisticProbe


@parametrize_with_checks([LogisticProbe()])
def test_scikit_learns_contract(estimator, check) -> None:
    check(estimator)


def data(rows: int = 300, width: int = 20, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    Z = rng.normal(size=(rows, width))
    y = Z @ rng.normal(size=width) + 2 * rng.normal(size=rows) > 0
    X = Z * np.logspace(-2, 2, width) + rng.normal(size=width)
    return X, y


@pytest.mark.parametrize("C", [1e-3, 0.1, 1.0, 100.0])
@pytest.mark.parametrize("class_weight", [None, "balanced"])
def test_agrees_with_scikit_learn_on_standardised_features(C: float, class_weight: str | None) -> None:
    X, y = data()
    probe = LogisticProbe(C, class_weight=class_weight, tol=1e-11).fit(X, y)
    newton = LogisticRegression(C=C, class_weight=class_weight, solver="newton-cholesky", tol=1e-12, max_iter=1000)
    other = make_pipeline(StandardScaler(), newton).fit(X, y)
    # raw scores, then standardised weights, then the intercept at the mean
    np.testing.assert_allclose(probe.decision_function(X), other.decision_function(X), atol=1e-6)
    np.testing.assert_allclose(probe.coef_[0] * X.std(0), newton.coef_[0], atol=1e-6)
    np.testing.assert_allclose(probe.intercept_[0] + probe.coef_[0] @ X.mean(0), newton.intercept_[0], atol=1e-6)


def test_direction_points_to_the_second_class_and_probabilities_sum_to_one() -> None:
    X, y = data()
    probe = LogisticProbe().fit(X, np.where(y, "yes", "no"))
    assert list(probe.classes_) == ["no", "yes"]
    assert np.linalg.norm(probe.direction_) == pytest.approx(1)
    assert (X[y] @ probe.direction_).mean() > (X[~y] @ probe.direction_).mean()
    np.testing.assert_allclose(probe.predict_proba(X).sum(1), 1)
    assert (probe.predict(X) == np.where(probe.predict_proba(X)[:, 1] > 0.5, "yes", "no")).all()


def test_separable_rows_are_flagged() -> None:
    X = np.array([[-2.0], [-1.0], [1.0], [2.0]])
    assert LogisticProbe(C=10).fit(X, [0, 0, 1, 1]).separated_
    assert not LogisticProbe(C=10).fit(X, [0, 1, 0, 1]).separated_


@pytest.mark.parametrize(
    ("y", "C", "message"),
    [
        ([0, 1, 2, 1], 1.0, "Only binary classification is supported. y has 3 classes"),
        ([1, 1, 1, 1], 1.0, "one class only"),
        ([0, 1, 0, 1], np.inf, "finite and above 0"),
        ([0, 1, 0, 1], 0.0, "finite and above 0"),
    ],
)
def test_bad_input_says_what_to_do(y: list[int], C: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LogisticProbe(C=C).fit(np.arange(8.0).reshape(4, 2), y)

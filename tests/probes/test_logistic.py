"""LogisticProbe: scikit-learn's contract, and its answers."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from microtome.probes.logistic import LogisticProbe


# weights against repeated rows are compared to 1e-7
@parametrize_with_checks([LogisticProbe(tol=1e-10)])
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


@pytest.mark.parametrize("class_weight", [None, "balanced", {0: 3.0, 2: 0.5}])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("classes", [2, 4])
def test_classes_and_weights_agree_with_scikit_learn(class_weight, weighted: bool, classes: int) -> None:
    X, _ = data()
    rng = np.random.default_rng(1)
    y = ((X - X.mean(0)) / X.std(0))[:, :classes].argmax(1)
    y[::5] = rng.integers(classes, size=60)
    weight = rng.uniform(0, 3, size=300) if weighted else None
    share = weight if weighted else np.ones(300)
    mean = np.average(X, axis=0, weights=share)
    scale = np.sqrt(np.average((X - mean) ** 2, axis=0, weights=share))
    probe = LogisticProbe(0.3, class_weight=class_weight, tol=1e-11).fit(X, y, weight)
    if class_weight == "balanced" and weighted:  # by weight, where scikit-learn counts rows
        totals = np.bincount(y, share)
        class_weight = dict(enumerate(share.sum() / classes / totals))
    elif isinstance(class_weight, dict):
        class_weight = {label: class_weight.get(label, 1.0) for label in range(classes)}
    other = LogisticRegression(C=0.3, class_weight=class_weight, solver="newton-cholesky", tol=1e-12, max_iter=1000)
    other.fit((X - mean) / scale, y, weight)
    np.testing.assert_allclose(probe.predict_proba(X), other.predict_proba((X - mean) / scale), atol=1e-6)
    np.testing.assert_allclose(probe.coef_ * scale, other.coef_, atol=1e-6)
    np.testing.assert_allclose(probe.mean_, mean)
    np.testing.assert_allclose(probe.scale_, scale)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("class_weight", [None, "balanced"])
@pytest.mark.parametrize("standardize", [True, False])
def test_weight_2_is_the_row_twice(classes: int, class_weight: str | None, standardize: bool) -> None:
    X, _ = data()
    X = (X - X.mean(0)) / X.std(0)
    y = X[:, :classes].argmax(1)
    times = np.random.default_rng(2).integers(0, 3, size=300)
    probe = LogisticProbe(class_weight=class_weight, standardize=standardize, tol=1e-11)
    weighted = probe.fit(X, y, times).decision_function(X)
    repeated = probe.fit(np.repeat(X, times, 0), np.repeat(y, times)).decision_function(X)
    np.testing.assert_allclose(weighted, repeated, atol=1e-7)


def test_a_constant_feature_gets_no_weight_whatever_the_sample_weights() -> None:
    X, y = data()
    X[:, 3] = 0.1
    probe = LogisticProbe().fit(X, y, np.linspace(1, 2, 300))
    assert probe.coef_[0, 3] == 0
    assert probe.scale_[3] == 0
    assert np.isfinite(probe.decision_function(X)).all()


def test_every_class_has_its_direction() -> None:
    X, _ = data()
    Z = (X - X.mean(0)) / X.std(0)
    y = np.array(["a", "b", "c"])[Z[:, :3].argmax(1)]
    probe = LogisticProbe().fit(X, y)
    assert list(probe.classes_) == ["a", "b", "c"]
    np.testing.assert_allclose(np.linalg.norm(probe.direction_, axis=1), 1)
    assert (np.argmax(probe.coef_ * X.std(0), axis=1) == [0, 1, 2]).all()
    assert probe.score(X, y) > 0.9


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
        ([1, 1, 1, 1], 1.0, "one class only"),
        ([0, 1, 0, 1], np.inf, "finite and above 0"),
        ([0, 1, 0, 1], 0.0, "finite and above 0"),
    ],
)
def test_bad_input_says_what_to_do(y: list[int], C: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LogisticProbe(C=C).fit(np.arange(8.0).reshape(4, 2), y)


@pytest.mark.parametrize(
    ("class_weight", "sample_weight", "message"),
    [
        ("even", None, "class_weight='even'; give None"),
        (None, [1.0, 1.0, 1.0], "sample_weight.shape == \\(3,\\), expected \\(4,\\)"),
        (None, [1.0, 1.0, 1.0, -1.0], "Negative values"),
        (None, [1.0, 0.0, 1.0, 0.0], "one class only"),
        (None, [1.0, np.nan, 1.0, 0.0], "NaN"),
    ],
)
def test_bad_weights_say_what_to_do(class_weight, sample_weight, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LogisticProbe(class_weight=class_weight).fit(np.arange(8.0).reshape(4, 2), [0, 1, 0, 1], sample_weight)

"""Ridge probes: scikit-learn's contract, and its answers."""

import numpy as np
import pytest
from sklearn.linear_model import Ridge, RidgeClassifier
from sklearn.metrics import r2_score
from sklearn.model_selection import LeaveOneGroupOut, LeaveOneOut, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from microtome.probes.ridge import RidgeClassProbe, RidgeProbe


def expected_to_fail(estimator) -> dict[str, str]:
    check = "check_sample_weight_equivalence_on_dense_data"
    return {check: "equal rows are left out one at a time"} if estimator.strengths is None else {}


@parametrize_with_checks(
    [RidgeProbe((1.0,)), RidgeClassProbe((1.0,)), RidgeProbe(), RidgeClassProbe()],
    expected_failed_checks=expected_to_fail,
)
def test_scikit_learns_contract(estimator, check) -> None:
    check(estimator)


def data(rows=120, width=8, seed=0):
    rng = np.random.default_rng(seed)
    Z = rng.normal(size=(rows, width))
    y = Z @ rng.normal(size=width) + rng.normal(size=rows)
    return Z * np.logspace(-2, 2, width) + rng.normal(size=width), y, rng.integers(0, 30, rows)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_agrees_with_scikit_learn_on_standardised_features(is_weighted) -> None:
    X, y, _ = data()
    weight = np.random.default_rng(1).uniform(0, 2, len(y)) if is_weighted else np.ones(len(y))
    weight[:5] = 0 if is_weighted else 1
    both = np.stack([y, y**2], axis=1)
    scaler = StandardScaler().fit(X, sample_weight=weight)
    for target, codes in ((y, y > 0), (both, np.digitize(y, [-1, 1]))):
        for strength in (0.0, 0.1, 10.0):
            other = Ridge(alpha=strength * weight.sum(), solver="svd").fit(scaler.transform(X), target, weight)
            probe = RidgeProbe([strength]).fit(X, target, sample_weight=weight)
            np.testing.assert_allclose(probe.predict(X), other.predict(scaler.transform(X)), rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(probe.coef_ * scaler.scale_, other.coef_, atol=1e-9)
            classifier = RidgeClassifier(alpha=strength * weight.sum(), solver="svd")
            classifier.fit(scaler.transform(X), codes, weight)
            ours = RidgeClassProbe([strength]).fit(X, codes, sample_weight=weight)
            expected = classifier.decision_function(scaler.transform(X))
            np.testing.assert_allclose(ours.decision_function(X), expected, atol=1e-9)
            assert (ours.predict(X) == classifier.predict(scaler.transform(X))).all()


@pytest.mark.parametrize("is_grouped", [False, True])
def test_the_strength_is_chosen_on_left_out_rows(is_grouped) -> None:
    X, y, groups = data()
    splitter, given = (LeaveOneGroupOut(), groups) if is_grouped else (LeaveOneOut(), None)
    strengths = (0.001, 0.3, 5.0)
    X = StandardScaler().fit_transform(X)
    probe = RidgeProbe(strengths).fit(X, y, groups=given)
    scores, predicted = [], []
    for strength in strengths:
        # scikit-learn's penalty does not know how many rows are left: the same absolute one
        model = Ridge(alpha=strength * len(y))
        predicted.append(cross_val_predict(model, X, y, groups=given, cv=splitter))
        null = cross_val_predict(Ridge(alpha=1e12), X, y, groups=given, cv=splitter)
        scores.append(1 - ((y - predicted[-1]) ** 2).sum() / ((y - null) ** 2).sum())
    np.testing.assert_allclose(probe.left_out_r2_, scores, atol=1e-7)
    assert probe.strength_ == strengths[int(np.argmax(scores))]
    np.testing.assert_allclose(probe.left_out_predictions_, predicted[int(np.argmax(scores))], atol=1e-9)
    assert r2_score(y, probe.predict(X)) > max(scores)


def test_groups_that_hold_twins_choose_otherwise() -> None:
    rng = np.random.default_rng(2)
    X = np.repeat(rng.normal(size=(60, 80)), 2, axis=0) + 0.01 * rng.normal(size=(120, 80))
    y, groups = np.repeat(rng.normal(size=60), 2), np.repeat(np.arange(60), 2)
    twins, honest = RidgeProbe().fit(X, y), RidgeProbe().fit(X, y, groups=groups)
    assert twins.left_out_r2_.max() > 0.9
    assert honest.left_out_r2_.max() < 0.2
    assert honest.strength_ > twins.strength_


def test_class_weights_and_left_out_scores() -> None:
    X, y, groups = data()
    codes = np.where(y > 1, "high", "low")
    weight = np.where(codes == "high", len(y) / 2 / (codes == "high").sum(), len(y) / 2 / (codes == "low").sum())
    balanced = RidgeClassProbe([0.1], class_weight="balanced").fit(X, codes, groups=groups)
    given = RidgeClassProbe([0.1]).fit(X, codes, groups=groups, sample_weight=weight)
    np.testing.assert_allclose(balanced.coef_, given.coef_)
    assert balanced.left_out_scores_.shape == (120,)
    guess = np.where(balanced.left_out_scores_ > 0, "low", "high")
    assert balanced.left_out_accuracy_[0] == pytest.approx(np.average(guess == codes, weights=weight))
    assert np.linalg.norm(balanced.direction_) == pytest.approx(1)
    assert (X[codes == "low"] @ balanced.direction_).mean() > (X[codes == "high"] @ balanced.direction_).mean()


def test_constant_features_and_raw_scale() -> None:
    X, y, _ = data()
    with_constant = np.column_stack([X, np.full(len(y), 1234.567)])
    a, b = RidgeProbe([0.1]).fit(X, y), RidgeProbe([0.1]).fit(with_constant, y)
    assert b.coef_[-1] == 0
    np.testing.assert_allclose(a.predict(X), b.predict(with_constant))
    raw = RidgeProbe([0.1], standardize=False).fit(X, y)
    np.testing.assert_allclose(raw.coef_, Ridge(alpha=12.0, solver="svd").fit(X, y).coef_, atol=1e-9)
    assert make_pipeline(StandardScaler(), RidgeProbe()).fit(X, y).score(X, y) > 0.5


def test_bad_input_says_what_to_do() -> None:
    X, y, _ = data()
    with pytest.raises(ValueError, match="finite penalties per training row"):
        RidgeProbe([-1.0]).fit(X, y)
    with pytest.raises(ValueError, match="groups has 3 entries for 120 rows"):
        RidgeProbe().fit(X, y, groups=[0, 1, 2])
    with pytest.raises(ValueError, match="All rows are in one group"):
        RidgeProbe().fit(X, y, groups=np.zeros(120))
    with pytest.raises(ValueError, match="at least one non-zero number"):
        RidgeProbe().fit(X, y, sample_weight=np.zeros(120))
    with pytest.raises(ValueError, match="Negative values"):
        RidgeProbe().fit(X, y, sample_weight=-np.ones(120))
    with pytest.raises(ValueError, match="one class only"):
        RidgeClassProbe().fit(X, np.ones(120))

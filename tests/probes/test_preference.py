"""PreferenceProbe: scikit-learn's contract, Bradley-Terry's symmetry and a known answer, pairs that share items."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression
from sklearn.utils.estimator_checks import parametrize_with_checks

from microtome.probes.folds import grouped_folds, nested_folds
from microtome.probes.nested_fit import nested_fits
from microtome.probes.preference import PreferenceProbe, pair_groups, preference_fits


@parametrize_with_checks([PreferenceProbe()])
def test_scikit_learns_contract(estimator, check) -> None:
    check(estimator)


@pytest.fixture
def items():
    """200 items [item, feature] with a planted reward, 600 pairs, and which side won."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(200, 6)) * [1, 10, 0.1, 3, 5, 1] + 40
    reward = features @ [1, 0.1, 0, 0, 0.2, 0]
    first = rng.integers(200, size=600)
    second = (first + rng.integers(1, 200, size=600)) % 200
    preferred = rng.uniform(size=600) < 1 / (1 + np.exp(reward[second] - reward[first]))
    return features, reward, first, second, preferred


@pytest.mark.parametrize("C", [1e-3, 0.1, 10.0])
@pytest.mark.parametrize("standardize", [True, False])
def test_agrees_with_logistic_regression_without_intercept(items, C, standardize) -> None:
    features, _, first, second, preferred = items
    X = features[first] - features[second]
    probe = PreferenceProbe(C, standardize=standardize, tol=1e-11).fit(X, preferred)
    scale = np.sqrt((X**2).mean(0)) if standardize else np.ones(6)
    other = LogisticRegression(C=C, fit_intercept=False, solver="newton-cholesky", tol=1e-12)
    other.fit(X / scale, preferred)
    np.testing.assert_allclose(probe.coef_ * scale, other.coef_, atol=1e-6)
    np.testing.assert_allclose(probe.predict_proba(X), other.predict_proba(X / scale), atol=1e-6)
    np.testing.assert_allclose(probe.scale_, scale)


def test_is_the_minimum_of_the_bradley_terry_objective(items) -> None:
    features, _, first, second, preferred = items
    features = (features - 40) / [1, 10, 0.1, 3, 5, 1]
    winner, loser = np.where(preferred, first, second), np.where(preferred, second, first)

    def objective(w):
        return w @ w / 2 + 0.5 * np.logaddexp(0, -(features[winner] - features[loser]) @ w).sum()

    best = minimize(objective, np.zeros(6), method="BFGS", options={"gtol": 1e-7}).x
    probe = PreferenceProbe(0.5, standardize=False).fit_pairs(features, first, second, preferred)
    np.testing.assert_allclose(probe.coef_[0], best, atol=1e-5)


def test_a_planted_reward_comes_back(items) -> None:
    features, reward, first, second, preferred = items
    probe = PreferenceProbe(10.0).fit_pairs(features, first, second, preferred)
    assert np.corrcoef(probe.reward(features), reward)[0, 1] > 0.97
    np.testing.assert_allclose(np.linalg.norm(probe.direction_), 1)


def test_swapping_sides_flips_scores_exactly_and_leaves_the_fit_as_it_is(items) -> None:
    features, _, first, second, preferred = items
    probe = PreferenceProbe().fit_pairs(features, first, second, preferred)
    flip = np.arange(600) % 3 == 0
    a, b = np.where(flip, second, first), np.where(flip, first, second)
    swapped = PreferenceProbe().fit_pairs(features, a, b, preferred ^ flip)
    assert (swapped.coef_ == probe.coef_).all()
    assert (swapped.intercept_ == 0).all()
    difference = features[first] - features[second]
    assert (probe.decision_function(-difference) == -probe.decision_function(difference)).all()
    np.testing.assert_allclose(
        probe.decision_function(difference), probe.reward(features)[first] - probe.reward(features)[second], atol=1e-9
    )


def test_the_preferred_side_first_is_the_default(items) -> None:
    features, _, first, second, preferred = items
    winner, loser = np.where(preferred, first, second), np.where(preferred, second, first)
    one = PreferenceProbe().fit_pairs(features, winner, loser)
    other = PreferenceProbe().fit(features[first] - features[second], np.where(preferred, "yes", "no"))
    assert (one.coef_ == other.coef_).all()
    assert list(one.classes_) == [False, True]
    assert list(other.classes_) == ["no", "yes"]


def test_a_feature_that_is_the_same_on_both_sides_gets_no_weight_and_an_order_without_errors_is_flagged() -> None:
    features = np.column_stack([np.arange(10.0), np.ones(10)])
    probe = PreferenceProbe(100.0).fit_pairs(features, np.arange(1, 10), np.arange(9))
    assert probe.separated_
    assert probe.coef_[0, 0] > 0
    assert probe.coef_[0, 1] == 0
    assert not PreferenceProbe().fit_pairs(features, [0, 1, 5], [1, 0, 3]).separated_


def test_pairs_that_share_an_item_are_one_group() -> None:
    groups = pair_groups(["a", "c", "e", "b", "f", "h"], ["b", "d", "f", "c", "g", "i"])
    assert groups.tolist() == [0, 0, 1, 0, 1, 2]  # a-b-c-d, e-f-g, h-i
    assert pair_groups([1, 1, 2], [1, 1, 2]).tolist() == [0, 0, 1]


def test_no_item_crosses_a_split_of_the_groups() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(60, size=300)
    first, second = prompt * 4 + rng.integers(4, size=300), prompt * 4 + rng.integers(4, size=300)
    groups = pair_groups(first, second)
    test = grouped_folds(np.arange(300) % 2, groups, folds=3)
    for rows in test:
        held_out, trained_on = ({*first[at], *second[at]} for at in (rows, ~rows))
        assert not held_out & trained_on


def test_nested_fits_of_pairs(items) -> None:
    features, _, first, second, preferred = items
    differences = torch.from_numpy(features[first] - features[second])
    noise = torch.randn(differences.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sites = torch.stack([differences, noise])
    codes = preferred.astype(np.int64)
    test = grouped_folds(codes, np.arange(600), folds=3)
    nested = nested_folds(codes, np.arange(600), test, folds=2)
    arguments = torch.from_numpy(preferred)[None], torch.from_numpy(test), torch.from_numpy(nested)
    real, noise = preference_fits(sites, *arguments, [0.01, 0.1, 1.0])
    assert ((real.scores[0] > 0) == arguments[0][0]).double().mean() > 0.7
    assert noise.inner_loss.min() > 0.99
    assert (real.intercept, noise.intercept) == (0, 0)
    probe = PreferenceProbe(real.strength).fit(differences.numpy(), preferred)
    np.testing.assert_allclose(real.coefficients, probe.coef_[0], atol=1e-6)
    # twice the pairs, each also from the other side, with a free intercept: the same answer
    mirrored = nested_fits(
        torch.cat([sites, -sites], 1),
        torch.cat([arguments[0], ~arguments[0]], 1),
        arguments[1].repeat(1, 2),
        arguments[2].repeat(1, 1, 2),
        [0.005, 0.05, 0.5],
    )
    torch.testing.assert_close(mirrored[0].scores[:, :600], real.scores, rtol=0, atol=1e-3)


def test_a_pair_far_out_changes_no_other_score_of_its_fold(items) -> None:
    features, _, first, second, preferred = items
    differences = torch.from_numpy(features[first] - features[second])[None]
    codes = preferred.astype(np.int64)
    test = grouped_folds(codes, np.arange(600), folds=3)
    nested = torch.from_numpy(nested_folds(codes, np.arange(600), test, folds=2))
    labels, test = torch.from_numpy(preferred)[None], torch.from_numpy(test)
    dirty = differences.clone()
    row = int(test[0].nonzero()[0, 0])
    dirty[:, row] = 1e9
    [clean], [spoiled] = (preference_fits(x, labels, test, nested, [0.01, 1.0]) for x in (differences, dirty))
    kept = test[0] & (torch.arange(600) != row)
    assert torch.equal(clean.scores[:, kept], spoiled.scores[:, kept])
    assert not torch.equal(clean.scores[:, ~test[0]], spoiled.scores[:, ~test[0]])


@pytest.mark.parametrize(
    ("y", "message"),
    [([1, 1, 1, 1], "call fit_pairs"), ([0, 1, 2, 1], "Only binary classification is supported. y has 3 classes")],
)
def test_labels_that_are_no_preferences(y, message) -> None:
    with pytest.raises(ValueError, match=message):
        PreferenceProbe().fit(np.arange(8.0).reshape(4, 2), y)


@pytest.mark.parametrize(
    ("first", "second", "preferred", "message"),
    [
        ([0, 4], [1, 2], None, "first holds row numbers 0 to 4; there are 4 items"),
        ([0, 1], [1, -1], None, "second holds row numbers -1 to 1"),
        ([0, 1], [1, 1], None, "pair 1 compares item 1 with itself"),
        ([0, 1], [1], None, "have 2, 1 and 2 entries"),
        ([0.5, 1], [1, 0], None, "give one row number per pair"),
        ([0, 1], [1, 0], [1, 0], "preferred is of int64; give True"),
    ],
)
def test_pairs_that_are_none(first, second, preferred, message) -> None:
    with pytest.raises(ValueError, match=message):
        PreferenceProbe().fit_pairs(np.arange(8.0).reshape(4, 2), first, second, preferred)


def test_group_keys_that_are_missing() -> None:
    with pytest.raises(ValueError, match="second_group has no key for pair 1"):
        pair_groups(["a", "b"], ["c", None])
    with pytest.raises(ValueError, match="first_group has 2 entries, second_group 1"):
        pair_groups(["a", "b"], ["c"])

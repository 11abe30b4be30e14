"""k-sparse probes: the filters, scikit-learn's contract, the nested protocol and its control."""

import numpy as np
import pytest
import torch
from sklearn.feature_selection import f_classif
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from microtome.probes.folds import grouped_folds, nested_folds
from microtome.probes.nested_fit import nested_fits
from microtome.probes.sparse import SparseProbe, choose_features, random_coordinates, sparse_fits


@parametrize_with_checks([SparseProbe(k=2)])
def test_scikit_learns_contract(estimator, check) -> None:
    check(estimator)


@pytest.fixture
def case():
    """Two sites: feature 7 tells most, 3 less, 11 has the largest scale; and nothing."""
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.arange(180) % 2)
    features = rng.normal(size=(2, 180, 12)) + 40
    features[0, :, 7] += 2.0 * labels
    features[0, :, 3] -= 1.2 * labels
    features[..., 11] *= 1000
    test = grouped_folds(labels, np.arange(180), folds=3)
    nested = nested_folds(labels, np.arange(180), test, folds=2)
    positive = torch.from_numpy(np.stack([labels, rng.permutation(labels)]) == 1)
    return torch.from_numpy(features), positive, torch.from_numpy(test), torch.from_numpy(nested)


def test_f_score_orders_as_scikit_learn(case) -> None:
    features, positive, test, _ = case
    for k in (1, 4, 12):
        chosen = choose_features(features, positive, ~test, k=k)
        assert chosen.shape == (2, 2, 3, k)
        for site, labelling, fold in np.ndindex(2, 2, 3):
            rows = ~test[fold].numpy()
            score, _ = f_classif(features[site, rows].numpy(), positive[labelling, rows].numpy())
            assert chosen[site, labelling, fold].tolist() == sorted(np.argsort(-score)[:k].tolist())


def test_each_order_finds_what_it_looks_for(case) -> None:
    features, positive, test, _ = case
    every = torch.ones_like(test[:1])
    first = {
        order: choose_features(features, positive, every, k=k, order=order)[0, 0, 0].tolist()
        for order, k in [("f_score", 2), ("logistic", 2), ("mean_difference", 1)]
    }
    assert first == {"f_score": [3, 7], "logistic": [3, 7], "mean_difference": [11]}


def test_constant_features_come_last_and_perfect_ones_first(case) -> None:
    features, positive, test, _ = case
    features[..., 0] = 0.1
    features[..., 5] = positive[0]
    chosen = choose_features(features, positive[:1], ~test, k=1)
    assert (chosen == 5).all()
    assert 0 not in choose_features(features, positive[:1], ~test, k=11)


@pytest.mark.parametrize("order", ["f_score", "logistic"])
def test_the_probe_is_a_logistic_regression_of_the_chosen(case, order) -> None:
    features, positive, _, _ = case
    x, y = features[0].numpy(), np.where(positive[0].numpy(), "yes", "no")
    probe = SparseProbe(k=2, C=0.3, order=order).fit(x, y)
    assert probe.features_.tolist() == [3, 7]
    assert np.flatnonzero(probe.coef_[0]).tolist() == [3, 7]
    rows = StandardScaler().fit_transform(x[:, [3, 7]])
    other = LogisticRegression(C=0.3, solver="newton-cholesky", tol=1e-11).fit(rows, y)
    np.testing.assert_allclose(probe.decision_function(x), other.decision_function(rows), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(probe.direction_), 1)


def test_nested_fits_choose_inside_each_fold(case) -> None:
    features, positive, test, nested = case
    real, nothing = sparse_fits(features, positive, test, nested, [0.01, 0.3, 3.0], k=2)
    accuracy = ((real.scores > 0) == positive).double().mean(1)
    assert accuracy[0] > 0.8
    assert 0.35 < accuracy[1] < 0.62
    assert np.flatnonzero(real.coefficients).tolist() == [3, 7]
    assert (nothing.coefficients != 0).sum() == 2
    for fold, rows in enumerate(test.numpy()):
        x, y = features[1].numpy(), positive[0].numpy()
        probe = SparseProbe(k=2, C=nothing.fold_strengths[0, fold].item()).fit(x[~rows], y[~rows])
        np.testing.assert_allclose(nothing.scores[0, rows], probe.decision_function(x[rows]), atol=1e-3)
    # chosen on all rows, noise would look like signal: here it must not
    assert ((nothing.scores[0] > 0) == positive[0]).double().mean() < 0.62


def test_all_features_are_the_dense_probe(case) -> None:
    features, positive, test, nested = case
    sparse = sparse_fits(features, positive, test, nested, k=50)
    dense = nested_fits(features, positive, test, nested)
    for one, other in zip(sparse, dense, strict=True):
        torch.testing.assert_close(one.scores, other.scores, rtol=0, atol=1e-3)
        torch.testing.assert_close(one.coefficients, other.coefficients, rtol=0, atol=1e-6)


def test_a_row_far_out_changes_no_other_score_of_its_fold(case) -> None:
    features, positive, test, nested = case
    dirty = features.clone()
    row = int(test[0].nonzero()[3, 0])
    dirty[:, row] = 1e9
    kept = test[0] & (torch.arange(180) != row)
    for order in ("f_score", "mean_difference"):
        clean, spoiled = (
            sparse_fits(x, positive[:1], test, nested, [0.3], k=2, order=order) for x in (features, dirty)
        )
        for one, other in zip(clean, spoiled, strict=True):
            assert torch.equal(one.scores[:, kept], other.scores[:, kept])
            assert not torch.equal(one.scores[:, ~test[0]], other.scores[:, ~test[0]])


def test_random_coordinates_are_the_control(case) -> None:
    features, positive, test, nested = case
    coordinates = random_coordinates(2, 12, 2, seed=0)
    assert coordinates.shape == (2, 2)
    assert (coordinates[:, 0] < coordinates[:, 1]).all()
    assert torch.equal(coordinates, random_coordinates(2, 12, 2, seed=0))
    assert random_coordinates(1, 12, 12).tolist() == [list(range(12))]
    drawn = random_coordinates(500, 12, 3, seed=1)
    assert (torch.bincount(drawn.flatten(), minlength=12) > 80).all()
    told = sparse_fits(features, positive, test, nested, [0.1, 1.0], coordinates=torch.tensor([[7], [3]]))
    assert np.flatnonzero(told[0].coefficients).tolist() == [7]
    assert np.flatnonzero(told[1].coefficients).tolist() == [3]
    same = sparse_fits(features[:1], positive, test, nested, [0.1, 1.0], k=1)[0]
    torch.testing.assert_close(told[0].scores[0], same.scores[0], rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k=0; give a whole number of features"),
        ({"coordinates": torch.tensor([[1]])}, "coordinates are \\[1, 1\\], sites 2"),
        ({"coordinates": torch.tensor([[1], [12]])}, "coordinates run from 1 to 12; features are 0 to 11"),
        ({"coordinates": torch.tensor([[1, 1], [2, 3]])}, "name a feature of a site twice"),
    ],
)
def test_choices_that_are_none(case, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        sparse_fits(*case, **options)


def test_input_no_fit_can_come_from(case) -> None:
    features, positive, test, nested = case
    with pytest.raises(ValueError, match="k=13 of 12 features"):
        random_coordinates(2, 12, 13)
    with pytest.raises(ValueError, match=r"k=1\.5; give a whole number"):
        SparseProbe(k=1.5).fit(np.arange(8.0).reshape(4, 2), [0, 1, 0, 1])
    with pytest.raises(ValueError, match="order='best'; give one of f_score, mean_difference, logistic"):
        SparseProbe(order="best").fit(np.arange(8.0).reshape(4, 2), [0, 1, 0, 1])
    with pytest.raises(ValueError, match="one class only"):
        sparse_fits(features, positive | True, test, nested)
    with pytest.raises(ValueError, match="NaN"):
        sparse_fits(features * torch.nan, positive, test, nested)

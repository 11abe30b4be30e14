"""Left-out residuals in closed form against refits."""

from inspect import unwrap

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge

from microtome.probes.ridge_path import ridge_path

PENALTIES = (0.01, 1.0, 300.0)


def data(rows=60, width=5, sites=2, outputs=2, seed=0):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(sites, rows, width)) * np.logspace(-0.5, 0.5, width) + 3
    targets = features[0, :, :outputs] + rng.normal(size=(rows, outputs)) + 10
    return torch.from_numpy(features), torch.from_numpy(targets)


def refitted(model, x, y, groups, weights=None):
    """Residuals of each group by a model that is fitted without it."""
    residuals = np.empty_like(y)
    for group in np.unique(groups):
        out = groups == group
        model.fit(x[~out], y[~out], sample_weight=None if weights is None else weights[~out])
        residuals[out] = y[out] - model.predict(x[out])
    return residuals


def grouped(rows, kind):
    rng = np.random.default_rng(1)
    return {
        "rows": np.arange(rows),
        "pairs": rng.permutation(np.arange(rows) // 2),
        "uneven": rng.permutation(np.repeat(np.arange(12), np.arange(12))[:rows]),
        "two folds": rng.permutation(np.arange(rows) % 2),
        "five folds": rng.permutation(np.arange(rows) % 5),
    }[kind]


@pytest.mark.parametrize("kind", ["rows", "pairs", "uneven", "two folds", "five folds"])
@pytest.mark.parametrize(("rows", "width"), [(55, 5), (66, 45), (30, 50)])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_agreement_with_refits(kind, rows, width, is_weighted):
    features, targets = data(rows, width)
    groups = grouped(rows, kind)
    weights = np.random.default_rng(2).uniform(0.2, 3, rows) if is_weighted else None
    path = ridge_path(
        features,
        targets,
        PENALTIES,
        None if kind == "rows" else torch.from_numpy(groups),
        sample_weight=None if weights is None else torch.from_numpy(weights),
    )
    for site, x in enumerate(features.numpy()):
        for level, penalty in enumerate(PENALTIES):
            model = Ridge(alpha=penalty, solver="svd")
            expected = refitted(model, x, targets.numpy(), groups, weights)
            np.testing.assert_allclose(path.left_out_residuals[site, level].T, expected, rtol=1e-10, atol=1e-10)
            model.fit(x, targets.numpy(), sample_weight=weights)
            np.testing.assert_allclose(path.weights[site, level], model.coef_, atol=1e-10)
            np.testing.assert_allclose(path.intercepts[site, level], model.intercept_, rtol=1e-10)


@pytest.mark.parametrize("kind", ["rows", "uneven", "two folds", "five folds"])
def test_penalty_0_is_least_squares(kind):
    features, targets = data(55, 5)
    groups = grouped(55, kind)
    path = ridge_path(features, targets, (0.0, 1.0), torch.from_numpy(groups))
    expected = refitted(LinearRegression(), features[1].numpy(), targets.numpy(), groups)
    np.testing.assert_allclose(path.left_out_residuals[1, 0].T, expected, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(path.weights[1, 0], LinearRegression().fit(features[1], targets).coef_, atol=1e-10)


def test_features_that_repeat_or_stand_still_change_nothing():
    features, targets = data(55, 5)
    more = torch.cat([features, torch.full((2, 55, 1), 4.0)], dim=2)
    a, b = (ridge_path(x, targets, (0.0, *PENALTIES)) for x in (features, more))
    torch.testing.assert_close(a.left_out_residuals, b.left_out_residuals)
    assert b.weights[..., 5].abs().max() < 1e-10
    twice = ridge_path(torch.cat([features, features], dim=2), targets, (0.0,))
    torch.testing.assert_close(twice.left_out_residuals, a.left_out_residuals[:, :1], rtol=1e-8, atol=1e-8)


def test_large_means_lose_no_digits():
    features, targets = data()
    a, b = (ridge_path(x, targets, PENALTIES) for x in (features, features + 3000))
    torch.testing.assert_close(a.left_out_residuals, b.left_out_residuals, rtol=1e-8, atol=1e-8)


def test_interpolating_least_squares_has_no_left_out_residuals():
    features, targets = data(20, 40)
    path = ridge_path(features, targets, (0.0, 1.0))
    assert path.left_out_residuals[:, 0].isnan().all()
    assert path.left_out_residuals[:, 1].isfinite().all()
    fold = torch.arange(20) % 4
    assert ridge_path(features, targets, (0.0,), fold).left_out_residuals.isnan().all()
    large = ridge_path(*data(60, 80), (0.0, 1e-6), torch.arange(60) % 2).left_out_residuals
    assert large[:, 0].isnan().all()
    assert large[:, 1].isfinite().all()
    fitted = features @ path.weights[:, 0].mT + path.intercepts[:, :1]
    torch.testing.assert_close(fitted, targets.expand_as(fitted), rtol=1e-8, atol=1e-8)


def test_left_out_noise_is_not_explained():
    rng = np.random.default_rng(4)
    features = torch.from_numpy(rng.normal(size=(1, 200, 100)))
    targets = torch.from_numpy(rng.normal(size=(200, 1)))
    path = ridge_path(features, targets, (1.0,))
    inside = targets[:, 0] - features[0] @ path.weights[0, 0, 0] - path.intercepts[0, 0]
    assert inside.var() < 0.6 * targets.var() < 0.8 * path.left_out_residuals.var()


def test_bad_input_says_what_to_do():
    features, targets = data()
    with pytest.raises(ValueError, match="finite values of 0 or more"):
        ridge_path(features, targets, (-1.0,))
    with pytest.raises(ValueError, match="finite values of 0 or more"):
        ridge_path(features, targets, ())
    with pytest.raises(ValueError, match="All rows are in one group"):
        ridge_path(features, targets, (1.0,), torch.zeros(60, dtype=torch.int64))
    with pytest.raises(ValueError, match="not above 0"):
        ridge_path(features, targets, (1.0,), sample_weight=torch.zeros(60))
    features[1, 3, 2] = torch.nan
    with pytest.raises(ValueError, match=r"features holds NaN or infinity \(first at index \(1, 3, 2\)\)"):
        ridge_path(features, targets, (1.0,))


@pytest.mark.parametrize("name", ["targets", "groups", "sample_weight"])
def test_other_numbers_of_rows_are_refused(name):
    x, y, *_ = data()
    given = {"targets": y, "groups": torch.arange(len(y)) // 2, "sample_weight": torch.ones(len(y))}
    given[name] = given[name][:-3]
    with pytest.raises(ValueError, match=rf"{name} has shape \[57.*for 60 rows"):
        unwrap(ridge_path)(x, penalties=[1.0], **given)

"""Moments of folds, and rows that carry each fold's standardised penalty."""

import pytest
import torch

from microtome.probes.fold_basis import fold_basis, fold_moments, fold_moments_about_zero


@pytest.fixture
def rows() -> torch.Tensor:
    """[site, example, feature], among them a channel of mean 3000 and variance 1, and one of size 1e-6."""
    rows = torch.randn(2, 90, 70, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows[..., 3] += 3000
    rows[..., 4] *= 1e-6
    return rows


@pytest.fixture
def train() -> torch.Tensor:
    return torch.stack([torch.arange(90) % 3 != fold for fold in range(3)])


def test_moments_are_those_of_the_training_rows(rows, train) -> None:
    mean, deviation = fold_moments(rows.mT, train)
    for fold, mask in enumerate(train):
        torch.testing.assert_close(mean[:, fold], rows[:, mask].mean(1), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(deviation[:, fold], rows[:, mask].std(1, correction=0), rtol=1e-12, atol=0)


def test_moments_about_zero_are_root_mean_squares_of_the_training_rows(rows, train) -> None:
    mean, deviation = fold_moments_about_zero(rows.mT, train)
    assert (mean == 0).all()
    for fold, mask in enumerate(train):
        torch.testing.assert_close(deviation[:, fold], rows[:, mask].square().mean(1).sqrt(), rtol=1e-12, atol=0)


def test_without_an_intercept_the_rows_keep_their_origin(rows, train) -> None:
    basis = fold_basis(rows, train, intercept=False)
    torch.testing.assert_close(basis.double[:, :70], rows.mT / basis.unit[..., None])
    assert (basis.double[:, 70:] == 0).all()
    assert (basis.centre == 0).all()
    assert (basis.ridge[..., 70] > 0).all()


def test_moments_of_a_fold_know_no_other_row_to_the_bit(rows, train) -> None:
    mean, deviation = fold_moments(rows.mT, train)
    corrupted = rows.clone()
    corrupted[:, 0] = 1e9  # a test row of the first fold, and the first training row of the others
    other_mean, other_deviation = fold_moments(corrupted.mT, train)
    assert torch.equal(mean[:, 0], other_mean[:, 0])
    assert torch.equal(deviation[:, 0], other_deviation[:, 0])
    assert not torch.equal(mean[:, 1], other_mean[:, 1])


def test_constant_features_have_no_deviation_even_if_rounded(rows, train) -> None:
    rows[..., 0] = 0.1
    rows[..., 1] = 1e6 * (1 + 1e-16 * rows[..., 1])
    deviation = fold_moments(rows.mT, train)[1]
    assert (deviation[..., :2] == 0).all()
    assert (deviation[..., 2:] > 0).all()


def test_scores_and_penalty_are_those_of_standardised_features(rows, train) -> None:
    basis = fold_basis(rows, train)
    weights = torch.randn(70, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for fold, mask in enumerate(train):
        standardised = (rows[0] - rows[0, mask].mean(0)) / rows[0, mask].std(0, correction=0)
        v = torch.zeros(basis.double.shape[1], dtype=torch.float64)
        v[:70] = weights * basis.unit[0] / basis.deviation[0, fold]
        shift = (standardised @ weights) - v @ basis.double[0]
        torch.testing.assert_close(shift, shift.mean().expand(90), rtol=0, atol=1e-9)
        torch.testing.assert_close((basis.ridge[0, fold] * v**2).sum(), (weights**2).sum())
    assert (basis.double[:, 70] == 1).all()
    assert (basis.double[:, 71:] == 0).all()


def test_an_outlier_leaves_the_float32_rows_of_other_folds_their_digits(rows, train) -> None:
    rows[:, 0] = 1e9
    basis = fold_basis(rows, train)
    clean = basis.single[0, :70, 1:]
    assert (clean.std(1) > 0.5).all()


def test_squares_of_float32_rows_do_not_overflow(rows, train) -> None:
    rows[:, 0] = 1e90
    basis = fold_basis(rows, train)
    assert basis.single.square().isfinite().all()
    assert basis.ridge.float().isfinite().all()

"""Reduced-rank maps attain the canonical ceiling at every rank, and nothing of that rank passes them."""

import numpy as np
import pytest
import torch

from microtome.lenses.canonical import canonical_correlations
from microtome.lenses.map_scores import map_scores
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.reduced_rank import reduced_rank, truncated_map
from microtome.lenses.ridge_map import least_squares_map, ridge_map


@pytest.fixture
def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """500 rows of 12 and 9 channels whose variances span two decades, unlike on both sides."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 12, generator=generator, dtype=torch.float64)
    mix = torch.randn(12, 9, generator=generator, dtype=torch.float64)
    y = x @ mix + 4 * torch.randn(500, 9, generator=generator, dtype=torch.float64)
    return x * torch.logspace(0, 2, 12).double() + 7, y * torch.logspace(0, -2, 9).double()


@pytest.fixture
def fit(rows) -> PairMoments:
    return PairMoments.from_rows(*rows)


@pytest.mark.parametrize("rank", range(10))
def test_the_whitened_one_attains_the_ceiling(fit, rank):
    ceiling = [0.0, *canonical_correlations(fit).in_sample_ceiling.tolist()]
    found = reduced_rank(fit).at(rank)
    assert map_scores(found, fit, fit).r2_wh == pytest.approx(ceiling[rank], abs=1e-9)
    truncated = truncated_map(least_squares_map(fit), fit, rank)
    assert map_scores(truncated, fit, fit).r2_wh <= ceiling[rank] + 1e-9
    raw = reduced_rank(fit, metric="raw").at(rank)
    assert map_scores(raw, fit, fit).r2_wh <= ceiling[rank] + 1e-9


@pytest.mark.parametrize("rank", range(10))
def test_the_raw_one_is_the_pca_of_the_fitted_values(rows, fit, rank):
    x, y = rows
    full = least_squares_map(fit)
    fitted = full(x) - y.mean(0)
    axes = torch.linalg.svd(fitted, full_matrices=False)[2][:rank]
    found = reduced_rank(fit, metric="raw").at(rank)
    torch.testing.assert_close(found(x) - y.mean(0), fitted @ axes.T @ axes, rtol=1e-7, atol=1e-9)
    best = map_scores(found, fit, fit).r2_vw
    for other in (truncated_map(full, fit, rank), reduced_rank(fit).at(rank)):
        assert map_scores(other, fit, fit).r2_vw <= best + 1e-9


@pytest.mark.parametrize("metric", ["whitened", "raw"])
def test_full_rank_is_the_map_itself(fit, metric):
    torch.testing.assert_close(reduced_rank(fit, metric=metric).at(9).weight, least_squares_map(fit).weight)
    ridge = ridge_map(fit, strengths=[0.05]).map
    found = reduced_rank(fit, metric=metric, strength=0.05).at(9)
    torch.testing.assert_close(found.weight, ridge.weight)
    torch.testing.assert_close(found.intercept, ridge.intercept)
    assert (found.strength, found.rank) == (0.05, 9)


@pytest.mark.parametrize("metric", ["whitened", "raw"])
def test_with_a_penalty_it_is_least_squares_on_the_rows_of_the_penalty(rows, fit, metric):
    """Ridge is least squares with rows sqrt(λ) e_i, target 0, added: so are its reduced ranks, in S_yy's metric."""
    x, y = (part - part.mean(0) for part in rows)
    penalty = 0.1 * x.square().sum() / 12
    longer = torch.vstack([x, penalty.sqrt() * torch.eye(12, dtype=torch.float64)])
    white = torch.linalg.cholesky(torch.linalg.inv(y.T @ y)) if metric == "whitened" else torch.eye(9).double()
    target = torch.vstack([y @ white, torch.zeros(12, 9, dtype=torch.float64)])
    full = torch.linalg.lstsq(longer, target).solution
    axes = torch.linalg.svd(longer @ full, full_matrices=False)[2][:4]
    expected = full @ axes.T @ axes @ torch.linalg.inv(white)
    found = reduced_rank(fit, metric=metric, strength=0.1).at(4)
    torch.testing.assert_close(found.weight, expected, rtol=1e-6, atol=1e-10)


def test_gains_are_squared_correlations_or_explained_squares(rows, fit):
    expected = canonical_correlations(fit).in_sample.square()
    torch.testing.assert_close(reduced_rank(fit).gains, expected)
    gains = reduced_rank(fit, metric="raw").gains
    assert float(gains.sum() / fit.yy.trace()) == pytest.approx(map_scores(least_squares_map(fit), fit, fit).r2_vw)


def test_a_planted_rank_is_enough():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(300, 10, generator=generator, dtype=torch.float64)
    low = torch.randn(10, 3, generator=generator, dtype=torch.float64)
    y = x @ low @ torch.randn(3, 8, generator=generator, dtype=torch.float64)
    fit = PairMoments.from_rows(x, y)
    found = reduced_rank(fit, metric="raw")
    assert map_scores(found.at(3), fit, fit).r2_vw == pytest.approx(1, abs=1e-10)
    assert map_scores(found.at(2), fit, fit).r2_vw < 0.99
    assert reduced_rank(fit).full_rank == 3  # whitening drops the directions in which y has no variance


def test_truncated_intercept_is_fitted_again(fit):
    found = truncated_map(least_squares_map(fit), fit, 4)
    assert np.linalg.matrix_rank(found.weight) == 4
    torch.testing.assert_close(found(fit.mean_x), fit.mean_y)


def test_bad_input_says_what_to_do(fit):
    with pytest.raises(ValueError, match="metric is 'cosine'"):
        reduced_rank(fit, metric="cosine")
    with pytest.raises(ValueError, match="strength is -1"):
        reduced_rank(fit, strength=-1)
    with pytest.raises(ValueError, match="rank 10; there are ranks 0 to 9"):
        reduced_rank(fit).at(10)
    with pytest.raises(ValueError, match="rank is -1"):
        truncated_map(least_squares_map(fit), fit, -1)

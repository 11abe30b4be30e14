"""Ridge maps from moments against scikit-learn and the rows themselves, at every strength of the path."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge

from microtome.lenses.map_scores import map_scores
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.pair_splits import PairSplits
from microtome.lenses.ridge_map import least_squares_map, ridge_map, uncentred_least_squares_map
from microtome.lenses.strength_path import DEFAULT_STRENGTHS


@pytest.fixture
def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """400 rows of 12 channels of unlike variance and mean, and of 7 that are half noise."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(12, 12, generator=generator, dtype=torch.float64) * torch.logspace(0, -2, 12).double()
    x = torch.randn(400, 12, generator=generator, dtype=torch.float64) @ mix + 4
    y = x @ torch.randn(12, 7, generator=generator, dtype=torch.float64)
    return x, y + y.std(0) * torch.randn(400, 7, generator=generator, dtype=torch.float64)


@pytest.fixture
def splits(rows) -> PairSplits:
    return PairSplits.from_rows(*rows)


@pytest.mark.parametrize("penalty", ["isotropic", "diag"])
@pytest.mark.parametrize("step", range(25))
def test_every_strength_is_scikit_learns_ridge(rows, splits, penalty, step):
    x, y = (part[:240].numpy() for part in rows)
    scale = x.std(0) * np.sqrt(240) if penalty == "diag" else np.ones(12)
    found = ridge_map(splits.fit, splits.validation, strengths=[DEFAULT_STRENGTHS[step]], penalty=penalty)
    expected = Ridge(alpha=found.path.penalty, solver="svd").fit(x / scale, y)
    np.testing.assert_allclose(found.map.weight.T * torch.from_numpy(scale), expected.coef_, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(found.map.intercept, expected.intercept_, rtol=1e-6, atol=1e-7)
    held_x, held_y = (part[240:320].numpy() for part in rows)
    squares = ((held_y - expected.predict(held_x / scale)) ** 2).sum()
    total = ((held_y - y.mean(0)) ** 2).sum()
    assert float(found.path.validation_r2[0]) == pytest.approx(1 - squares / total, abs=1e-9)
    fitted = ((y - expected.predict(x / scale)) ** 2).sum()
    assert float(found.path.fit_r2[0]) == pytest.approx(1 - fitted / ((y - y.mean(0)) ** 2).sum(), abs=1e-9)


@pytest.mark.parametrize("penalty", ["isotropic", "diag"])
def test_dof_and_gcv_are_those_of_the_hat_matrix(rows, splits, penalty):
    x, y = rows[0][:240], rows[1][:240]
    centred = x - x.mean(0)
    unit = centred.T @ centred
    unit = unit.diagonal().diag() if penalty == "diag" else unit.trace() / 12 * torch.eye(12)
    path = ridge_map(splits.fit, penalty=penalty).path
    for level, strength in enumerate(DEFAULT_STRENGTHS):
        hat = centred @ torch.linalg.solve(centred.T @ centred + strength * unit.double(), centred.T)
        assert float(path.dof[level]) == pytest.approx(float(hat.trace()), rel=1e-8)
        left = (y - y.mean(0)) - hat @ (y - y.mean(0))
        expected = left.square().sum() / 240 / (1 - (hat.trace() + 1) / 240) ** 2
        assert float(path.gcv[level]) == pytest.approx(float(expected), rel=1e-8)
    assert path.selected_by == "gcv"
    assert path.chosen == int(path.gcv.argmin())


def test_the_best_validation_strength_is_taken_and_inside_the_grid(splits):
    found = ridge_map(splits.fit, splits.validation)
    table = found.path.to_frame()
    assert list(table["strength"]) == pytest.approx(list(DEFAULT_STRENGTHS))
    assert (len(table), table["strength"].iloc[0], table["strength"].iloc[-1]) == (25, 1e-9, pytest.approx(10))
    assert table.loc[table["chosen"], "validation_r2"].item() == table["validation_r2"].max()
    assert found.path.edge == ""
    assert found.map.strength == found.path.strength
    assert found.path.selected_by == "validation"


def test_the_edge_of_a_grid_is_said(rows, splits):
    assert ridge_map(splits.fit, splits.validation, strengths=[1e-3, 1e3, 1e6]).path.edge == "weakest"
    noise = torch.randn(400, 7, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    unrelated = PairSplits.from_rows(rows[0], noise)
    assert ridge_map(unrelated.fit, unrelated.validation, strengths=[0, 1e-3, 10]).path.edge == "strongest"
    assert ridge_map(splits.fit, strengths=[1.0]).path.edge == ""


def test_no_strength_is_least_squares_and_a_huge_one_the_mean(rows, splits):
    x, y = (part[:240].numpy() for part in rows)
    expected = LinearRegression().fit(x, y)
    for found in (least_squares_map(splits.fit), ridge_map(splits.fit, strengths=[1e-15]).map):
        np.testing.assert_allclose(found.weight.T, expected.coef_, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(found.intercept, expected.intercept_, rtol=1e-6)
    mean = ridge_map(splits.fit, strengths=[1e15]).map
    assert float(mean.weight.abs().max()) < 1e-12
    np.testing.assert_allclose(mean.intercept, y.mean(0), rtol=1e-9)


def test_without_intercept_is_lstsq_on_the_rows(rows):
    x, y = rows
    found = uncentred_least_squares_map(PairMoments.from_rows(x, y))
    np.testing.assert_allclose(found.weight, np.linalg.lstsq(x, y)[0], rtol=1e-6, atol=1e-8)
    assert not found.intercept.any()


def test_fewer_rows_than_channels_is_the_minimum_norm_fit():
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(9, 20, generator=generator).double(), torch.randn(9, 3, generator=generator).double()
    found = ridge_map(PairMoments.from_rows(x, y), strengths=[0])
    expected = torch.linalg.lstsq(x - x.mean(0), y - y.mean(0), driver="gelsd").solution
    torch.testing.assert_close(found.map.weight, expected, rtol=1e-7, atol=1e-9)
    assert found.path.kept_rank == 8
    assert bool(torch.isinf(found.path.gcv).all())
    assert bool(torch.isfinite(ridge_map(PairMoments.from_rows(x, y)).map.weight).all())


@pytest.mark.parametrize("penalty", ["isotropic", "diag"])
def test_dead_channels_get_no_weight(rows, penalty):
    x, y = rows
    dead = torch.hstack([x, torch.full((400, 2), 500.1, dtype=torch.float64)])
    splits, alive = PairSplits.from_rows(dead, y), PairSplits.from_rows(x, y)
    found = ridge_map(splits.fit, splits.validation, penalty=penalty, strengths=[0.0])
    assert float(found.map.weight[12:].abs().max()) < 1e-9
    assert found.path.kept_rank == 12
    expected = ridge_map(alive.fit, alive.validation, penalty=penalty, strengths=[0.0]).map
    torch.testing.assert_close(found.map.weight[:12], expected.weight, rtol=1e-7, atol=1e-9)


def test_a_mean_500_times_the_deviation_changes_nothing(rows):
    x, y = rows
    near, far = PairSplits.from_rows(x, y), PairSplits.from_rows(x + 500 * x.std(0), y + 500 * y.std(0))
    one, other = (ridge_map(each.fit, each.validation) for each in (near, far))
    torch.testing.assert_close(one.map.weight, other.map.weight, rtol=1e-7, atol=1e-8)
    scores = [map_scores(f.map, s.test, s.fit) for f, s in ((one, near), (other, far))]
    assert scores[0].r2_vw == pytest.approx(scores[1].r2_vw, abs=1e-9)
    assert scores[0].r2_wh == pytest.approx(scores[1].r2_wh, abs=1e-8)


def test_bad_input_says_what_to_do(splits):
    fit, empty = splits.fit, PairMoments.from_rows(torch.zeros(0, 12), torch.zeros(0, 7))
    with pytest.raises(ValueError, match=r"strengths=\[-1\]; give finite"):
        ridge_map(fit, strengths=[-1])
    with pytest.raises(ValueError, match=r"strengths=\[\]"):
        ridge_map(fit, strengths=[])
    with pytest.raises(ValueError, match="penalty is 'l1'"):
        ridge_map(fit, penalty="l1")
    with pytest.raises(ValueError, match="select is 'aic'"):
        ridge_map(fit, select="aic")
    with pytest.raises(ValueError, match="no validation shard"):
        ridge_map(fit, select="validation")
    with pytest.raises(ValueError, match="validation moments have no rows"):
        ridge_map(fit, empty)
    with pytest.raises(ValueError, match="other sites"):
        ridge_map(fit, splits.validation.reversed())
    with pytest.raises(ValueError, match="0 rows cannot be fitted to"):
        ridge_map(empty)
    with pytest.raises(ValueError, match="1 rows cannot be fitted to"):
        ridge_map(PairMoments.from_rows(torch.zeros(1, 12), torch.zeros(1, 7)))

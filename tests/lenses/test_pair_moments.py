"""Moments of pairs against numpy on the rows, for every way to cut and join them."""

import numpy as np
import pytest
import torch

from microtome.lenses.pair_moments import PairMoments

NAMES = ("mean_x", "mean_y", "xx", "xy", "yy")


@pytest.fixture
def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Correlated rows of 5 and 3 channels, one of mean 500 and deviation 1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 5, generator=generator, dtype=torch.float64)
    x[:, 2] += 500
    y = x[:, :3] * 0.5 + torch.randn(60, 3, generator=generator, dtype=torch.float64)
    return x, y


def assert_same(one: PairMoments, other: PairMoments, tolerance: float = 1e-10) -> None:
    assert one.count == other.count
    for name in NAMES:
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=tolerance, atol=tolerance)


def test_sums_are_numpys(rows):
    x, y = rows
    found = PairMoments.from_rows(x, y)
    expected = np.cov(np.hstack([x, y]), rowvar=False, bias=True) * 60
    joint = torch.vstack([torch.hstack([found.xx, found.xy]), torch.hstack([found.xy.T, found.yy])])
    np.testing.assert_allclose(joint, expected, rtol=1e-10)
    np.testing.assert_allclose(found.mean_x, x.mean(0), rtol=1e-12)


def test_float32_rows_of_a_large_mean_keep_their_variance():
    x = 500 + torch.randn(4000, 1, generator=torch.Generator().manual_seed(1))
    found = PairMoments.from_rows(x, x)
    assert float(found.xx) / 4000 == pytest.approx(float(x.double().var(unbiased=False)), rel=1e-10)


@pytest.mark.parametrize("cut", [0, 1, 20, 59, 60])
def test_parts_add_up_and_are_taken_away_again(rows, cut):
    x, y = rows
    whole = PairMoments.from_rows(x, y)
    one, two = PairMoments.from_rows(x[:cut], y[:cut]), PairMoments.from_rows(x[cut:], y[cut:])
    assert_same(one + two, whole)
    assert_same(two + one, whole)
    assert_same(whole - one, two, 1e-8)
    assert_same(whole - two, one, 1e-8)


def test_about_other_means_is_the_sum_of_those_products(rows):
    x, y = rows
    mean_x, mean_y = torch.ones(5, dtype=torch.float64), torch.full((3,), 2.0, dtype=torch.float64)
    found = PairMoments.from_rows(x, y).about(mean_x, mean_y)
    torch.testing.assert_close(found.xy, (x - mean_x).T @ (y - mean_y), rtol=1e-10, atol=1e-8)
    torch.testing.assert_close(found.xx, (x - mean_x).T @ (x - mean_x), rtol=1e-10, atol=1e-8)
    torch.testing.assert_close(found.yy, (y - mean_y).T @ (y - mean_y), rtol=1e-10, atol=1e-8)


def test_reversed_and_increment_are_moments_of_those_rows(rows):
    x, y = rows
    assert_same(PairMoments.from_rows(x, y).reversed(), PairMoments.from_rows(y, x))
    assert_same(PairMoments.from_rows(x[:, :3], y).increment(), PairMoments.from_rows(x[:, :3], y - x[:, :3]), 1e-8)


def test_no_rows_are_zeros():
    found = PairMoments.from_rows(torch.zeros(0, 2), torch.zeros(0, 4))
    assert found.count == 0
    assert not any(getattr(found, name).any() for name in NAMES)
    assert (found + found).count == 0


def test_bad_input_says_what_to_do(rows):
    x, y = rows
    found = PairMoments.from_rows(x, y)
    with pytest.raises(ValueError, match=r"x has 60 rows and y 59"):
        PairMoments.from_rows(x, y[1:])
    with pytest.raises(ValueError, match="y holds NaN"):
        PairMoments.from_rows(x, torch.where(y > 1, torch.nan, y))
    with pytest.raises(ValueError, match="needs one stream"):
        found.increment()
    with pytest.raises(ValueError, match="cannot be taken from"):
        PairMoments.from_rows(x[:3], y[:3]) - found
    with pytest.raises(ValueError, match="other sites"):
        found + found.reversed()
    moved = found.about(found.mean_x, found.mean_y)
    with pytest.raises(ValueError, match="before `about`"):
        moved + found
    with pytest.raises(ValueError, match="Recentre the moments they came from"):
        moved.about(found.mean_x, found.mean_y)
    with pytest.raises(ValueError, match="means of width 3 and 5"):
        found.about(found.mean_y, found.mean_x)

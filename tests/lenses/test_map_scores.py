"""R2 of every kind against the rows and scikit-learn, and what is said of shards that have nothing to explain."""

import numpy as np
import pytest
import torch
from sklearn.metrics import r2_score

from microtome.lenses.linear_map import LinearMap, identity_map
from microtome.lenses.map_scores import error_moments, map_scores
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.pair_splits import PairSplits
from microtome.lenses.ridge_map import ridge_map
from microtome.lenses.simple_maps import mean_map


@pytest.fixture
def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """300 rows of a stream and of the same stream later, 6 channels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 6, generator=generator, dtype=torch.float64) * torch.logspace(0.5, -1, 6).double() + 2
    mix = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    return x, x + 0.3 * torch.tanh(x @ mix) + 0.05 * torch.randn(300, 6, generator=generator, dtype=torch.float64)


@pytest.fixture
def any_map() -> LinearMap:
    generator = torch.Generator().manual_seed(3)
    weight = torch.eye(6) + 0.1 * torch.randn(6, 6, generator=generator)
    return LinearMap(weight.double(), torch.randn(6, generator=generator).double())


def test_scores_are_those_of_the_rows(rows, any_map):
    x, y = rows
    splits = PairSplits.from_rows(x, y)
    held_x, held_y, fit_mean = x[240:], y[240:], y[:180].mean(0)
    left, total = held_y - any_map(held_x), held_y - fit_mean
    directions = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)) * 7
    scores = map_scores(any_map, splits.test, splits.fit, directions=directions)
    torch.testing.assert_close(error_moments(any_map, splits.test), left.T @ left, rtol=1e-9, atol=1e-9)
    assert scores.r2_vw == pytest.approx(float(1 - left.square().sum() / total.square().sum()), abs=1e-10)
    by_channel = 1 - left.square().sum(0) / total.square().sum(0)
    assert scores.r2_ua == pytest.approx(float(by_channel.mean()), abs=1e-10)
    inverse = torch.linalg.inv(total.T @ total)
    assert scores.r2_wh == pytest.approx(float(1 - (inverse @ left.T @ left).trace() / 6), abs=1e-9)
    along = 1 - (left @ directions.double().T).square().sum(0) / (total @ directions.double().T).square().sum(0)
    torch.testing.assert_close(scores.r2_directions, along, rtol=1e-9, atol=1e-9)
    assert (scores.count, scores.whitened_rank, scores.constant_channels) == (60, 6, 0)


def test_scikit_learn_agrees_where_the_means_are_the_shards_own(rows, any_map):
    x, y = rows
    whole = PairMoments.from_rows(x, y)
    scores = map_scores(any_map, whole, whole)
    guess = any_map(x).numpy()
    assert scores.r2_ua == pytest.approx(r2_score(y.numpy(), guess), abs=1e-10)
    assert scores.r2_vw == pytest.approx(r2_score(y.numpy(), guess, multioutput="variance_weighted"), abs=1e-10)


def test_axes_as_directions_are_the_channels(rows, any_map):
    splits = PairSplits.from_rows(*rows)
    scores = map_scores(any_map, splits.test, splits.fit, directions=torch.eye(6))
    assert float(scores.r2_directions.mean()) == pytest.approx(scores.r2_ua, abs=1e-12)


def test_the_mean_scores_0_and_an_intercept_that_is_off_scores_less(rows):
    splits = PairSplits.from_rows(*rows)
    mean = mean_map(splits.fit)
    scores = map_scores(mean, splits.test, splits.fit)
    assert (scores.r2_vw, scores.r2_ua, scores.r2_wh) == pytest.approx((0, 0, 0), abs=1e-12)
    off = LinearMap(mean.weight, mean.intercept + 1)
    assert map_scores(off, splits.test, splits.fit).r2_vw < -0.05


def test_increment_identity(rows):
    """R2(y) = 1 - (1 - R2(D)) tr S_DD / tr S_yy, and R2(D) is the score of the map that gives D."""
    splits = PairSplits.from_rows(*rows)
    found = ridge_map(splits.fit, splits.validation).map
    scores = map_scores(found, splits.test, splits.fit)
    added = splits.increment()
    only_added = LinearMap(found.weight - torch.eye(6), found.intercept)
    expected = map_scores(only_added, added.test, added.fit)
    assert scores.r2_increment == pytest.approx(expected.r2_vw, abs=1e-10)
    moved = [part.about(s.fit.mean_x, s.fit.mean_y) for s in (splits, added) for part in (s.test,)]
    ratio = float(moved[1].yy.trace() / moved[0].yy.trace())
    assert scores.r2_vw == pytest.approx(1 - (1 - scores.r2_increment) * ratio, abs=1e-12)
    assert scores.r2_vw > scores.r2_increment


def test_constant_channels_and_constant_shards(rows):
    x, y = rows
    y = torch.hstack([y, torch.full((300, 1), 500.1, dtype=torch.float64)])
    splits = PairSplits.from_rows(x, y)
    found = ridge_map(splits.fit, splits.validation).map
    scores = map_scores(found, splits.test, splits.fit)
    assert (scores.constant_channels, scores.whitened_rank) == (1, 6)
    alive = PairSplits.from_rows(x, y[:, :6])
    expected = map_scores(ridge_map(alive.fit, alive.validation).map, alive.test, alive.fit)
    np.testing.assert_allclose(
        (scores.r2_vw, scores.r2_ua, scores.r2_wh), (expected.r2_vw, expected.r2_ua, expected.r2_wh), atol=1e-8
    )
    nothing = PairSplits.from_rows(x, torch.ones(300, 6, dtype=torch.float64))
    scores = map_scores(mean_map(nothing.fit), nothing.test, nothing.fit)
    assert np.isnan([scores.r2_vw, scores.r2_ua, scores.r2_wh]).all()


def test_other_widths_have_no_increment(rows):
    x, y = rows
    splits = PairSplits.from_rows(x, y[:, :2])
    assert np.isnan(map_scores(ridge_map(splits.fit).map, splits.test, splits.fit).r2_increment)


def test_bad_input_says_what_to_do(rows, any_map):
    splits = PairSplits.from_rows(*rows)
    with pytest.raises(ValueError, match="the map is 5 to 5, the moments 6 to 6"):
        map_scores(identity_map(5), splits.test, splits.fit)
    with pytest.raises(ValueError, match="no rows"):
        map_scores(any_map, PairMoments.from_rows(torch.zeros(0, 6), torch.zeros(0, 6)), splits.fit)
    with pytest.raises(ValueError, match="direction has length 0"):
        map_scores(any_map, splits.test, splits.fit, directions=torch.zeros(1, 6))
    with pytest.raises(ValueError, match="directions have 5 channels, the target 6"):
        map_scores(any_map, splits.test, splits.fit, directions=torch.ones(1, 5))
    with pytest.raises(ValueError, match="Pass the shard as it came"):
        map_scores(any_map, splits.test.about(splits.fit.mean_x, splits.fit.mean_y), splits.fit)

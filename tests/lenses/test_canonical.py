"""Canonical correlations against scikit-learn, noise against its edge, and a planted number of directions."""

import numpy as np
import pytest
import torch
from sklearn.cross_decomposition import CCA

from microtome.lenses.canonical import canonical_correlations, noise_edge
from microtome.lenses.map_scores import map_scores
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.ridge_map import least_squares_map


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def planted() -> tuple[PairMoments, PairMoments]:
    """Two shards of 32 channels that share 10 directions, seen through unlike mixtures."""
    x, mix = noise(0, 8000, 32), noise(1, 2, 32, 32)
    y = noise(2, 8000, 32)
    y[:, :10] = 0.8 * x[:, :10] + 0.6 * y[:, :10]
    x, y = x @ mix[0] + 5, y @ mix[1] * torch.logspace(0, -2, 32).double()
    return PairMoments.from_rows(x[:4000], y[:4000]), PairMoments.from_rows(x[4000:], y[4000:])


@pytest.fixture
def independent() -> tuple[PairMoments, PairMoments]:
    """Two shards of 48 channels that have nothing to do with each other, 20 rows per channel."""
    x, y = noise(3, 1920, 48), noise(4, 1920, 48)
    return PairMoments.from_rows(x[:960], y[:960]), PairMoments.from_rows(x[960:], y[960:])


def test_they_are_scikit_learns():
    x = noise(5, 200, 4) @ noise(6, 4, 4)
    y = x @ noise(7, 4, 3) + 2 * noise(8, 200, 3)
    found = canonical_correlations(PairMoments.from_rows(x, y))
    model = CCA(n_components=3, max_iter=5000, tol=1e-12).fit(x.numpy(), y.numpy())
    scores = model.transform(x.numpy(), y.numpy())
    expected = [np.corrcoef(scores[0][:, i], scores[1][:, i])[0, 1] for i in range(3)]
    np.testing.assert_allclose(found.in_sample, sorted(expected, reverse=True), atol=1e-6)
    assert bool(found.held_out.isnan().all())


def test_held_out_ones_use_the_directions_of_the_fit_shard():
    x, z = noise(5, 300, 4) @ noise(6, 4, 4), noise(9, 300, 3)
    y = x @ noise(7, 4, 3) + 2 * z
    found = canonical_correlations(PairMoments.from_rows(x[:200], y[:200]), PairMoments.from_rows(x[200:], y[200:]))
    model = CCA(n_components=3, max_iter=5000, tol=1e-12).fit(x[:200].numpy(), y[:200].numpy())
    scores = model.transform(x[200:].numpy(), y[200:].numpy())
    expected = [np.corrcoef(scores[0][:, i], scores[1][:, i])[0, 1] for i in range(3)]
    np.testing.assert_allclose(found.held_out, expected, atol=1e-5)


def test_independent_sites_stay_below_the_edge(independent):
    fit, test = independent
    found = canonical_correlations(fit, test)
    g = 48 / 959
    assert found.noise_edge == pytest.approx(2 * (g * (1 - g)) ** 0.5)
    assert float(found.in_sample.max()) == pytest.approx(found.noise_edge, rel=0.06)
    assert float(found.in_sample_ceiling[-1]) == pytest.approx(found.null_mean, rel=0.1)
    assert found.count_above_edge == 0
    assert float(found.held_out.abs().max()) < found.noise_edge
    assert found.participation == pytest.approx((8 / 3 / np.pi) ** 2 * 48, rel=0.05)
    assert map_scores(least_squares_map(fit), test, fit).r2_vw < 0


def test_planted_directions_are_counted(planted):
    found = canonical_correlations(*planted)
    assert found.count_above_edge == 10
    np.testing.assert_allclose(found.held_out[:10], 0.8, atol=0.03)
    assert found.rank_reaching(0.95) == 10
    assert found.participation > 13
    assert float(found.held_out_ceiling[-1]) == pytest.approx(10 * 0.64 / 32, abs=0.01)
    table = found.to_frame()
    assert list(table["rank"]) == list(range(1, 33))
    assert table["above_edge"].sum() == 10


def test_the_ceiling_is_what_least_squares_attains(planted):
    fit, _ = planted
    found = canonical_correlations(fit)
    assert map_scores(least_squares_map(fit), fit, fit).r2_wh == pytest.approx(
        float(found.in_sample_ceiling[-1]), abs=1e-9
    )


def test_unlike_widths_and_dead_channels():
    x, y = noise(0, 4000, 20), noise(1, 4000, 60)
    dead = torch.hstack([x, torch.zeros(4000, 2, dtype=torch.float64), x[:, :1]])
    found = canonical_correlations(PairMoments.from_rows(dead, y))
    assert (found.rank_x, found.width_x, found.rank_y, len(found.in_sample)) == (20, 23, 60, 20)
    assert float(found.in_sample.max()) == pytest.approx(found.noise_edge, rel=0.06)
    expected = canonical_correlations(PairMoments.from_rows(x, y))
    np.testing.assert_allclose(found.in_sample, expected.in_sample, atol=1e-9)


def test_fewer_rows_than_channels_tell_nothing():
    x, y = noise(0, 15, 20), noise(1, 15, 20)
    found = canonical_correlations(
        PairMoments.from_rows(x, y), PairMoments.from_rows(noise(2, 99, 20), noise(3, 99, 20))
    )
    np.testing.assert_allclose(found.in_sample, 1, atol=1e-6)
    assert (found.noise_edge, found.rank_x, found.count_above_edge) == (1.0, 14, 0)
    assert noise_edge(5, 5, 1) == 1.0


def test_bad_input_says_what_to_do(planted):
    fit, test = planted
    with pytest.raises(ValueError, match="1 rows have no correlations"):
        canonical_correlations(PairMoments.from_rows(torch.ones(1, 2), torch.ones(1, 2)))
    small = PairMoments.from_rows(torch.ones(5, 2), torch.ones(5, 2))
    with pytest.raises(ValueError, match=r"test has 5 rows of \(2, 2\), fit is \(32, 32\)"):
        canonical_correlations(fit, small)
    with pytest.raises(ValueError, match="share is 95"):
        canonical_correlations(fit, test).rank_reaching(95.0)
    nothing = canonical_correlations(small, small)
    assert (len(nothing.in_sample), nothing.rank_x, nothing.rank_reaching(0.5)) == (0, 0, 0)

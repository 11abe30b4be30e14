"""Baselines against scipy and the rows."""

import numpy as np
import pytest
import torch
from scipy.linalg import orthogonal_procrustes
from scipy.spatial import procrustes
from sklearn.linear_model import LinearRegression

from microtome.lenses.map_scores import map_scores
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.ridge_map import least_squares_map
from microtome.lenses.simple_maps import mean_map, procrustes_map, scale_map, shift_map


@pytest.fixture
def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(90, 5, generator=generator, dtype=torch.float64) + 3
    return x, 0.7 * x + torch.randn(90, 5, generator=generator, dtype=torch.float64)


def test_mean_shift_and_scale_are_what_they_say(rows):
    x, y = rows
    fit = PairMoments.from_rows(x, y)
    torch.testing.assert_close(mean_map(fit)(x), y.mean(0).expand(90, 5))
    torch.testing.assert_close(shift_map(fit)(x), x - x.mean(0) + y.mean(0))
    for channel in range(5):
        expected = LinearRegression().fit(x[:, [channel]], y[:, channel])
        np.testing.assert_allclose(scale_map(fit)(x)[:, channel], expected.predict(x[:, [channel]]), rtol=1e-9)


def test_procrustes_is_scipys(rows):
    x, y = rows
    found = procrustes_map(PairMoments.from_rows(x, y))
    centred_x, centred_y = x - x.mean(0), y - y.mean(0)
    rotation, total = orthogonal_procrustes(centred_x, centred_y)
    scale = total / float(centred_x.square().sum())
    np.testing.assert_allclose(found.weight, scale * rotation, rtol=1e-9)
    assert found.facts["scale"] == pytest.approx(scale)
    left = (y - found(x)).square().sum() / centred_y.square().sum()
    assert float(left) == pytest.approx(procrustes(y.numpy(), x.numpy())[2], rel=1e-9)
    np.testing.assert_allclose(procrustes_map(PairMoments.from_rows(x, y), is_scaled=False).weight, rotation, rtol=1e-9)


def test_procrustes_finds_a_planted_rotation_and_never_beats_least_squares(rows):
    x, y = rows
    rotation = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64))[0]
    planted = PairMoments.from_rows(x, 2.5 * x @ rotation - 4)
    torch.testing.assert_close(procrustes_map(planted).weight, 2.5 * rotation)
    assert map_scores(procrustes_map(planted), planted, planted).r2_vw == pytest.approx(1, abs=1e-12)
    fit = PairMoments.from_rows(x, y)
    scores = [map_scores(make(fit), fit, fit).r2_vw for make in (least_squares_map, procrustes_map, mean_map)]
    assert scores == sorted(scores, reverse=True)


def test_procrustes_into_a_wider_target_keeps_angles(rows):
    x = rows[0]
    frame = torch.linalg.qr(torch.randn(8, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64))[0].T
    planted = PairMoments.from_rows(x, x @ frame + 1)
    torch.testing.assert_close(procrustes_map(planted).weight, frame)
    with pytest.raises(ValueError, match="from 8 to 5 channels"):
        procrustes_map(planted.reversed())


def test_a_constant_channel_has_no_scale(rows):
    x, y = rows
    x = torch.hstack([x[:, :4], torch.full((90, 1), 500.1, dtype=torch.float64)])
    found = scale_map(PairMoments.from_rows(x, y))
    assert float(found.weight[4, 4]) == 0
    assert float(found.intercept[4]) == pytest.approx(float(y[:, 4].mean()))


@pytest.mark.parametrize("make", [shift_map, scale_map])
def test_other_widths_are_refused(rows, make):
    x, y = rows
    with pytest.raises(ValueError, match="same width, got 5 and 3 channels"):
        make(PairMoments.from_rows(x, y[:, :3]))

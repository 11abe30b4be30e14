"""Moments in chunks against two passes over all rows."""

import numpy as np
import pytest
import torch

from microtome.probes.moments import Moments


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(3, 400, 5))
    features[:, :, 1] += 3000
    features[:, :, 2] *= 1e-3
    targets = np.stack([rng.integers(0, 2, 400), rng.normal(size=400) + 50], axis=1)
    weights = rng.uniform(0.1, 3, size=400)
    return torch.from_numpy(features), torch.from_numpy(targets.astype(float)), torch.from_numpy(weights)


def two_pass(features, targets, weights):
    """Per site, by numpy."""
    x, y, w = features.numpy(), targets.numpy(), weights.numpy()
    mean, target_mean = np.average(x, axis=1, weights=w), np.average(y, axis=0, weights=w)
    u, v = x - mean[:, None], y - target_mean
    return w.sum(), mean, (u * w[:, None]).swapaxes(1, 2) @ u, target_mean, (u * w[:, None]).swapaxes(1, 2) @ v, v, w


def accumulated(features, targets, weights, order, sizes, cells=None, n_cells=1):
    moments = Moments.empty(len(features), features.shape[2], targets.shape[1], cells=n_cells)
    for part in order.split(sizes):
        of = None if cells is None else cells[part]
        moments.update(features[:, part], targets[part], of, None if weights is None else weights[part])
    return moments


@pytest.mark.parametrize("sizes", [1, 7, 400])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_equal_to_two_passes_in_any_order(rows, sizes, is_weighted):
    features, targets, weights = rows
    used = weights if is_weighted else torch.ones_like(weights)
    order = torch.from_numpy(np.random.default_rng(sizes).permutation(400))
    moments = accumulated(features, targets, weights if is_weighted else None, order, sizes)
    count, mean, scatter, target_mean, cross, v, w = two_pass(features, targets, used)
    assert moments.count.item() == pytest.approx(count)
    np.testing.assert_allclose(moments.mean[:, 0], mean, rtol=1e-12)
    np.testing.assert_allclose(moments.scatter[:, 0], scatter, atol=1e-10 * count, rtol=1e-10)
    np.testing.assert_allclose(moments.target_mean[0], target_mean, rtol=1e-12)
    np.testing.assert_allclose(moments.target_scatter[0], (w[:, None] * v**2).sum(0), rtol=1e-10)
    np.testing.assert_allclose(moments.cross[:, 0], cross, atol=1e-10 * count, rtol=1e-10)


def test_a_float32_channel_of_mean_3000_and_variance_1_survives():
    rng = np.random.default_rng(1)
    features = torch.from_numpy(3000 + rng.normal(size=(1, 4096, 1))).float()
    moments = Moments.empty(1, 1, 1)
    for part in features.split(100, dim=1):
        moments.update(part, torch.zeros(part.shape[1], 1))
    assert moments.scatter.item() / 4096 == pytest.approx(features.numpy().astype(float).var(), rel=1e-10)


def test_cells_and_merges_hold_their_own_rows(rows):
    features, targets, weights = rows
    cells = torch.arange(400) % 3
    order = torch.arange(400)
    whole = accumulated(features, targets, weights, order, 50, cells, 3)
    first = accumulated(features, targets, weights, order[:150], 50, cells, 3)
    merged = first.merged(accumulated(features, targets, weights, order[150:], 50, cells, 3))
    together = whole.of([0, 2])
    kept = cells != 1
    directly = accumulated(features[:, kept], targets[kept], weights[kept], torch.arange(int(kept.sum())), 1000)
    for name in ("count", "mean", "scatter", "target_mean", "target_scatter", "cross"):
        torch.testing.assert_close(getattr(merged, name), getattr(whole, name), rtol=1e-10, atol=1e-8)
        torch.testing.assert_close(getattr(together, name), getattr(directly, name), rtol=1e-10, atol=1e-8)


def test_what_a_cell_left_out_holds_changes_no_bit(rows):
    features, targets, _ = rows
    cells = torch.arange(400) % 3
    corrupted = features.clone()
    corrupted[:, 1] = 1e9
    clean, dirty = (accumulated(x, targets, None, torch.arange(400), 60, cells, 3) for x in (features, corrupted))
    assert torch.equal(clean.of([0, 2]).scatter, dirty.of([0, 2]).scatter)
    assert not torch.equal(clean.of([0, 1]).scatter, dirty.of([0, 1]).scatter)


def test_later_columns_are_zero_in_the_rows_so_far(rows):
    features, targets, _ = rows
    padded = torch.stack([targets[:, 1], torch.zeros(400).double(), targets[:, 0]], dim=1)
    padded[200:, 1] = 1
    late = accumulated(features[:, :200], targets[:200], None, torch.arange(200), 50).with_outputs([1, None, 0])
    late.update(features[:, 200:], padded[200:])
    whole = accumulated(features, padded, None, torch.arange(400), 400)
    torch.testing.assert_close(late.cross, whole.cross, rtol=1e-10, atol=1e-8)
    torch.testing.assert_close(late.target_mean, whole.target_mean, rtol=1e-12, atol=0)


def test_no_rows_and_weights_of_zero_count_for_nothing(rows):
    features, targets, _ = rows
    moments = Moments.empty(3, 5, 2)
    moments.update(features[:, :0], targets[:0])
    moments.update(features[:, :3], targets[:3], weights=torch.zeros(3))
    assert moments.count.item() == 0
    assert moments.scatter.abs().max() == 0
    moments.update(features, targets)
    torch.testing.assert_close(moments.mean[:, 0], features.mean(dim=1))


def test_bad_chunks_are_refused(rows):
    features, targets, _ = rows
    moments = Moments.empty(3, 5, 2)
    with pytest.raises(ValueError, match="A chunk of 2 sites, 5 features, 2 targets; expected 3, 5, 2"):
        moments.update(features[:2], targets)
    features[1, 7, 2] = torch.nan
    with pytest.raises(ValueError, match="Site 1, row 7 of the chunk has nan in feature 2"):
        moments.update(features, targets)
    features[1, 7, 2] = 1e160
    with pytest.raises(ValueError, match=r"Site 1, row 7 of the chunk has 1e\+160 in feature 2.*past 1e\+100"):
        moments.update(features, targets)

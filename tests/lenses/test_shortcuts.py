"""Shortcuts are the maps of their pairs, lead to the last depth, come back from files, are exact where it is linear."""

import numpy as np
import pytest
import torch

from microtome.capture.sites import Site
from microtome.lenses.depths import deeper_pairs, depth_of, in_order, next_pairs, pairs_to_last, part_pairs
from microtome.lenses.map_scores import map_scores
from microtome.lenses.pair_splits import pair_splits
from microtome.lenses.reduced_rank import reduced_rank
from microtome.lenses.ridge_pairs import ridge_pairs
from microtome.lenses.shortcuts import Shortcuts, fit_shortcuts
from microtome.lenses.simple_maps import shift_map

SITES = ["resid_pre.0", "resid_post.0", "resid_post.1", "resid_post.2"]


@pytest.fixture
def linear_moments(row_moments):
    """A residual network without anything nonlinear, r + r A + b, and its depths."""
    generator = torch.Generator().manual_seed(0)
    stream = torch.randn(600, 6, generator=generator).double() + 2
    values = {"resid_pre.0": stream}
    for layer in range(3):
        stream = stream + 0.4 * stream @ torch.randn(6, 6, generator=generator).double() + layer + 1
        values[f"resid_post.{layer}"] = stream
    return row_moments(values)


def test_a_linear_network_is_carried_exactly(linear_moments):
    """R2 is 1, at full rank in both metrics too; the identity's is not; two shortcuts in turn are the long one."""
    found = fit_shortcuts(linear_moments, dtype=torch.float64, strengths=[0])
    assert list(found.maps) == [(a, b) for i, a in enumerate(SITES) for b in SITES[i + 1 :]]
    np.testing.assert_allclose(found.table[["r2_vw", "r2_ua", "r2_wh", "r2_increment"]], 1, atol=1e-9)
    assert (found.table["identity_r2_vw"] < 0.9).all()
    assert (found.table["identity_r2_vw"] < found.table["shift_r2_vw"]).all()
    one, two = found.between(SITES[0], SITES[1]), found.between(SITES[1], SITES[2])
    long = found.between(SITES[0], SITES[2])
    torch.testing.assert_close(one.then(two).weight, long.weight, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(one.then(two).intercept, long.intercept, rtol=1e-8, atol=1e-7)
    splits = pair_splits(linear_moments, SITES[0], SITES[3])
    for metric in ("raw", "whitened"):
        assert map_scores(reduced_rank(splits.fit, metric=metric).at(6), splits.test, splits.fit).r2_wh > 1 - 1e-9


def test_a_site_to_itself_is_the_identity(linear_moments):
    found = ridge_pairs(linear_moments, [(site, site) for site in SITES], keep_maps=True, strengths=[0])
    for fitted in found.maps.values():
        torch.testing.assert_close(fitted.weight, torch.eye(6, dtype=torch.float64), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(fitted.intercept, torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-8)


def test_the_published_form_is_least_squares_without_intercept(stream_moments):
    found = fit_shortcuts(stream_moments, method="published", dtype=torch.float64)
    assert (found.table["method"] == "published").all()
    rows = stream_moments.masks["fit", "rest"]
    x, y = (stream_moments.values[name][rows] for name in ("resid_pre.0", "resid_post.2"))
    fitted = found.between("resid_pre.0", "resid_post.2")
    np.testing.assert_allclose(fitted.weight, np.linalg.lstsq(x, y)[0], rtol=1e-7)
    assert not fitted.intercept.any()
    splits = pair_splits(stream_moments, "resid_pre.0", "resid_post.2")
    scores = map_scores(fitted, splits.test, splits.fit)
    row = found.table.set_index(["source", "target"]).loc[("resid_pre.0", "resid_post.2")]
    assert row["r2_ua"] == pytest.approx(scores.r2_ua)
    assert scores.r2_vw > map_scores(shift_map(splits.fit), splits.test, splits.fit).r2_vw


def test_translators_lead_to_the_deepest_site(stream_moments):
    found = fit_shortcuts(stream_moments)
    readers = found.translators()
    assert list(readers) == [Site.parse(name) for name in SITES[:3]]
    assert readers[Site("resid_pre", 0)].weight.dtype == torch.float32
    assert readers[Site("resid_post", 1)] is found.between("resid_post.1", "resid_post.2")
    assert list(found.translators(Site("resid_post", 0))) == [Site("resid_pre", 0)]
    assert found.between("blocks.0.hook_resid_pre", "resid_post.0").target == "resid_post.0"
    only = fit_shortcuts(stream_moments, pairs_to_last(SITES))
    assert list(only.maps) == [(name, "resid_post.2") for name in SITES[:3]]
    torch.testing.assert_close(only.translators()[Site("resid_post", 1)].weight, readers[Site("resid_post", 1)].weight)


@pytest.mark.parametrize("method", ["ridge", "published"])
def test_they_come_back_from_their_files(stream_moments, tmp_path, method):
    found = fit_shortcuts(stream_moments, method=method)
    found.save(tmp_path / "new")
    again = Shortcuts.load(tmp_path / "new")
    assert list(again.maps) == list(found.maps)
    for name, fitted in found.maps.items():
        assert torch.equal(again.maps[name].weight, fitted.weight)
        assert torch.equal(again.maps[name].intercept, fitted.intercept)
        assert again.maps[name].description == fitted.description
    assert again.table.equals(found.table)
    assert (again.method, again.stratum) == (method, "rest")
    file = tmp_path / "new" / "shortcuts.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="damaged, or of another save"):
        Shortcuts.load(tmp_path / "new")
    (tmp_path / "new" / "shortcuts.json").write_text("{}")
    with pytest.raises(ValueError, match="format None"):
        Shortcuts.load(tmp_path / "new")


def test_pairs_of_sites():
    sites = [Site("resid_post", 1), Site("resid_pre", 1), Site("resid_pre", 0), Site("attn_out", 1), Site("mlp_out", 1)]
    sites += [Site("resid_post", 0), Site("resid_mid", 1), Site("attn_out", 0), Site("embed")]
    depths = ["resid_pre.0", "resid_pre.1", "resid_mid.1", "resid_post.1"]
    assert [str(site) for site in in_order(sites)] == depths
    assert [depth_of(site) for site in depths] == [0, 1, 1.5, 2]
    assert len(deeper_pairs(depths)) == 6
    assert pairs_to_last(depths) == [(name, "resid_post.1") for name in depths[:3]]
    assert next_pairs(depths) == [("resid_pre.0", "resid_pre.1"), ("resid_pre.1", "resid_mid.1"), tuple(depths[2:])]
    assert [(str(a), str(b)) for a, b in deeper_pairs(sites, "attn_out")] == [("attn_out.0", "attn_out.1")]
    found = [(str(a), str(b)) for a, b in part_pairs(sites)]
    assert found == [("resid_pre.0", "attn_out.0"), ("resid_pre.1", "attn_out.1")]
    assert [(str(a), str(b)) for a, b in part_pairs(sites, "mlp_out")] == [("resid_mid.1", "mlp_out.1")]
    assert part_pairs(["resid_post.0", "mlp_out.1"], "mlp_out") == [("resid_post.0", "mlp_out.1")]
    with pytest.raises(ValueError, match="no mlp_out has its input"):
        part_pairs(["resid_pre.0", "mlp_out.1"], "mlp_out")
    with pytest.raises(ValueError, match="part is 'z'"):
        part_pairs(sites, "z")
    with pytest.raises(ValueError, match="no sites of stream 'attn_out'"):
        in_order(depths, "attn_out")
    with pytest.raises(ValueError, match="stream is 'x'"):
        in_order(depths, "x")
    with pytest.raises(ValueError, match="embed belongs to no block"):
        depth_of("embed")


def test_bad_input_says_what_to_do(stream_moments):
    with pytest.raises(ValueError, match="method is 'sgd'"):
        fit_shortcuts(stream_moments, method="sgd")
    with pytest.raises(ValueError, match="there are no pairs"):
        fit_shortcuts(stream_moments, [])
    found = fit_shortcuts(stream_moments, pairs_to_last(SITES))
    with pytest.raises(KeyError, match=r"no shortcut from resid_pre.0 to resid_post.0; from there .*resid_post.2"):
        found.between("resid_pre.0", "resid_post.0")
    with pytest.raises(KeyError, match=r"no shortcut leads to resid_post\.0"):
        found.translators("resid_post.0")
    with pytest.raises(FileNotFoundError):
        Shortcuts.load("nowhere")

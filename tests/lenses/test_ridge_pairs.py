"""All pairs at once give what each pair gives alone, and say what is at the edge."""

import numpy as np
import pytest
import torch

from microtome.lenses.canonical import canonical_correlations
from microtome.lenses.linear_map import identity_map
from microtome.lenses.linearity import linearity
from microtome.lenses.map_scores import map_scores
from microtome.lenses.moments import Moments
from microtome.lenses.pair_moments import NoRows, PairMoments
from microtome.lenses.pair_splits import pair_splits
from microtome.lenses.reduced_rank import reduced_rank
from microtome.lenses.ridge_map import least_squares_map, ridge_map
from microtome.lenses.ridge_pairs import ridge_pairs
from microtome.lenses.shortcuts import fit_shortcuts
from microtome.lenses.simple_maps import scale_map, shift_map
from microtome.lenses.source_basis import source_basis
from microtome.lenses.strata import TokenRule

KINDS = ("r2_vw", "r2_ua", "r2_wh")


@pytest.mark.parametrize(("penalty", "refit"), [("isotropic", False), ("diag", False), ("isotropic", True)])
def test_a_pair_among_all_is_the_pair_alone(stream_moments, penalty, refit):
    found = ridge_pairs(stream_moments, penalty=penalty, refit=refit, keep_maps=True, canonical=True)
    assert len(found.table) == 16
    for row in found.to_frame().to_dict("records"):
        name = row["source"], row["target"]
        splits = pair_splits(stream_moments, *name)
        alone = ridge_map(splits.fit, splits.validation, penalty=penalty, refit=refit)
        assert (row["strength"], row["edge"]) == (alone.path.strength, alone.path.edge)
        torch.testing.assert_close(found.maps[name].weight, alone.map.weight)
        torch.testing.assert_close(found.maps[name].intercept, alone.map.intercept)
        torch.testing.assert_close(found.paths[name].validation_r2, alone.path.validation_r2)
        splits = splits.joined() if refit else splits
        assert row["count"] == alone.map.facts["count"] == (800 if refit else 600)
        forward = stream_moments.sites.index(name[0]) < stream_moments.sites.index(name[1])
        kinds = (*KINDS, "r2_increment") if forward else KINDS
        assert forward or np.isnan(row["r2_increment"])
        scores = map_scores(alone.map, splits.test, splits.fit)
        np.testing.assert_allclose([row[k] for k in kinds], [getattr(scores, k) for k in kinds], atol=1e-9)
        others = {"identity": identity_map(8), "shift": shift_map(splits.fit), "scale": scale_map(splits.fit)}
        for label, other in others.items():
            scores = map_scores(other, splits.test, splits.fit)
            expected = [getattr(scores, kind) for kind in KINDS]
            np.testing.assert_allclose([row[f"{label}_{kind}"] for kind in KINDS], expected, atol=1e-8)
        canonical = canonical_correlations(splits.fit, splits.test)
        assert row["ceiling"] == pytest.approx(float(canonical.held_out_ceiling[-1]))
        assert row["in_sample_ceiling"] == pytest.approx(float(canonical.in_sample_ceiling[-1]))


def test_what_is_known_of_each_pair(stream_moments):
    table = ridge_pairs(stream_moments).table.set_index(["source", "target"])
    same = table.loc[("resid_post.0", "resid_post.0")]
    assert same["r2_vw"] == pytest.approx(1, abs=1e-9)
    assert same["identity_r2_vw"] == pytest.approx(1, abs=1e-12)
    later = table.loc[("resid_pre.0", "resid_post.2")]
    assert later["r2_vw"] > later["scale_r2_vw"] > later["shift_r2_vw"] - 0.05
    assert later["tokens_per_channel"] == 600 / 8
    assert (later["count"], later["test_count"]) == (600, 200)
    nearer = table.loc[("resid_post.1", "resid_post.2")]
    assert nearer["r2_vw"] > later["r2_vw"]


def test_chosen_pairs_keep_their_order_and_maps_only_on_request(stream_moments):
    pairs = [("resid_post.2", "resid_pre.0"), ("resid_pre.0", "resid_post.1"), ("resid_post.2", "resid_post.1")]
    found = ridge_pairs(stream_moments, pairs)
    assert list(zip(found.table["source"], found.table["target"], strict=True)) == pairs
    assert found.maps == {}
    assert list(found.on_edge()["edge"]) == [edge for edge in found.table["edge"] if edge]
    named = ridge_pairs(stream_moments, pairs[:1], keep_maps=True).maps[pairs[0]]
    assert (named.source, named.target, named.facts["stratum"]) == ("resid_post.2", "resid_pre.0", "rest")


def test_accumulated_moments_give_what_rows_give(stream_moments):
    """`Moments`, with shards by document, first tokens apart, and the shuffled pairing."""
    values = {name: rows.float() for name, rows in stream_moments.values.items()}
    document = torch.arange(1000) // 10
    moments = Moments(dict.fromkeys(values, 8), rule=TokenRule(massive=False), shuffled=True)
    moments.update(
        values,
        documents=document.tolist(),
        position=torch.arange(1000) % 10,
        is_special=torch.zeros(1000, dtype=torch.bool),
        text=document,
    )
    moments.finish()
    found = ridge_pairs(moments).table.set_index(["source", "target"])["r2_vw"]
    shard = torch.from_numpy(moments.split.numbers(document.tolist()))
    is_rest = torch.arange(1000) % 10 > 0
    for (source, target), value in found.items():
        parts = [PairMoments.from_rows(values[source][rows], values[target][rows]) for rows in _shards(shard, is_rest)]
        alone = ridge_map(*parts[:2]).map
        assert value == pytest.approx(map_scores(alone, parts[2], parts[0]).r2_vw, abs=2e-4)
    assert (ridge_pairs(moments, shuffled=True).table["r2_vw"].abs() < 0.1).all()


def _shards(shard, is_rest):
    return [(shard == number) & is_rest for number in range(3)]


def test_the_table_as_a_matrix(stream_moments):
    found = ridge_pairs(stream_moments, [("resid_post.2", "resid_pre.0"), ("resid_pre.0", "resid_post.1")])
    matrix = found.matrix("identity_r2_vw")
    assert (list(matrix.index), list(matrix.columns)) == (
        ["resid_post.2", "resid_pre.0"],
        ["resid_pre.0", "resid_post.1"],
    )
    assert matrix.loc["resid_pre.0", "resid_post.1"] == found.table["identity_r2_vw"].iloc[1]
    assert np.isnan(matrix.loc["resid_post.2", "resid_post.1"])
    with pytest.raises(KeyError, match="no column 'r2'"):
        found.matrix("r2")


def test_shuffled_pairing_explains_nothing(stream_moments):
    found = ridge_pairs(stream_moments, shuffled=True)
    assert (found.table["r2_vw"].abs() < 0.03).all()
    assert (found.table["identity_r2_vw"] < -0.5).all()


def test_other_shards_and_folds(stream_moments):
    folds = pair_splits(stream_moments, "resid_pre.0", "resid_post.0", shards=(("fit", "validation"), None, "test"))
    assert (folds.fit.count, folds.validation, folds.test.count) == (800, None, 200)
    with pytest.raises(ValueError, match="give the names of fit, validation and test"):
        pair_splits(stream_moments, "resid_pre.0", "resid_post.0", shards=("fit", "test"))


def test_bad_input_says_what_to_do(stream_moments):
    with pytest.raises(ValueError, match="there are no pairs"):
        ridge_pairs(stream_moments, [])
    with pytest.raises(ValueError, match="the fit shard has 0 rows of stratum 'sinks'"):
        ridge_pairs(stream_moments, stratum="sinks")


@pytest.fixture
def banded() -> Moments:
    """Four sites of 5 channels, neighbours alone, in 4 folds; 40 documents of 10 tokens."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(400, 5, generator=generator)
    values = {f"resid_post.{i}": first + 0.3 * i * torch.randn(400, 5, generator=generator) for i in range(4)}
    moments = Moments(dict.fromkeys(values, 5), 1, 4, rule=TokenRule(first=False, massive=False))
    moments.update(values, documents=torch.arange(400) // 10, position=torch.arange(400) % 10)
    return moments


def test_banded_moments_give_the_pairs_they_hold(banded):
    shards = (banded.training("fold0"), None, "fold0")
    names = [f"resid_post.{i}" for i in range(4)]
    near = [(names[i], names[j]) for i in range(4) for j in range(4) if abs(i - j) <= 1]
    table = ridge_pairs(banded, shards=shards).table
    assert list(zip(table["source"], table["target"], strict=True)) == near
    assert (table["count"] + table["test_count"] == 400).all()
    assert set(table["selected_by"]) == {"gcv"}
    assert list(fit_shortcuts(banded, shards=shards).maps) == [(a, b) for a, b in near if a < b]
    assert len(linearity(banded, shards=shards, strata=["all"]).table) == 3
    with pytest.raises(KeyError, match="'fit' is no shard"):
        ridge_pairs(banded)


def test_without_validation_rows_the_strength_is_chosen_by_gcv():
    rows = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    listed = {d: "test" if d == 5 else "fit" for d in range(6)} | {99: "validation"}
    moments = Moments({"a": 3, "b": 3}, shards=listed, rule=TokenRule(first=False))
    position = torch.arange(60) % 10
    moments.update({"a": rows, "b": rows + 1}, documents=torch.arange(60) // 10, position=position)
    assert pair_splits(moments, "a", "b").validation is None
    assert set(ridge_pairs(moments).table["selected_by"]) == {"gcv"}
    with pytest.raises(NoRows, match="Shard 'validation', stratum 'rest': no token is there"):
        moments.pair("a", "b", "validation")
    with pytest.raises(NoRows, match="Shard 'validation', stratum 'rest': no token is there"):
        pair_splits(moments, "a", "b", shards=("fit", "fit", "validation"))


def test_directions_that_float32_products_cannot_see_are_left_out():
    """A site of 20 channels that lives in 4 directions, as a head's output does in the stream."""
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(6000, 4, generator=generator) @ torch.randn(4, 20, generator=generator)
    full = 0.2 * flat @ torch.randn(20, 20, generator=generator) + torch.randn(6000, 20, generator=generator)
    values, document = {"flat": flat, "full": full}, torch.arange(6000) // 10
    moments = Moments({"flat": 20, "full": 20}, rule=TokenRule(first=False), chunk=1000)
    moments.update(values, documents=document, position=torch.arange(6000) % 10)
    moments.finish()
    shard = torch.from_numpy(moments.split.numbers(document.tolist()))
    for source, target in (("full", "flat"), ("flat", "full"), ("flat", "flat")):
        fit, test = (PairMoments.from_rows(values[source][shard == i], values[target][shard == i]) for i in (0, 2))
        found = pair_splits(moments, source, target)
        ours, exact = (least_squares_map(each) for each in (found.fit, fit))
        scores, expected = map_scores(ours, found.test, found.fit), map_scores(exact, test, fit)
        assert scores.whitened_rank == expected.whitened_rank == (4 if target == "flat" else 20)
        assert scores.r2_wh == pytest.approx(expected.r2_wh, abs=1e-4)
        torch.testing.assert_close(ours.weight, exact.weight, rtol=1e-3, atol=1e-3)
        canonical, plain = canonical_correlations(found.fit, found.test), canonical_correlations(fit, test)
        assert (canonical.rank_x, canonical.rank_y) == (plain.rank_x, plain.rank_y)
        assert reduced_rank(found.fit).full_rank == reduced_rank(fit).full_rank == 4
        assert source_basis(found.fit, "diag").kept_rank == source_basis(fit, "diag").kept_rank
    both = found.fit + found.validation
    torch.testing.assert_close(both.noise_x, found.fit.noise_x + found.validation.noise_x)
    assert float(both.increment().noise_y.min()) > 0
    assert both.reversed().noise_y is both.noise_x
    assert both.about(both.mean_x, both.mean_y).noise_y is both.noise_y

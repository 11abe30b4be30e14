"""Operators of any rank: what they compute, what is kept on disk, and where they refuse to act."""

import json

import pytest
import torch

from microtome.lenses.linear_map import LinearMap
from microtome.lenses.map_scores import map_scores
from microtome.lenses.moments_pass import moments_of
from microtome.lenses.pair_splits import pair_splits
from microtome.lenses.reduced_rank import reduced_rank
from microtome.lenses.ridge_map import ridge_map
from microtome.lenses.transport.fit import transport_operator
from microtome.lenses.transport.operator import TransportOperator, operator_of

PAIR = ("resid_post.0", "resid_post.2")


def test_full_rank_is_the_ridge_map_and_a_rank_its_reduced_one(stream_moments):
    splits = pair_splits(stream_moments, *PAIR)
    ridge = ridge_map(splits.fit, splits.validation)
    whole = transport_operator(stream_moments, *PAIR)
    assert torch.equal(whole.weight, ridge.map.weight)
    assert whole.strength == ridge.path.strength
    for metric in ("whitened", "raw"):
        reduced = reduced_rank(splits.fit, metric=metric, strength=ridge.path.strength)
        low = transport_operator(stream_moments, *PAIR, rank=3, metric=metric)
        assert low.left.shape == (8, 3)
        assert torch.allclose(low.weight, reduced.at(3).weight, atol=1e-12)
        assert torch.linalg.matrix_rank(low.weight) == 3
        full = transport_operator(stream_moments, *PAIR, rank=8, metric=metric)
        assert torch.allclose(full.weight, whole.weight, atol=1e-9)
        x = torch.randn(4, 5, 8, dtype=torch.float64)
        assert torch.allclose(low(x), low.map(x), atol=1e-12)
        assert torch.allclose(low(x), x @ low.left @ low.right + low.intercept)


def test_each_metric_wins_where_it_is_the_judge(stream_moments):
    splits = pair_splits(stream_moments, *PAIR)
    scores = {
        metric: map_scores(transport_operator(stream_moments, *PAIR, rank=3, metric=metric).map, splits.fit, splits.fit)
        for metric in ("whitened", "raw")
    }
    assert scores["whitened"].r2_wh > scores["raw"].r2_wh
    assert scores["raw"].r2_vw > scores["whitened"].r2_vw


def test_rank_zero_is_the_mean_and_a_rank_that_is_not_there_is_refused(stream_moments):
    none = transport_operator(stream_moments, *PAIR, rank=0)
    assert torch.allclose(none(torch.randn(3, 8).double()), stream_moments.pair(*PAIR).mean_y.expand(3, 8))
    for rank in (-1, 9):
        with pytest.raises(ValueError, match=r"8 directions have variance .*ranks 0 to 8"):
            transport_operator(stream_moments, *PAIR, rank=rank)
    with pytest.raises(ValueError, match="metric is 'cosine'"):
        transport_operator(stream_moments, *PAIR, metric="cosine")


def test_fewer_rows_than_channels_is_told(row_moments, stream_moments):
    few = row_moments({name: rows[:12] for name, rows in stream_moments.values.items()})
    with pytest.warns(UserWarning, match="7 rows for 8 channels"):
        found = transport_operator(few, *PAIR)
    assert found.facts["kept_rank"] == 6
    with pytest.warns(UserWarning, match="7 rows"), pytest.raises(ValueError, match="ranks 0 to 6"):
        transport_operator(few, *PAIR, rank=7)


@pytest.mark.parametrize("rank", [None, 3])
def test_comes_back_from_disk_as_it_was(tmp_path, stream_moments, rank):
    found = transport_operator(stream_moments, *PAIR, rank=rank).to(torch.float32)
    found.save(tmp_path / "deep" / "operator")
    again = TransportOperator.load(tmp_path / "deep" / "operator")
    assert torch.equal(again.weight, found.weight)
    assert torch.equal(again.intercept, found.intercept)
    for name in ("source", "target", "route", "kind", "strength", "rank", "stratum"):
        assert getattr(again, name) == getattr(found, name)
    assert dict(again.facts) == dict(found.facts)
    held = (tmp_path / "deep" / "operator.safetensors").stat().st_size
    assert (held < 8 * 8 * 4 + 400) if rank is None else (held < 2 * 8 * 3 * 4 + 8 * 4 + 400)


def test_files_of_two_saves_and_other_files_are_refused(tmp_path, stream_moments):
    transport_operator(stream_moments, *PAIR).save(tmp_path / "a")
    transport_operator(stream_moments, *PAIR, rank=2).save(tmp_path / "b")
    (tmp_path / "a.safetensors").write_bytes((tmp_path / "b.safetensors").read_bytes())
    with pytest.raises(ValueError, match="of another save"):
        TransportOperator.load(tmp_path / "a")
    LinearMap(torch.eye(3), torch.zeros(3), "a map").save(tmp_path / "map")
    with pytest.raises(ValueError, match="no transport operator"):
        TransportOperator.load(tmp_path / "map")
    (tmp_path / "b.json").write_text(json.dumps({"format": 2, "route": "same"}))
    with pytest.raises(ValueError, match="format 2"):
        TransportOperator.load(tmp_path / "b")
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        TransportOperator.load(tmp_path / "b")


def test_knows_its_model_and_its_sites(tiny):
    model, other = tiny("llama"), tiny("llama", seed=1)
    ids = torch.randint(5, 100, (40, 12), generator=torch.Generator().manual_seed(0)).tolist()
    moments = moments_of(model, ids, ["resid_post.0", "resid_post.1"], progress=False)
    found = transport_operator(moments, "resid_post.0", "resid_post.1")
    found.require_model(model)
    with pytest.raises(ValueError, match=r"operator resid_post.0 to resid_post.1 was made for weights"):
        found.require_model(other)
    found.require_sites("blocks.0.hook_resid_post", "resid_post.1")
    with pytest.raises(ValueError, match=r"carries resid_post.0 to resid_post.1, not"):
        found.require_sites("resid_post.0", "resid_post.2")
    with pytest.raises(ValueError, match=r"x has 31 channels"):
        found(torch.randn(2, 31))
    with pytest.raises(KeyError):
        transport_operator(moments, "resid_post.0", "resid_post.2")


def test_a_map_without_names_is_no_operator():
    with pytest.raises(ValueError, match="does not say its sites"):
        operator_of(LinearMap(torch.eye(3), torch.zeros(3), "a map"))


def test_whole_numbers_are_refused_and_not_computed_with_a_weight_cut_off():
    found = operator_of(LinearMap(torch.eye(3) / 2, torch.zeros(3), "half", *PAIR))
    for x in (torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.bool)):
        with pytest.raises(TypeError, match="reads floating-point values"):
            found(x)


@pytest.mark.parametrize("lost", ["digest", "facts", "source", "rank"])
def test_a_description_that_lacks_something_is_damaged(tmp_path, lost):
    operator_of(LinearMap(torch.eye(3), torch.zeros(3), "one", *PAIR)).save(tmp_path / "a")
    said = json.loads((tmp_path / "a.json").read_text())
    del said[lost]
    (tmp_path / "a.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=f"damaged: it lacks {lost}"):
        TransportOperator.load(tmp_path / "a")

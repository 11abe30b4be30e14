"""The table of all pairs: equal to what is computed of one pair alone, and right where the answer is known."""

import numpy as np
import pytest
import torch

from microtome.lenses.pair_splits import pair_splits
from microtome.lenses.ridge_pairs import ridge_pairs
from microtome.lenses.transport.efficiency import transport_efficiency
from microtome.lenses.transport.subspace import transport_subspace
from microtome.lenses.transport.transport_map import transport_map


def test_every_pair_is_what_it_is_alone(stream_moments):
    found = transport_map(stream_moments, ranks=(2, 5, 99), keep_maps=True)
    assert len(found.table) == 6
    plain = ridge_pairs(stream_moments).table.set_index(["source", "target"])
    for row in found.table.to_dict("records"):
        splits = pair_splits(stream_moments, row["source"], row["target"])
        alone = transport_efficiency(splits, ranks=[2, 5, 8]).table.set_index("rank")
        assert row["efficiency_5"] == pytest.approx(alone.loc[5, "efficiency"], abs=1e-9)
        assert row["ceiling_2"] == pytest.approx(alone.loc[2, "ceiling"], abs=1e-9)
        whole = transport_efficiency(splits).whole.set_index("map")
        assert row["identity_score"] == pytest.approx(whole.loc["identity", "score"], abs=1e-9)
        assert row["identity_efficiency"] == pytest.approx(whole.loc["identity", "efficiency"], abs=1e-9)
        assert row["score"] == pytest.approx(alone.loc[8, "score"], abs=1e-9)
        assert np.isnan(row["efficiency_99"])
        assert row["r2_vw"] == pytest.approx(plain.loc[(row["source"], row["target"]), "r2_vw"])
        # the sizes are those of the ridge map: of least squares where the penalty is nearly nothing
        sizes = transport_subspace(splits)
        assert row["above_edge"] == sizes["above_edge"]
        assert row["effective_rank"] == pytest.approx(sizes["effective_rank"], rel=0.05)
        assert row["participation"] == pytest.approx(sizes["participation"], rel=0.05)
        assert found.maps[row["source"], row["target"]].weight.shape == (8, 8)
    assert found.table["distance"].tolist() == [1, 2, 3, 1, 2, 1]
    assert found.matrix("efficiency").shape == (3, 3)
    near = found.by_distance()
    assert near["pairs"].tolist() == [3, 2, 1]
    assert near["r2_vw"].is_monotonic_decreasing


def test_composition_and_efficiency_one_on_a_linear_network(row_moments):
    generator = torch.Generator().manual_seed(0)
    stream = torch.randn(2000, 8, generator=generator).double() + 1
    values = {"resid_pre.0": stream}
    for layer in range(3):
        stream = stream + stream @ torch.randn(8, 8, generator=generator).double() / 3 + layer
        values[f"resid_post.{layer}"] = stream
    found = transport_map(row_moments(values), strengths=[0], keep_maps=True, map_dtype=torch.float64)
    assert np.allclose(found.table[["r2_vw", "score", "ceiling", "efficiency"]], 1, atol=1e-9)
    assert (found.table["identity_score"] < 0.9).all()
    step, next_step = found.maps["resid_pre.0", "resid_post.0"], found.maps["resid_post.0", "resid_post.1"]
    leap = found.maps["resid_pre.0", "resid_post.1"]
    composed = step.then(next_step)
    assert torch.allclose(composed.weight, leap.weight, atol=1e-9)
    assert torch.allclose(composed.intercept, leap.intercept, atol=1e-8)


def test_shuffled_moments_give_the_null_of_the_table(stream_moments):
    null = transport_map(stream_moments, shuffled=True).table
    assert (null["r2_vw"] < 0.05).all()
    assert (null["above_edge"] == 0).all()


def test_refuses_what_cannot_be_measured(stream_moments, row_moments):
    with pytest.raises(ValueError, match="no pairs"):
        transport_map(stream_moments, [])
    with pytest.raises(ValueError, match="rank 0"):
        transport_map(stream_moments, ranks=[0])
    few = row_moments({name: rows[:20] for name, rows in stream_moments.values.items()})
    with pytest.raises(ValueError, match="12 rows for 8 \\+ 8 channels"):
        transport_map(few)


def test_a_site_that_does_not_vary_is_nan_and_leaves_the_other_pairs_alone(stream_moments, row_moments):
    values = dict(stream_moments.values)
    first, *_, last = values
    values["resid_post.1"] = torch.full_like(values["resid_post.1"], 3.0)
    table = transport_map(row_moments(values), [(first, "resid_post.1"), ("resid_post.1", last), (first, last)])
    rows = table.table
    assert rows[["score", "ceiling", "efficiency", "score_1"]].iloc[:2].isna().all(axis=None)
    assert (rows["above_edge"].iloc[:2] == 0).all()
    alone = transport_map(stream_moments, [(first, last)]).table.iloc[0]
    assert rows.iloc[2]["efficiency"] == pytest.approx(alone["efficiency"])
    assert table.matrix("efficiency").shape == (2, 2)

"""All maps of a pair beside each other: order, controls, and notes on numbers that mislead."""

import numpy as np
import pytest
import torch

from microtome.lenses.map_scores import map_scores
from microtome.lenses.pair_report import pair_report
from microtome.lenses.pair_splits import PairSplits, pair_splits
from microtome.lenses.reduced_rank import reduced_rank


@pytest.fixture
def splits(stream_moments) -> PairSplits:
    return pair_splits(stream_moments, "resid_pre.0", "resid_post.1")


def test_maps_are_scored_beside_their_controls(splits, stream_moments):
    control = pair_splits(stream_moments, "resid_pre.0", "resid_post.1", shuffled=True)
    found = pair_report(splits, controls={"shuffled": control}, ranks=[2, 8], directions=torch.eye(8))
    table = found.to_frame().set_index(["data", "map"])
    own = table.loc[""]
    assert list(own.index) == [
        *("mean", "identity", "identity plus shift", "scale per channel", "Procrustes", "least squares", "ridge"),
        *("reduced rank 2, whitened", "reduced rank 8, whitened", "reduced rank 2, raw", "reduced rank 8, raw"),
    ]
    assert own.loc["mean", "r2_vw"] == pytest.approx(0, abs=1e-12)
    assert own.loc["ridge", "r2_vw"] > own.loc["scale per channel", "r2_vw"] > own.loc["identity", "r2_vw"]
    assert own.loc["reduced rank 8, raw", "r2_vw"] == pytest.approx(own.loc["ridge", "r2_vw"])
    assert own.loc["reduced rank 2, raw", "r2_vw"] < own.loc["ridge", "r2_vw"]
    assert abs(table.loc[("shuffled", "ridge"), "r2_vw"]) < 0.05
    expected = map_scores(found.map, splits.test, splits.fit)
    assert own.loc["ridge", "r2_wh"] == pytest.approx(expected.r2_wh)
    assert list(found.directions.columns)[-1] == "ridge, shuffled"
    assert found.directions["ridge"].mean() == pytest.approx(own.loc["ridge", "r2_ua"])
    reduced = reduced_rank(splits.fit, metric="raw", strength=found.path.strength).at(2)
    assert own.loc["reduced rank 2, raw", "r2_vw"] == pytest.approx(map_scores(reduced, splits.test, splits.fit).r2_vw)
    assert own.loc["ridge", "r2_wh"] < float(found.canonical.held_out_ceiling[-1]) + 0.02
    fitted = np.linalg.eigvalsh(found.map.weight.T @ splits.fit.xx @ found.map.weight)
    assert found.effective_rank == pytest.approx(fitted.sum() ** 2 / (fitted**2).sum())


def test_notes_say_what_misleads(splits, row_moments):
    own = pair_report(splits)
    assert len(own.notes) == 1 + (own.path.edge != "")
    assert own.notes[-1] == (
        f"ceilings in sample are biased upwards by about {8 / 599:.3f} (independent sites would show that)."
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 8, generator=generator).double()
    short = row_moments({"a": x, "b": torch.hstack([x[:, :3] @ torch.randn(3, 5, generator=generator).double()])})
    notes = pair_report(pair_splits(short, "a", "b")).notes
    assert "7.5 tokens per channel: below 20" in notes[0]
    assert any(note.startswith("whitening kept 3 of 5 directions of the target") for note in notes)
    weak = pair_report(splits, strengths=[10, 1000]).notes
    assert weak[0] == "the weakest strength of the grid was taken: give strengths beyond it."


def test_unlike_widths_leave_out_what_needs_equal_ones(splits):
    fewer = PairSplits(*(_narrow(part) for part in (splits.fit, splits.validation, splits.test)))
    assert list(pair_report(fewer).table["map"]) == ["mean", "least squares", "ridge"]
    assert list(pair_report(fewer.reversed()).table["map"]) == ["mean", "Procrustes", "least squares", "ridge"]
    assert pair_report(fewer).directions.empty


def _narrow(part):
    return type(part)(part.count, part.mean_x, part.mean_y[:3], part.xx, part.xy[:, :3], part.yy[:3, :3])


def test_bad_input_says_what_to_do(splits):
    with pytest.raises(ValueError, match=r"control 'shuffled' is \(3, 8\), the pair \(8, 8\)"):
        pair_report(splits, controls={"shuffled": PairSplits(*[_narrow(splits.fit)] * 3).reversed()})
    with pytest.raises(ValueError, match="rank 9; there are ranks 0 to 8"):
        pair_report(splits, ranks=[9])
    with pytest.raises(ValueError, match="All shards must be of the same pair"):
        PairSplits(splits.fit, None, _narrow(splits.test))
    with pytest.raises(ValueError, match="give three numbers of 0 or more"):
        PairSplits.from_rows(torch.zeros(3, 1), torch.zeros(3, 1), (0, 0, 0))

"""Linear maps between depths of SmolLM2: near depths carry more than far ones; sinks lift the published score."""

import numpy as np
import pytest

from microtome.capture.models import load_model
from microtome.data.plain_english import plain_english
from microtome.lenses.linearity import linearity
from microtome.lenses.moments_pass import moments_of
from microtome.lenses.pair_report import pair_report
from microtome.lenses.pair_splits import pair_splits
from microtome.lenses.ridge_pairs import ridge_pairs
from microtome.lenses.token_windows import token_windows

SITES = ["resid_pre.0", "resid_post.9", "resid_post.10", "resid_post.14"]


@pytest.mark.slow
@pytest.mark.network
def test_maps_between_depths_of_a_real_model():
    model = load_model("smollm2")
    table = plain_english(["brown"], characters=30_000)
    windows = token_windows(model, table["text"], documents=table["document"].astype("category").cat.codes, length=128)
    moments = moments_of(model, windows.texts, SITES, documents=windows.documents, shuffled=True, progress=False)
    found = ridge_pairs(moments)
    assert found.on_edge().query("source != target").empty
    rows = found.table.set_index(["source", "target"])
    step, leap, start = (rows.loc[pair] for pair in [SITES[1:3], SITES[1::2], SITES[::3]] for pair in [tuple(pair)])
    assert step["r2_vw"] > leap["r2_vw"] > start["r2_vw"] > 0
    assert step["r2_increment"] < step["r2_vw"]
    between = rows.query("source != target")
    assert (between["r2_vw"] > between["identity_r2_vw"]).all()
    assert np.allclose(rows.loc[[(site, site) for site in SITES], "r2_vw"], 1, atol=1e-3)
    steps = linearity(moments, [(SITES[1], SITES[2])]).table.set_index("stratum")
    assert steps.loc["all", "published"] > steps.loc["rest", "published"]
    assert steps.loc["all", "published"] > 0.99
    splits, shuffled = (pair_splits(moments, SITES[1], SITES[2], shuffled=mixed) for mixed in (False, True))
    report = pair_report(splits, controls={"shuffled": shuffled}).table.set_index("data")
    assert report.loc["shuffled", "r2_vw"] < 0.05

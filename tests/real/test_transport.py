"""Transport in SmolLM2: short leaps carry more, sinks make leaps look linear, and efficiency is at most 1."""

import pytest

from microtome.capture.models import load_model
from microtome.data.plain_english import plain_english
from microtome.lenses.moments_pass import moments_of
from microtome.lenses.pair_splits import pair_splits
from microtome.lenses.token_windows import token_windows
from microtome.lenses.transport.efficiency import transport_efficiency
from microtome.lenses.transport.subspace import transport_subspace
from microtome.lenses.transport.transport_map import transport_map

SITES = ["resid_pre.0", "resid_post.11", "resid_post.12", "resid_post.16"]


@pytest.mark.slow
@pytest.mark.network
def test_what_a_real_stream_carries():
    model = load_model("smollm2")
    table = plain_english(["brown"], characters=40_000, passage=1000)
    windows = token_windows(model, table["text"], documents=table["document"], length=128)
    moments = moments_of(model, windows.texts, SITES, documents=windows.documents, shuffled=True, progress=False)
    found = transport_map(moments, ranks=(10,)).table
    rows = found.set_index(["source", "target"])
    step, leap, start = (rows.loc[pair] for pair in [tuple(SITES[1:3]), tuple(SITES[1::2]), tuple(SITES[::3])])
    for value in ("r2_vw", "ceiling", "above_edge"):
        assert step[value] > leap[value] > start[value] > 0
    assert (found["efficiency"] <= 1).all()
    assert (found["efficiency"] > 0.8).all()
    assert (found["r2_vw"] > found["identity_r2_vw"]).all()
    with_sinks = transport_map(moments, stratum="all").table.set_index(["source", "target"])
    assert with_sinks.loc[tuple(SITES[1::2]), "r2_vw"] > leap["r2_vw"] + 0.05
    null = transport_map(moments, shuffled=True).table
    assert (null["r2_vw"] < 0.05).all()
    assert (null["above_edge"] <= 2).all()
    splits, mixed = (pair_splits(moments, *SITES[1:3], shuffled=each) for each in (False, True))
    curve = transport_efficiency(splits, ranks=[8, 64]).table
    assert (curve["published_efficiency"] < 0).all()  # what the released code would say of the same map
    size = transport_subspace(splits, nulls=[mixed], draws=2)
    assert size["above_null"] > 300
    assert size.table.set_index("measure").loc["above_null", "null_mean"] < 3

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
"""What users write, for the type checker alone (`make check`): each result must be known to be of its type."""

from typing import assert_type

import torch
from torch import Tensor, nn

from microtome.capture import (
    Activations,
    Anatomy,
    LoadedModel,
    Site,
    Span,
    Tape,
    capture,
    dissect,
    load_model,
    read_features,
    taps,
)
from microtome.capture.provenance import Provenance
from microtome.data import DATA_SETS, Archive, LabelledTexts, data_status, load_data
from microtome.lenses import moments_of
from microtome.lenses.dictionaries import Dictionary, load_dictionary
from microtome.lenses.transport import (
    FeatureTransport,
    SpliceEffects,
    TransportMap,
    TransportOperator,
    feature_transport,
    splice_effects,
    transport_map,
    transport_operator,
)
from microtome.probes import Sweep, Transfer, compare_sites, sweep, transfer
from microtome.probes.target import Kind

loaded = load_model("smollm2", device="cpu", dtype=torch.float32)
assert_type(loaded, LoadedModel)
assert_type(loaded.module, nn.Module)
assert_type(loaded.provenance, Provenance)
assert_type(loaded.provenance.weight_sha256, str)
assert_type(loaded.provenance.to_dict(), dict[str, object])
assert_type(LoadedModel.from_module(nn.Linear(2, 2).eval(), name="mine"), LoadedModel)

anatomy = dissect(loaded)
assert_type(anatomy, Anatomy)
assert_type(anatomy.layers, int)

data = load_data("toy", texts=10)
assert_type(data, LabelledTexts)
assert_type(data.texts, list[str])
assert_type(data_status("toy").is_cached, bool)
assert_type(DATA_SETS["toy"].archives, tuple[Archive, ...])

site = Site.parse("z.5.3")
assert_type(site, Site)
assert_type(site.layer, int | None)

activations = capture(loaded, ["one text", "another"], ["resid_post", "z"], "last", labels={"label": [1, 0]})
assert_type(activations, Activations)
assert_type(activations["z", 5], Tensor)
assert_type(activations["z.5.3"], Tensor)
assert_type(capture(loaded, ["one text"], "resid_post.12", Span(0, 3)), Activations)


def add_nothing(value: Tensor) -> Tensor:
    return torch.zeros_like(value)


with taps(loaded, reads=["logits"], edits={"z.10.3": add_nothing}) as tape:
    assert_type(tape, Tape)
assert_type(tape["logits"], Tensor)

result = sweep(activations, "label", groups="rows", permutations=99)
assert_type(result, Sweep)
assert_type(result.kind, Kind)
assert_type(result.measure, str)
assert_type(result.decision(activations), Tensor)
assert_type(transfer(activations, "label", "domain", groups="rows"), Transfer)
compare_sites(result, [("z.5.3", "z.5.4")])
assert_type(read_features("eeg.csv", labels="state"), Activations)

moments = moments_of(loaded, ["one text", "another"], "resid")
operator = transport_operator(moments, "resid_post.3", "resid_post.9", rank=8)
assert_type(operator, TransportOperator)
assert_type(transport_map(moments), TransportMap)
assert_type(splice_effects(loaded, ["one text"], operator), SpliceEffects)
assert_type(feature_transport(loaded, ["one text"], operator, torch.zeros(2, 8)), FeatureTransport)
assert_type(load_dictionary("runs/dictionary"), Dictionary)

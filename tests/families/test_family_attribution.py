"""Attribution where the trunk itself is scaled or shifted, where MLPs are experts, and where positions are a bias."""

import numpy as np
import pytest
import torch
from tiny_families import built

from microtome.capture.dissect import dissect
from microtome.capture.padding import call_options
from microtome.capture.taps import taps
from microtome.lenses.attribution import logit_attribution
from microtome.lenses.frozen_norm import frozen_norm
from microtome.lenses.stream_terms import back_steps

TEXTS = [[5, 9, 30, 7, 11, 60, 4], [8, 3, 90], [40, 41, 42, 43, 44]]


@pytest.mark.parametrize(
    ("family", "by", "steps"),
    [
        ("doge", "token", {"scale"}),
        ("gpt_neox_japanese", "neuron", {"shift"}),
        ("zaya", "head", {"scale", "shift"}),
        ("mixtral", "token", set()),
        ("bloom", "neuron", set()),
    ],
)
def test_parts_sum_to_the_models_logit(family, by, steps):
    model = built(family)
    anatomy = dissect(model)
    assert {hop.step for block in anatomy.main for hop in block.hops} - {"add"} == steps
    found = logit_attribution(model, TEXTS, target=17, by=by, anatomy=anatomy)
    assert ("trunk shift" in set(found.table["component"])) == ("shift" in steps)
    for text, ids in enumerate(TEXTS):
        with torch.no_grad():
            logit = model(input_ids=torch.tensor([ids]), **call_options(model)).logits[0, -1, 17]
        parts = found.table.loc[found.table["text"] == text, "value"]
        assert parts.sum() == pytest.approx(float(logit), abs=1e-5 * max(1.0, float(parts.abs().sum())))


def test_what_a_layer_wrote_goes_through_the_scales_of_those_behind_it():
    """Doge multiplies its stream by a vector before each sum: the parts by hand, with its own parameters."""
    model = built("doge")
    found = logit_attribution(model, TEXTS[:1], target=17, by="layer")
    names = [f"{kind}.{layer}" for layer in range(3) for kind in ("attn_out", "mlp_out")]
    with torch.no_grad(), taps(model, ["embed", *names, "resid_post.2"]) as tape:
        model(input_ids=torch.tensor(TEXTS[:1]), **call_options(model))
    norm = frozen_norm(model.model.norm, 32)
    direction = norm.back(model.lm_head.weight[17], norm.scale(tape["resid_post.2"][0, -1]))
    expected = {}
    for layer in (2, 1, 0):
        block = model.model.layers[layer]
        expected["mlp", layer] = float(tape[f"mlp_out.{layer}"][0, -1].double() @ direction)
        direction = direction * block.post_attention_residual.detach()
        expected["attention", layer] = float(tape[f"attn_out.{layer}"][0, -1].double() @ direction)
        direction = direction * block.input_residual.detach()
    for (component, layer), value in expected.items():
        part = found.table.query("component == @component and layer == @layer")["value"].item()
        assert part == pytest.approx(value, rel=1e-5, abs=1e-6), (component, layer)
    embed = found.table.query("component == 'embed'")["value"].item()
    assert embed == pytest.approx(float(tape["embed"][0, -1].double() @ direction), rel=1e-5, abs=1e-6)


def test_shifts_of_the_trunk_are_parts_of_their_layer():
    """GPT-NeoX-Japanese adds attention's bias of a layer to the stream itself."""
    model = built("gpt_neox_japanese")
    anatomy = dissect(model)
    found = logit_attribution(model, TEXTS[:1], target=17, by="layer", anatomy=anatomy)
    with torch.no_grad(), taps(model, "resid_post.2", anatomy=anatomy) as tape:
        model(input_ids=torch.tensor(TEXTS[:1]), **call_options(model))
    norm = frozen_norm(model.gpt_neox_japanese.final_layer_norm, 32)
    direction = norm.back(model.embed_out.weight[17], norm.scale(tape["resid_post.2"][0, -1]))
    steps = [step for step in back_steps(model, anatomy) if step.is_shift]
    shifts = found.table[found.table["component"] == "trunk shift"]
    assert shifts["layer"].tolist() == [step.layer for step in steps]
    biases = [model.gpt_neox_japanese.layers[layer].attention.dense_bias for layer in shifts["layer"]]
    expected = [float(bias.detach().double() @ direction) for bias in biases]
    np.testing.assert_allclose(shifts["value"], expected, rtol=1e-5, atol=1e-6)


def test_experts_have_no_neurons_and_bloom_no_pattern():
    with pytest.raises(KeyError, match=r"mlp_act.\d is not available .* as experts do"):
        logit_attribution(built("mixtral"), TEXTS, by="neuron")
    with pytest.raises(KeyError, match=r"pattern.\d is not available .* does not go through"):
        logit_attribution(built("bloom"), TEXTS, by="token")

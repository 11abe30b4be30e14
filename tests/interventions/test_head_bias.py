"""Head shifts through the output projection: edit at the heads, constant behind it, and bias are one function."""

import pytest
import torch
from steering_steps import noise

from microtome.interventions.artefact import Artefact, made_on
from microtome.interventions.head_bias import bias_form, biased_copy
from microtome.interventions.steering import steered

IDS = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]])
SITES = ("z.0.1", "z.2.0", "z.0.3")


def shifts(model, sites=SITES) -> Artefact:
    vectors = noise(len(sites), 8)
    return Artefact("add", sites, {"vector": vectors}, method="ITI", positions="all", facts=made_on(model))


@torch.no_grad()
def logits(model, steering=None):
    if steering is None:
        return model.module(input_ids=IDS).logits
    with steered(model, steering):
        return model.module(input_ids=IDS).logits


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "neox", "neox_sequential"])
def test_edit_constant_and_bias_are_one_function(loaded, kind):
    model = loaded(kind)
    heads = shifts(model)
    at_heads = logits(model, heads.steering(model, strength=1.5))
    constant = logits(model, bias_form(model, heads, 1.5).steering(model))
    written = logits(biased_copy(model, heads, 1.5))
    clean = logits(model)
    assert (at_heads - clean).abs().max() > 1e-2
    assert torch.allclose(constant, at_heads, atol=1e-5, rtol=1e-5)
    assert torch.allclose(written, at_heads, atol=1e-5, rtol=1e-5)


def test_the_constant_is_the_sum_over_heads_through_their_weights(llama):
    heads = shifts(llama)
    found = bias_form(llama, heads, 2.0)
    assert found.sites == ("attn_out.0", "attn_out.2")
    for layer, members in ((0, (0, 2)), (2, (1,))):
        weight = llama.module.model.layers[layer].self_attn.o_proj.weight.detach()
        wanted = torch.zeros(32)
        for number in members:
            head = int(SITES[number].split(".")[-1])
            wanted += 2.0 * weight[:, 8 * head : 8 * head + 8] @ heads.tensors["vector"][number]
        assert torch.allclose(found.vector(f"attn_out.{layer}"), wanted, atol=1e-6)


def test_the_copy_leaves_the_model_alone_and_adds_to_a_bias(gpt2, llama):
    for model, projection in (
        (gpt2, lambda m: m.module.transformer.h[0].attn.c_proj),
        (llama, lambda m: m.module.model.layers[0].self_attn.o_proj),
    ):
        before = logits(model)
        bias = projection(model).bias
        held = 0 if bias is None else bias.detach().clone()
        copied = biased_copy(model, shifts(model))
        assert torch.equal(logits(model), before)
        added = projection(copied).bias.detach() - held
        assert torch.allclose(added, bias_form(model, shifts(model)).vector("attn_out.0"), atol=1e-6)
        with pytest.raises(ValueError, match="was made for weights"):
            shifts(model).steering(copied)


def test_a_norm_behind_the_projection_changes_the_answer(loaded):
    """Where attention's output is normed before it is added, a constant behind the norm is another function; a bias in
    the projection, before the norm, is the same."""
    model = loaded("gemma2")
    heads = shifts(model)
    at_heads = logits(model, heads.steering(model))
    assert torch.allclose(logits(biased_copy(model, heads)), at_heads, atol=1e-4)
    with pytest.raises(ValueError, match="norm"):
        bias_form(model, heads)


def test_generated_heads_are_not_the_bias(llama):
    """The bias acts on the prompt too."""
    heads = shifts(llama)
    late = logits(llama, heads.steering(llama, positions="generated"))
    assert not torch.allclose(late[:, -1], logits(biased_copy(llama, heads))[:, -1], atol=1e-3)


def test_other_artefacts_are_refused(llama, loaded):
    for site in ("resid_post.1", "z.1"):
        with pytest.raises(ValueError, match="added to heads"):
            bias_form(llama, Artefact("add", (site,), {"vector": noise(1, 32)}))
    with pytest.raises(ValueError, match="added to heads"):
        bias_form(llama, Artefact("project", ("z.1.1",), {"basis": noise(1, 8)}))
    with pytest.raises(ValueError, match="no constant"):
        bias_form(llama, Artefact("add", ("z.1.1",), {"vector": noise(1, 8)}, {"relative": True}))
    for form in (bias_form, biased_copy):
        with pytest.raises(ValueError, match="was made for weights"):
            form(loaded("llama", 1), shifts(llama))

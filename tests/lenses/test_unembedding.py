"""Identities of the unembedding on every tiny model: it is the model's own end, to the bit or to rounding."""

import pytest
import torch

from microtome.capture.taps import taps
from microtome.lenses.unembedding import unembedding_of

CAUSAL = ["llama", "gpt2", "neox", "neox_sequential", "gemma2", "qwen3"]
IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


@pytest.mark.parametrize("kind", CAUSAL)
def test_the_last_stream_gives_the_models_logits(tiny, kind):
    model = tiny(kind)
    with torch.no_grad(), taps(model, ["resid_post.2"]) as tape:
        logits = model(IDS).logits
        torch.testing.assert_close(unembedding_of(model).logits(tape["resid_post.2"]), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", CAUSAL)
def test_it_is_no_copy_of_the_weights(tiny, kind):
    model = tiny(kind)
    assert unembedding_of(model).weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()


def test_a_soft_cap_and_a_bias_are_part_of_it(tiny):
    assert unembedding_of(tiny("gemma2")).cap == pytest.approx(30.0)
    model = tiny("llama")
    head = model.lm_head = torch.nn.Linear(32, 120)
    with torch.no_grad():
        logits = model(IDS).logits
        found = unembedding_of(model)
        assert torch.equal(found.bias, head.bias)
        with taps(model, ["resid_post.2"]) as tape:
            model(IDS)
        torch.testing.assert_close(found.logits(tape["resid_post.2"]), logits)


def test_the_norm_is_called_without_its_hooks(tiny):
    model = tiny("llama")
    found = unembedding_of(model)
    with taps(model, ["final_norm"]) as tape:
        model(IDS)
        found.normed(torch.ones(2, 32))
    assert tape.all("final_norm")[0].shape == (1, 6, 32)
    assert len(tape.all("final_norm")) == 1


@pytest.mark.parametrize("kind", ["bert", "bert_masked_lm"])
def test_models_without_a_linear_end_are_refused(tiny, kind):
    with pytest.raises(ValueError, match="lens needs a language model"):
        unembedding_of(tiny(kind))

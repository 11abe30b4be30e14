"""The logit lens of TransformerLens 4.3, run on a copy that it rewrites, says what ours says of the model itself."""

import copy

import numpy as np
import pytest
import torch
from microtome.lenses.logit_lens import logit_lens

TEXT = [5, 6, 7, 8, 9, 10, 11]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_transformer_lens_says_the_same(kind, tiny, word_tokenizer, tmp_path):
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.tools.analysis import logit_lens as of_transformer_lens
    from transformers import AutoTokenizer

    model = tiny(kind)
    ours = logit_lens(model, [TEXT])
    word_tokenizer.save_pretrained(tmp_path)  # it reads the tokenizer from where its name says
    model.config.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    bridge = TransformerBridge.boot_transformers(
        str(tmp_path), hf_model=copy.deepcopy(model), tokenizer=tokenizer
    )
    theirs = of_transformer_lens(bridge, torch.tensor([TEXT]), positions=None)
    log_probs = theirs.logits.detach()[:, 0].log_softmax(-1)
    assert log_probs.shape == (4, 7, 120)
    probs, ids = log_probs.exp().topk(5)
    np.testing.assert_allclose(ours.top_probs, probs.numpy(), rtol=2e-3)
    assert (ours.top_ids[..., 0] == ids[..., 0].numpy()).all()
    kl = (log_probs[-1].exp() * (log_probs[-1] - log_probs)).sum(-1)
    np.testing.assert_allclose(ours.kl, kl.numpy(), atol=1e-4)

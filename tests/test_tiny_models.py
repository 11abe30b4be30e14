"""The tiny models of docs/tiny_models.py: what training leaves is decided by the seed."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).parents[1] / "docs" / "tiny_models.py"


@pytest.fixture(scope="module")
def tiny_models():
    spec = importlib.util.spec_from_file_location("tiny_models", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny_models"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["tiny_models"]


def test_training_is_decided_by_the_seed_and_learns(tiny_models):
    stream = torch.arange(40).repeat(100)  # each token is followed by the next number

    def trained(seed: int):
        module = tiny_models.tiny_llama(2, 16, seed)
        losses = tiny_models.train(module, stream, seed, 40)
        assert not module.training
        assert losses[-1] < losses[0] - 1
        return module.state_dict()

    one, same, other = trained(0), trained(0), trained(1)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert tiny_models.tiny_llama(4, 64, 0).config.num_hidden_layers == 4


def test_a_model_is_trained_once(tiny_models, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_models, "_documents", lambda: ["the cat sat on the mat " * 60] * 4)
    tiny_models.token_stream.cache_clear()
    made = tiny_models.train_tiny(1, 0, 3, width=16, folder=tmp_path, progress=False)
    monkeypatch.setattr(tiny_models, "train", None)
    again = tiny_models.train_tiny(1, 0, 3, width=16, folder=tmp_path, progress=False)
    tiny_models.token_stream.cache_clear()
    assert again.provenance.weight_sha256 == made.provenance.weight_sha256
    assert made.tokenizer.decode(made.tokenizer("the cat")["input_ids"]) == "the cat"
    assert made.tokenizer.pad_token_id == made.module.config.pad_token_id == 0

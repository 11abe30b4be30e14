"""How long a text may be, which ids exist, what to pad with."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModel, BertConfig, OPTConfig, RobertaConfig, T5Config, ViTConfig

from microtome.capture.limits import length_limit, pad_id, vocabulary_size

SHAPE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}


def roberta(padding: int) -> nn.Module:
    return AutoModel.from_config(
        RobertaConfig(**SHAPE, vocab_size=40, max_position_embeddings=20, pad_token_id=padding)
    )


@pytest.mark.parametrize("padding", [1, 3])
def test_limit_is_where_roberta_breaks(padding):
    model = roberta(padding).eval()
    limit = length_limit(model, None)
    assert limit == 20 - padding - 1
    model(input_ids=torch.full((1, limit), 7))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, limit + 1), 7))


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_limit_is_where_learned_positions_end(tiny, kind):
    model = tiny(kind)
    assert length_limit(model, None) == 64
    model(input_ids=torch.full((1, 64), 7))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, 65), 7))


def test_a_table_with_spare_rows_keeps_its_stated_limit():
    config = OPTConfig(hidden_size=32, num_hidden_layers=1, ffn_dim=32, num_attention_heads=4, vocab_size=40,
                       max_position_embeddings=20, word_embed_proj_dim=32)  # fmt: skip
    assert length_limit(AutoModel.from_config(config), None) == 20


def test_word_table_of_the_same_size_is_not_taken_for_positions():
    config = BertConfig(**SHAPE, vocab_size=20, max_position_embeddings=20, pad_token_id=1)
    model = AutoModel.from_config(config)
    assert model.get_input_embeddings().padding_idx == 1
    assert length_limit(model, None) == 20


def test_relative_positions_have_no_limit_and_then_the_tokenizer_decides():
    model = AutoModel.from_config(T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, vocab_size=40))
    assert length_limit(model, None) is None
    assert length_limit(model, SimpleNamespace(model_max_length=30)) == 30
    assert length_limit(model, SimpleNamespace(model_max_length=int(1e30))) is None
    assert length_limit(None, SimpleNamespace(model_max_length=30)) == 30


def test_vocabulary(tiny):
    assert vocabulary_size(tiny("llama")) == 120
    assert vocabulary_size(None) is None
    assert vocabulary_size(nn.Linear(2, 2)) is None
    vision = AutoModel.from_config(ViTConfig(**SHAPE, image_size=8, patch_size=4))
    assert vocabulary_size(vision) is None


def test_pad_id_is_one_the_vocabulary_holds(tiny, word_tokenizer):
    model = tiny("llama")
    assert pad_id(model, word_tokenizer) == word_tokenizer.pad_token_id
    assert pad_id(roberta(3), None) == 3
    assert pad_id(model, SimpleNamespace(pad_token_id=120)) == model.config.pad_token_id
    assert pad_id(None, SimpleNamespace(pad_token_id=None)) == 0

import json

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    LlamaConfig,
    T5Config,
    ViTConfig,
    WhisperConfig,
)
from transformers.utils import logging as transformers_logging

from microtome.capture.checkpoints import (
    auto_class,
    load_module,
    load_tokenizer,
    weight_files,
    without_progress_bars,
)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(architectures=["LlamaForCausalLM"]), AutoModelForCausalLM),
        (LlamaConfig(architectures=["LlamaModel"]), AutoModel),
        (LlamaConfig(architectures=["LlamaForSequenceClassification"]), AutoModel),
        (LlamaConfig(), AutoModelForCausalLM),
        (BertConfig(architectures=["BertLMHeadModel"]), AutoModelForCausalLM),
        (BertConfig(architectures=["BertForMaskedLM"]), AutoModel),
        (BertConfig(), AutoModel),
        (ViTConfig(), AutoModel),
        (T5Config(architectures=["T5ForConditionalGeneration"]), AutoModel),
        (WhisperConfig(architectures=["WhisperForConditionalGeneration"]), AutoModel),
    ],
    ids=lambda value: f"{value.model_type}-{value.architectures}" if hasattr(value, "model_type") else "",
)
def test_the_class_follows_the_checkpoint(config, expected):
    assert auto_class(config) is expected


@pytest.mark.parametrize("kind", ["llama", "gpt2", "neox", "gemma2", "qwen3", "bert"])
def test_a_saved_model_loads_as_it_was(tiny, tmp_path, kind, network_attempts):
    model = tiny(kind)
    model.save_pretrained(tmp_path)
    module, untrained = load_module(tmp_path, dtype=torch.float32)
    assert type(module) is type(model)
    assert not module.training
    assert untrained == ()
    assert not network_attempts
    expected = model.state_dict()
    assert module.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())


def test_shards_load_like_one_file(tiny, tmp_path):
    model = tiny("llama")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    files = weight_files(tmp_path)
    assert len(files) > 1
    module, _ = load_module(tmp_path, dtype=torch.float32)
    assert torch.equal(module.lm_head.weight, model.lm_head.weight)
    files[0].unlink()
    with pytest.raises(ValueError, match=rf"lacks 1 of {len(files)} weight shards, e.g. {files[0].name}"):
        weight_files(tmp_path)


def test_parameters_the_checkpoint_lacks(tiny, tmp_path):
    state = torch.random.get_rng_state()
    tiny("bert_masked_lm").save_pretrained(tmp_path / "encoder")  # as many published encoders: no pooling head
    with pytest.warns(UserWarning, match=r"lacks 2 parameters of BertModel, e.g. 'pooler.dense.bias'.*at random"):
        module, untrained = load_module(tmp_path / "encoder", dtype=torch.float32)
    assert untrained == ("pooler.dense.bias", "pooler.dense.weight")
    assert type(module).__name__ == "BertModel"
    assert torch.equal(torch.random.get_rng_state(), state)

    tiny("llama").model.save_pretrained(tmp_path / "headless")
    config = json.loads((tmp_path / "headless" / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    (tmp_path / "headless" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"lacks 1 parameters of LlamaForCausalLM, e.g. 'lm_head.weight'"):
        load_module(tmp_path / "headless", dtype=torch.float32)


def test_folders_that_hold_no_model(tmp_path):
    (tmp_path / "readme.txt").touch()
    with pytest.raises(ValueError, match=r"no config.json.*save_pretrained.*has \['readme.txt'\]"):
        load_module(tmp_path, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"holds no weights: expected one of model.safetensors, .*'readme.txt'"):
        weight_files(tmp_path)
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(ValueError, match=r"PEFT adapter.*merge_and_unload"):
        weight_files(tmp_path)


def test_progress_bars_are_silent_inside_and_as_before_after(capsys):
    def hook(factory, args, kwargs):
        return factory(*args, **kwargs)

    outer = transformers_logging.set_tqdm_hook(hook)
    try:
        with without_progress_bars():
            assert list(transformers_logging.tqdm(range(3), desc="Loading")) == [0, 1, 2]
        with pytest.raises(RuntimeError, match="inside"), without_progress_bars():
            raise RuntimeError("inside")
        assert transformers_logging.set_tqdm_hook(outer) is hook
        assert capsys.readouterr().err == ""
    finally:
        transformers_logging.set_tqdm_hook(outer)


def test_tokenizers_present_absent_and_broken(tiny, word_tokenizer, tmp_path, network_attempts):
    tiny("llama").save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path) == f"{tmp_path} has no tokenizer files"
    word_tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).encode("the cat .") == word_tokenizer.encode("the cat .")
    assert not network_attempts
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert f"the tokenizer files in {tmp_path} do not load" in load_tokenizer(tmp_path)

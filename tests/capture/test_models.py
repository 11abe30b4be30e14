import json

import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration, ViTConfig, ViTModel, Wav2Vec2Config, Wav2Vec2Model

from microtome.capture.hashes import state_dict_sha256, tokenizer_sha256
from microtome.capture.models import LoadedModel, load_model

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
OTHER_KINDS = {
    "vision": lambda: ViTModel(ViTConfig(**SMALL, image_size=16, patch_size=8)),
    "audio": lambda: Wav2Vec2Model(
        Wav2Vec2Config(
            **SMALL, conv_dim=(32, 32), conv_stride=(2, 2), conv_kernel=(3, 3), num_conv_pos_embedding_groups=2
        )
    ),
    "encoder-decoder": lambda: T5ForConditionalGeneration(
        T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=120)
    ),
}


@pytest.fixture
def folder(tiny, word_tokenizer, tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    word_tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_module_tokenizer_and_provenance(folder, tiny, word_tokenizer, cache, network_attempts):
    loaded = load_model(str(folder))
    expected = tiny("llama").state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.module.state_dict().items())
    assert not loaded.module.training
    assert loaded.require_tokenizer().encode("the cat .") == word_tokenizer.encode("the cat .")
    assert loaded.no_tokenizer is None
    known = loaded.provenance.to_dict()
    assert known["name"] == known["location"] == str(folder)
    assert known["source"] == "folder"
    assert known["architectures"] == [known["model_class"]] == ["LlamaForCausalLM"]
    assert (known["dtype"], known["device"], known["attention"]) == ("float32", "cpu", "sdpa")
    assert known["tokenizer_sha256"] == tokenizer_sha256(word_tokenizer)
    assert known["bos_policy"] == "adds nothing"
    assert known["quantisation"] is known["revision"] is known["package"] is known["chat_template_sha256"] is None
    assert known["torch_version"] == torch.__version__
    assert json.loads(json.dumps(known)) == known
    assert not network_attempts


def test_the_weight_hash_is_that_of_the_weights_loaded(folder, tiny, cache):
    first = load_model(folder).provenance
    assert first.weight_sha256 == load_model(folder).provenance.weight_sha256
    late = load_model(folder).provenance
    tiny("llama", seed=1).save_pretrained(folder)
    assert load_model(folder).provenance.weight_sha256 != first.weight_sha256
    with pytest.raises(ValueError, match=r"changed or went away"):
        _ = late.weight_sha256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_is_the_one_asked_for_whatever_was_stored(tiny, tmp_path, cache, dtype):
    tiny("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {dtype}
    assert f"torch.{loaded.provenance.dtype}" == str(dtype)
    assert load_model(tmp_path).provenance.dtype == "float32"


def test_dtypes_and_devices_that_cannot_be():
    with pytest.raises(TypeError, match=r"torch\.int64 is not a floating point type"):
        load_model("smollm2", dtype=torch.int64)
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match=r"device='cuda:1', but torch .* sees no GPU\. Use device='cpu'"):
        load_model("smollm2", device="cuda:1")


def test_a_gguf_file_says_so(tiny, tiny_gguf, cache, tmp_path, network_attempts):
    path = tiny_gguf(tmp_path)
    loaded = load_model(path, dtype=torch.bfloat16)
    assert loaded.provenance.source == "gguf"
    assert loaded.provenance.quantisation.startswith("not quantised: tensors in tiny.gguf are 30 x F32")
    assert loaded.provenance.quantisation.endswith("; cast to bfloat16")
    assert loaded.provenance.source_sha256 != loaded.provenance.weight_sha256
    assert loaded.provenance.weight_files[0].path.startswith(str(cache))
    assert loaded.require_tokenizer().decode(loaded.tokenizer.encode("a thing")) == "a thing"
    assert not network_attempts


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_models_of_other_kinds_load_as_base_models_without_tokenizer(tmp_path, cache, network_attempts, kind):
    model = OTHER_KINDS[kind]()
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.provenance.model_class.endswith("Model")
    assert loaded.tokenizer is None
    assert loaded.provenance.bos_policy == "no tokenizer"
    assert loaded.provenance.tokenizer_sha256 is None
    with pytest.raises(
        ValueError, match=r"has no tokenizer \(.* has no tokenizer files\).*Pass token ids or ready model"
    ):
        loaded.require_tokenizer()
    assert not network_attempts


def test_chat_template_and_special_tokens_are_recorded(tiny, word_tokenizer, tmp_path, cache):
    tiny("llama").save_pretrained(tmp_path)
    word_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    first = load_model(tmp_path).provenance
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }} .")
    second = load_model(tmp_path).provenance
    assert first.chat_template_sha256 != second.chat_template_sha256
    assert first.tokenizer_sha256 == second.tokenizer_sha256
    assert len(first.chat_template_sha256) == 64


def test_loading_prints_nothing(folder, cache, capfd):
    load_model(folder).provenance.to_dict()
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_a_model_in_hand_is_wrapped_as_it_is(tiny, word_tokenizer):
    module = tiny("gpt2")
    loaded = LoadedModel.from_module(module, word_tokenizer, name="mine")
    assert loaded.module is module
    assert loaded.tokenizer is word_tokenizer
    assert loaded.provenance.weight_sha256 == state_dict_sha256(module)
    assert loaded.provenance.weight_hash_of == "state_dict"
    assert (loaded.provenance.name, loaded.provenance.source, loaded.provenance.location) == ("mine", "module", "")
    assert LoadedModel.from_module(tiny("gpt2", seed=1), name="mine").provenance != loaded.provenance


def test_a_plain_module_is_wrapped_too():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64)).eval()
    provenance = LoadedModel.from_module(module, name="plain").provenance
    assert (provenance.model_class, provenance.attention, provenance.architectures) == ("Sequential", None, ())
    assert provenance.dtype == "float32+float64"


def test_wrapping_refuses_training_mode_and_missing_data(tiny):
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel is in training mode\. Call module\.eval\(\) first"):
        LoadedModel.from_module(tiny("gpt2").train(), name="mine")
    with torch.device("meta"):
        empty = nn.Linear(2, 2).eval()
    with pytest.raises(ValueError, match=r"2 tensors hold no data"):
        LoadedModel.from_module(empty, name="mine")
    with pytest.raises(ValueError, match=r"'mine' has no tokenizer \(none was given\)"):
        LoadedModel.from_module(tiny("gpt2"), name="mine").require_tokenizer()

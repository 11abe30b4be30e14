import copy
import hashlib
import json
from dataclasses import FrozenInstanceError, replace

import pytest
from tokenizers.processors import TemplateProcessing

from microtome.capture.hashes import FileStamp
from microtome.capture.provenance import Provenance, special_tokens_around

PLAIN = Provenance(
    name="mine",
    source="folder",
    location="/models/mine",
    package=None,
    revision=None,
    architectures=("LlamaForCausalLM",),
    model_class="LlamaForCausalLM",
    untrained=(),
    weight_files=(),
    state_sha256="5" * 64,
    source_sha256=None,
    quantisation=None,
    dtype="float32",
    device="cpu",
    attention="sdpa",
    tokenizer_class="PreTrainedTokenizerFast",
    tokenizer_sha256="7" * 64,
    chat_template_sha256=None,
    special_before=(),
    special_after=(),
    transformers_version="5.24.0",
    torch_version="2.13.0",
)


def with_template(tokenizer, template):
    marked = copy.deepcopy(tokenizer)
    marked.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return marked


@pytest.mark.parametrize(
    ("template", "before", "after", "policy"),
    [
        ("$A", (), (), "adds nothing"),
        ("<s> $A", ("<s>",), (), "adds <s> before"),
        ("$A </s>", (), ("</s>",), "adds </s> after"),
        ("<s> $A </s>", ("<s>",), ("</s>",), "adds <s> before and </s> after"),
        ("<s> <s> $A", ("<s>", "<s>"), (), "adds <s> <s> before"),
    ],
)
def test_special_tokens_are_found_by_tokenizing(word_tokenizer, template, before, after, policy):
    assert special_tokens_around(with_template(word_tokenizer, template)) == (before, after)
    assert replace(PLAIN, special_before=before, special_after=after).bos_policy == policy


def test_a_tokenizer_that_changes_the_text_itself_is_refused(word_tokenizer):
    class Fickle:
        def encode(self, text, add_special_tokens):
            return [5, 6] if add_special_tokens else [7]

    with pytest.raises(ValueError, match=r"Fickle turns 'a' into \[5, 6\] with special tokens and \[7\] without"):
        special_tokens_around.__wrapped__(Fickle())  # past the run-time type check


def test_no_tokenizer_is_no_policy():
    assert replace(PLAIN, tokenizer_class=None, tokenizer_sha256=None).bos_policy == "no tokenizer"


def test_one_file_s_hash_is_that_of_its_bytes_and_several_that_of_sha256sum_s_lines(cache, tmp_path):
    shards = [tmp_path / "model-2.safetensors", tmp_path / "model-1.safetensors"]
    for shard in shards:
        shard.write_bytes(shard.name.encode())
    single, double = (
        replace(PLAIN, state_sha256=None, weight_files=tuple(FileStamp.of(shard) for shard in shards[:count]))
        for count in (1, 2)
    )
    digests = [hashlib.sha256(shard.name.encode()).hexdigest() for shard in shards]
    lines = f"{digests[1]}  model-1.safetensors\n{digests[0]}  model-2.safetensors\n"
    assert (single.weight_sha256, single.weight_hash_of) == (digests[0], "file")
    assert (double.weight_sha256, double.weight_hash_of) == (hashlib.sha256(lines.encode()).hexdigest(), "files")
    assert (PLAIN.weight_sha256, PLAIN.weight_hash_of) == ("5" * 64, "state_dict")


def test_the_hash_of_changed_weights_is_refused_not_reported(cache, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"loaded")
    provenance = replace(PLAIN, state_sha256=None, weight_files=(FileStamp.of(file),))
    file.write_bytes(b"trained on since")
    with pytest.raises(ValueError, match=r"model\.safetensors changed or went away"):
        provenance.to_dict()


def test_it_is_frozen_and_survives_json():
    with pytest.raises(FrozenInstanceError):
        PLAIN.name = "yours"
    plain = PLAIN.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["architectures"] == ["LlamaForCausalLM"]
    assert plain["bos_policy"] == "adds nothing"

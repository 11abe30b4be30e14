import hashlib
import json
import os

import pytest
import torch
from torch import nn

from microtome.capture import hashes
from microtome.capture.hashes import FileStamp, recorded_sha256, state_dict_sha256, tokenizer_sha256


def test_recorded_hash_is_the_file_s_and_is_computed_once(cache, tmp_path, monkeypatch):
    file = tmp_path / "weights.bin"
    file.write_bytes(b"weights")
    assert recorded_sha256(file) == hashlib.sha256(b"weights").hexdigest()
    monkeypatch.setattr(hashes, "file_sha256", lambda _: pytest.fail("the file was read again"))
    assert recorded_sha256(file) == hashlib.sha256(b"weights").hexdigest()


@pytest.mark.parametrize("content", [b"WEIGHTS", b"weights and more"], ids=["same size", "other size"])
def test_a_changed_file_is_hashed_anew(cache, tmp_path, content):
    file = tmp_path / "weights.bin"
    file.write_bytes(b"weights")
    recorded_sha256(file)
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))
    assert recorded_sha256(file) == hashlib.sha256(content).hexdigest()


def test_a_file_that_changes_while_it_is_read_is_refused(cache, tmp_path, monkeypatch):
    file = tmp_path / "weights.bin"
    file.write_bytes(b"weights")

    def slow_hash(path):
        path.write_bytes(b"others")
        return "0" * 64

    monkeypatch.setattr(hashes, "file_sha256", slow_hash)
    with pytest.raises(ValueError, match="changed while it was read"):
        recorded_sha256(file)
    assert not list(cache.glob("hashes/*"))


def test_a_stamp_refuses_to_hash_another_file(cache, tmp_path):
    file = tmp_path / "weights.bin"
    file.write_bytes(b"weights")
    stamp = FileStamp.of(file)
    assert stamp.sha256() == hashlib.sha256(b"weights").hexdigest()
    file.write_bytes(b"other weights")
    with pytest.raises(ValueError, match=r"changed or went away .* \(it had 7 bytes\).*Load the model again"):
        stamp.sha256()
    file.unlink()
    with pytest.raises(ValueError, match="changed or went away"):
        stamp.sha256()


def test_state_dict_hash_follows_every_value_and_nothing_else():
    def linear(seed):
        generator = torch.Generator().manual_seed(seed)
        module = nn.Linear(3, 2)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        return module

    module = linear(0)
    digest = state_dict_sha256(module)
    assert digest == state_dict_sha256(linear(0)) == state_dict_sha256(module.train())
    assert digest != state_dict_sha256(linear(1))
    with torch.no_grad():
        module.bias[1] = torch.nextafter(module.bias[1], torch.tensor(9.0))
    assert digest != state_dict_sha256(module)


def test_state_dict_hash_tells_equal_bytes_of_other_dtypes_and_shapes_apart():
    modules = [
        nn.Linear(2, 2, bias=False, dtype=torch.bfloat16),
        nn.Linear(2, 2, bias=False, dtype=torch.float16),
        nn.Linear(4, 1, bias=False, dtype=torch.float16),
        nn.Linear(2, 1, bias=False, dtype=torch.float32),
    ]
    for module in modules:
        nn.init.zeros_(module.weight)
    assert len({state_dict_sha256(module) for module in modules}) == 4


def test_state_dict_hash_takes_scalars_and_views():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.turned = nn.Parameter(torch.arange(6.0).reshape(2, 3).T)

    assert len(state_dict_sha256(Odd())) == 64


def test_state_dict_hash_refuses_tensors_without_data():
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"2 tensors hold no data, e.g. 'weight'.*one device"):
        state_dict_sha256(module)


def test_tokenizer_hash_ignores_the_last_call_s_padding(word_tokenizer):
    before = tokenizer_sha256(word_tokenizer)
    word_tokenizer(["the cat", "a dog ran ."], padding="max_length", truncation=True, max_length=3)
    assert json.loads(word_tokenizer.backend_tokenizer.to_str())["padding"] is not None
    assert tokenizer_sha256(word_tokenizer) == before


def test_tokenizer_hash_tells_vocabularies_and_special_tokens_apart(word_tokenizer):
    import copy

    before = tokenizer_sha256(word_tokenizer)
    other = copy.deepcopy(word_tokenizer)
    other.add_tokens(["zebra"])
    assert tokenizer_sha256(other) != before
    marked = copy.deepcopy(word_tokenizer)
    marked.eos_token = "<s>"
    assert tokenizer_sha256(marked) != before

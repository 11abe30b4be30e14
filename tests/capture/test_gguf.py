import json
import os
import signal
import subprocess
import sys

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, modeling_gguf_pytorch_utils

from microtome.capture import gguf as converter
from microtome.capture.checkpoints import load_module
from microtome.capture.gguf import converted_copy, quantisation_history, read_header

IDS = torch.arange(3, 21).reshape(2, 9)


def logits(module):
    with torch.no_grad():
        return module(IDS).logits


def test_header_agrees_with_the_gguf_package(tiny_gguf, tmp_path):
    path = tiny_gguf(tmp_path, weight_type="F16")
    reader = gguf.GGUFReader(path)
    header = read_header(path)
    assert header.keys == {name for name in reader.fields if not name.startswith("GGUF.")}
    types = [tensor.tensor_type.name for tensor in reader.tensors]
    assert header.tensor_types == {"F16": types.count("F16"), "F32": types.count("F32")}
    assert len(types) == 30


def test_headers_that_cannot_be_read(tiny_gguf, tmp_path):
    path = tiny_gguf(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:200])
    with pytest.raises(ValueError, match=r"ends inside its header.*Fetch it again"):
        read_header(path)
    path.write_bytes(whole[:4] + b"\x01" + whole[5:])
    with pytest.raises(ValueError, match="GGUF version 1; versions 2 and 3 are read"):
        read_header(path)
    path.write_bytes(b"<html>")
    with pytest.raises(ValueError, match="does not begin with 'GGUF'"):
        read_header(path)


def test_the_copy_is_the_model_that_was_written(tiny, tiny_gguf, cache, tmp_path, network_attempts):
    model = tiny("llama")
    path = tiny_gguf(tmp_path, model)
    copy = converted_copy(path)
    module, _ = load_module(copy.folder, dtype=torch.float32)
    assert torch.equal(logits(module), logits(model))
    assert not hasattr(module.config, "quantization_config")
    assert copy.quantisation.startswith("not quantised: tensors in tiny.gguf are 30 x F32")
    assert not network_attempts


@pytest.mark.parametrize("weight_type", ["Q8_0", "Q4_1"])
def test_the_copy_of_quantised_weights_is_bit_equal_to_loading_the_file(tiny_gguf, cache, tmp_path, weight_type):
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=120,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).eval()
    path = tiny_gguf(tmp_path, model, weight_type)
    copy = converted_copy(path)
    module, _ = load_module(copy.folder, dtype=torch.float32)
    direct = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    assert torch.equal(logits(module), logits(direct))
    assert not torch.equal(logits(module), logits(model))
    assert f"16 x {weight_type}, 5 x F32, dequantised to float32 by transformers" in copy.quantisation
    assert "differ from the checkpoint" in copy.quantisation


def test_a_second_call_converts_nothing_and_copies_the_key_is_the_content(
    tiny, tiny_gguf, cache, tmp_path, monkeypatch
):
    first = converted_copy(tiny_gguf(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    moved = tiny_gguf(tmp_path / "elsewhere")
    (tmp_path / "other").mkdir()
    other = tiny_gguf(tmp_path / "other", tiny("llama", seed=1))
    assert converted_copy(other).folder != first.folder
    monkeypatch.setattr(converter, "_convert", lambda *_, **__: pytest.fail("converted again"))
    assert converted_copy(moved) == first


def test_a_damaged_copy_is_made_anew_and_a_touched_one_kept(tiny_gguf, cache, tmp_path):
    path = tiny_gguf(tmp_path)
    folder = converted_copy(path).folder
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    inode = weights.stat().st_ino
    os.utime(weights, ns=(1, 1))
    assert converted_copy(path).folder == folder
    assert weights.stat().st_ino == inode

    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # as large as before
    with pytest.warns(UserWarning, match="does not match its record and is made anew"):
        converted_copy(path)
    assert weights.read_bytes() == whole
    (folder / "config.json").unlink()
    with pytest.warns(UserWarning, match="made anew"):
        converted_copy(path)
    (folder / "conversion.json").unlink()
    with pytest.warns(UserWarning, match="made anew"):
        converted_copy(path)
    assert (folder / "config.json").exists()


def test_a_file_without_tokenizer_gives_a_copy_without(tiny_gguf, cache, tmp_path, monkeypatch):
    path = tiny_gguf(tmp_path)
    header = read_header(path)
    without = converter.Header(header.keys - {"tokenizer.ggml.tokens"}, header.tensor_types)
    monkeypatch.setattr(converter, "read_header", lambda _: without)
    assert not list(converted_copy(path).folder.glob("*token*"))


def test_nothing_global_is_left_changed(tiny_gguf, cache, tmp_path, capfd):
    bar = modeling_gguf_pytorch_utils.tqdm
    state = torch.random.get_rng_state()
    converted_copy(tiny_gguf(tmp_path))
    assert modeling_gguf_pytorch_utils.tqdm is bar
    assert torch.equal(torch.random.get_rng_state(), state)
    shown = capfd.readouterr().err
    assert "Converting tiny.gguf once" in shown
    assert "quantizing" not in shown
    assert "Loading weights" not in shown


def test_history_names_what_was_done():
    lossy = quantisation_history("a.gguf", {"Q4_1": 3, "F32": 1}, "transformers 5")
    assert lossy == (
        "tensors in a.gguf are 3 x Q4_1, 1 x F32, dequantised to float32 by transformers 5; these weights differ from "
        "the checkpoint that the file was made from"
    )
    assert quantisation_history("a.gguf", {"BF16": 3, "F32": 1}, "t").startswith("not quantised: ")


CHILD = """
import sys, time
from pathlib import Path
from microtome.capture import gguf
if sys.argv[2] == "stop half-way":
    def stop(*_, **__):
        print("half-way", flush=True)
        time.sleep(600)
    gguf.write_atomically = stop  # the record is the last file of a copy
else:
    convert = gguf._convert
    def count(*arguments, **options):
        print("converting", flush=True)
        convert(*arguments, **options)
    gguf._convert = count
print(gguf.converted_copy(Path(sys.argv[1])).folder)
"""


def start(path, mode):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), mode], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def test_a_process_killed_half_way_leaves_nothing_that_looks_whole(tiny, tiny_gguf, cache, tmp_path):
    path = tiny_gguf(tmp_path)
    with start(path, "stop half-way") as child:
        assert child.stdout.readline() == "half-way\n"
        child.send_signal(signal.SIGKILL)
    left = [entry.name for entry in (cache / "models").iterdir() if entry.is_dir()]
    assert len(left) == 1
    assert ".making-" in left[0]
    module, _ = load_module(converted_copy(path).folder, dtype=torch.float32)
    assert torch.equal(logits(module), logits(tiny("llama")))
    assert [entry for entry in (cache / "models").iterdir() if entry.is_dir()] == [converted_copy(path).folder]


def test_two_processes_at_once_convert_once(tiny, tiny_gguf, cache, tmp_path):
    path = tiny_gguf(tmp_path)
    children = [start(path, "convert") for _ in range(2)]
    printed = [child.communicate()[0].splitlines() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert sum(lines.count("converting") for lines in printed) == 1
    assert printed[0][-1] == printed[1][-1] == str(converted_copy(path).folder)
    record = json.loads((converted_copy(path).folder / "conversion.json").read_text())
    assert record["tensor_types"] == {"F32": 30}

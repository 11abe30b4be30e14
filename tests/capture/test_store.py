"""A store holds what a capture in memory holds, reads lazily, refuses what is not its own, goes on where it stopped."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from filelock import FileLock

from microtome.capture import capture_plan, collect, estimate, store_files, store_writer
from microtome.capture.activations import Activations
from microtome.capture.collect import capture
from microtome.capture.estimate import Estimate
from microtome.capture.generated import Generation
from microtome.capture.models import LoadedModel
from microtome.capture.store import Store
from microtome.capture.store_check import store_info, verify_store
from microtome.capture.stored_tensor import StoredTensor
from microtome.capture.tap_plan import Read
from microtome.capture.taps import taps
from microtome.probes.sweep import sweep

WORDS = "the cat sat on a big red house and she liked his old film but he ran".split()  # noqa: SIM905
TEXTS = [" ".join(WORDS[i % 7 : i % 7 + 2 + i % 9]) for i in range(40)]
LABELS = {"label": [i % 2 for i in range(40)], "group": [f"g{i // 2}" for i in range(40)]}
SITES = ["resid_post", "z", "head_out.1", "q.0.2"]


@pytest.fixture(scope="module")
def model(tiny, word_tokenizer) -> LoadedModel:
    return LoadedModel.from_module(tiny("llama"), word_tokenizer, name="llama")


@pytest.fixture
def kept(model, tmp_path):
    """`kept(texts=..., **changes)`: the capture that most tests make, to tmp_path / "store"."""

    def make(texts=TEXTS, sites=SITES, positions="all", **changes) -> Store:
        given = {"labels": LABELS, "store": tmp_path / "store", "shard_tokens": 60, "progress": False}
        return capture(changes.pop("model", model), texts, sites, positions, **(given | changes))

    return make


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.flatten(1), b.flatten(1)
    return bool(((a - b).norm(dim=1) <= 1e-5 * b.norm(dim=1)).all())


# What it holds


@pytest.mark.parametrize("positions", ["all", "last", "mean", [[0, 1] if i % 3 else [] for i in range(40)]])
def test_it_holds_what_memory_holds(model, kept, positions) -> None:
    store = kept(positions=positions)
    memory = capture(model, TEXTS, SITES, positions, labels=LABELS, progress=False)
    assert store_info(store.path).shards > 2
    assert store.sites == memory.sites
    pd.testing.assert_frame_equal(
        store.rows.astype({"string": "str"}), memory.rows.astype({"string": "str"}), check_dtype=False
    )
    assert all(close(store[site], memory[site]) for site in memory.sites)
    assert isinstance(store, Activations)
    assert repr(store).startswith(f"Store({memory.n_rows} rows, 8 sites: resid_post.0-2 [32], z.0-2 [4 x 8]")


def test_one_shard_is_memory_bit_for_bit(model, kept) -> None:
    store = kept(shard_tokens=10**6)
    memory = capture(model, TEXTS, SITES, "all", progress=False)
    assert all(same_bits(store[site], memory[site]) for site in memory.sites)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stored_dtypes(model, kept, dtype) -> None:
    store = kept(dtype=dtype, shard_tokens=10**6)
    memory = capture(model, TEXTS, SITES, "all", dtype=dtype, progress=False)
    assert all(store[site].dtype == dtype and same_bits(store[site], memory[site]) for site in memory.sites)


@pytest.mark.parametrize("kind", ["gpt2", "bert", "neox"])
def test_other_models_and_patterns(tiny, word_tokenizer, tmp_path, kind) -> None:
    model = LoadedModel.from_module(tiny(kind), word_tokenizer, name=kind)
    sites = ["resid_post.1", "pattern.0", "pattern.2.1"]
    store = capture(model, TEXTS, sites, "all", store=tmp_path / "s", shard_tokens=50, progress=False)
    memory = capture(model, TEXTS, sites, "all", progress=False)
    assert store["pattern.0"].shape == memory["pattern.0"].shape
    assert all(close(store[site], memory[site]) for site in memory.sites)


def test_ready_inputs_go_to_shards_too(model, tmp_path) -> None:
    ids = torch.randint(3, 100, (40, 6))
    inputs = {"inputs_embeds": model.module.get_input_embeddings()(ids).detach()}
    labels = {"label": list(range(40))}
    given = {"sites": "resid_post", "positions": "all", "labels": labels, "progress": False}
    store = capture(model, inputs, **given, store=tmp_path / "s", shard_bytes=16 * 6 * 32 * 4 * 3)
    memory = capture(model, inputs, **given)
    assert store_info(store.path).shards == 3
    pd.testing.assert_frame_equal(store.rows, memory.rows)
    assert all(close(store[site], memory[site]) for site in memory.sites)
    with pytest.raises(ValueError, match="pattern rows of images and sounds differ in length"):
        capture(model, inputs, "pattern.0", store=tmp_path / "p", progress=False)


def test_message_lists_token_ids_and_tensors(model, tmp_path) -> None:
    ids = [[5, 6, 7][: 1 + i % 3] for i in range(20)]
    mapping = {"input_ids": torch.randint(3, 100, (20, 5))}
    for number, texts in enumerate([ids, mapping, mapping["input_ids"]]):
        store = capture(model, texts, "z", "all", store=tmp_path / str(number), shard_tokens=10, progress=False)
        memory = capture(model, texts, "z", "all", progress=False)
        assert store_info(store.path).shards > 2
        assert store.rows["token_ids"].tolist() == memory.rows["token_ids"].tolist()
        assert all(close(store[site], memory[site]) for site in memory.sites)


# Reading


def test_reading_is_lazy_and_right(kept) -> None:
    store = kept()
    memory = store.to_memory()
    assert type(memory) is Activations
    assert all(isinstance(tensor, StoredTensor) for tensor in store.tensors.values())
    picked = [7, 3, 100, 3]
    for chosen, same in (
        (store.sel(kind="z", layer=[0, 2], head=[1, 3]), memory.sel(kind="z", layer=[0, 2], head=[1, 3])),
        (store.select_rows(picked), memory.select_rows(picked)),
        (store.select_rows("position == 1"), memory.select_rows("position == 1")),
        (store.select_rows(picked).select_rows([2, 0]), memory.select_rows(picked).select_rows([2, 0])),
        (store.select_rows("label == 1").sel(kind="z", head=2), memory.select_rows("label == 1").sel(kind="z", head=2)),
        (store.only(["z.1.2", "resid_post"]), memory.only(["z.1.2", "resid_post"])),
    ):
        assert isinstance(chosen, Store)
        assert chosen.sites == same.sites
        assert chosen.nbytes == same.nbytes
        assert all(isinstance(tensor, StoredTensor) for tensor in chosen.tensors.values())
        assert all(same_bits(chosen[site], same[site]) for site in same.sites)
        pd.testing.assert_frame_equal(chosen.rows, same.rows)
    assert same_bits(store["z.1.2"], memory["z", 1][:, 2])
    assert ("z.1.2" in store, "z.9" in store) == (True, False)
    with pytest.raises(KeyError, match=r"z\.7 was not captured"):
        store["z.7"]
    with pytest.raises(IndexError, match="rows; 0 to 10000 were asked for"):
        store.tensors[store.sites[0]][[0, 10000]]


def test_parts_are_the_shards(kept) -> None:
    store = kept()
    parts = list(Store.open(store.path).parts())
    assert len(parts) == store_info(store.path).shards
    assert pd.concat([part.rows for part in parts], ignore_index=True)["text"].tolist() == store.rows["text"].tolist()
    assert same_bits(torch.cat([part["z.1"] for part in parts]), store["z.1"])
    some = store.select_rows("position == 0")
    assert same_bits(torch.cat([part["z.1.3"] for part in some.parts()]), some["z.1.3"])


def test_a_selection_reads_no_table(kept, monkeypatch) -> None:
    store = Store.open(kept().path)
    monkeypatch.setattr("microtome.capture.store._row_table", None)
    assert store.sel(kind="z").n_rows == store.n_rows == len(store["z.0"])


def test_probes_take_a_store(kept) -> None:
    store = kept(positions="last")
    settings = {"groups": "group", "folds": 3, "inner_folds": 2, "permutations": 0, "bootstraps": 100}
    given = {"texts": [f"t{i}" for i in range(40)], "progress": False} | settings
    there, here = (sweep(acts, "label", **given) for acts in (store, store.to_memory()))
    pd.testing.assert_frame_equal(there.table, here.table)
    assert same_bits(there.decision(store), here.decision(store.to_memory()))


def test_saved_concatenated_and_framed_like_activations(kept, tmp_path) -> None:
    store = kept()
    store.sel(kind="z").save(tmp_path / "saved")
    saved = Activations.load(tmp_path / "saved")
    assert same_bits(saved["z.1"], store["z.1"])
    twice = Activations.concat([store, store], same_texts=True)
    assert same_bits(twice["z.1"], torch.cat([store["z.1"]] * 2))
    assert twice.rows["string"].tolist() == store.rows["string"].tolist() * 2
    frame = store.sel(kind="z", layer=1, head=0).to_frame()
    assert frame["z.1.0[3]"].tolist() == store["z.1.0"][:, 3].tolist()


# Going on


@pytest.mark.parametrize(("mode", "kills"), [(["random", "50"], 50), (["steps", "25"], 25)])
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(tmp_path, mode, kills) -> None:
    script = Path(__file__).with_name("killed_capture.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MICROTOME_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, script, tmp_path, *mode], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["kills"], found["differing"]) == (kills, [])
    assert found["shards"] > 10


def test_a_finished_store_runs_nothing(kept, monkeypatch) -> None:
    first = kept()
    monkeypatch.setattr(collect.CaptureJob, "run", None)
    assert kept().rows.equals(first.rows)


def test_only_what_is_missing_runs(kept, monkeypatch) -> None:
    whole = files(kept().path)
    path = kept().path
    store_files.shard_file(path, 1).unlink()
    store_files.table_file(path, 3).write_bytes(b"short")
    ran = []
    run = collect.CaptureJob.run

    def counted(self, first, stop, **given):
        ran.append(first)
        return run(self, first, stop, **given)

    monkeypatch.setattr(collect.CaptureJob, "run", counted)
    kept()
    bounds = json.loads((path / "manifest.json").read_text())["shards"]
    assert ran == [bounds[1]["first"], bounds[3]["first"]]
    assert files(path) == whole


def test_stopped_by_hand_it_says_how_far_it_came(kept, monkeypatch, tmp_path) -> None:
    run = collect.CaptureJob.run

    def stop(self, first, stop, **given):
        if first > 20:
            raise KeyboardInterrupt
        return run(self, first, stop, **given)

    monkeypatch.setattr(collect.CaptureJob, "run", stop)
    with pytest.raises(KeyboardInterrupt, match=r"Stopped: \d of \d shards are in .*the same call goes on"):
        kept()
    monkeypatch.undo()
    path = tmp_path / "store"
    n_there = store_info(path).finished
    assert 1 < n_there < store_info(path).shards
    with pytest.raises(ValueError, match=rf"has {n_there} of \d shards. Run the same capture again"):
        Store.open(path)
    part = Store.open(path, partial=True)
    assert not part.is_whole
    assert repr(part).endswith("not all shards)")
    whole = kept()
    assert whole.is_whole
    assert same_bits(whole["z.1"][: part.n_rows], part["z.1"])


def test_other_batches_are_recorded_and_equal_to_rounding(kept, model, monkeypatch) -> None:
    path = kept().path
    store_files.shard_file(path, 2).unlink()
    store = kept(max_tokens=16)
    info = store_info(path)
    assert info.differences == {"max_tokens": [capture_plan.SHARD_TOKENS // 16, 16]}
    assert json.loads((path / "manifest.json").read_text())["differences"] == info.differences
    assert store.provenance["store"]["differences"] == info.differences
    memory = capture(model, TEXTS, SITES, "all", progress=False)
    assert all(close(store[site], memory[site]) for site in memory.sites)


def test_a_line_that_was_cut_off_counts_for_nothing(kept) -> None:
    path = kept().path
    log = (path / "shards.jsonl").read_bytes()
    (path / "shards.jsonl").write_bytes(log[:-20])
    info = store_info(path)
    assert info.finished == info.shards - 1
    kept()
    assert [json.loads(line)["shard"] for line in (path / "shards.jsonl").read_text().splitlines()] == list(
        range(info.shards)
    )


# What does not belong


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sites": ["resid_post"]}, "sites"),
        ({"positions": "last"}, "positions and token labels"),
        ({"texts": ["the dog", *TEXTS[1:]]}, "texts"),
        ({"labels": LABELS | {"label": [0] * 40}}, "labels"),
        ({"labels": {"other": [0] * 40}}, "columns"),
        ({"dtype": torch.float16}, "dtype"),
        ({"shard_tokens": 50}, "shards"),
        ({"token_labels": {"n": lambda text, offsets: list(range(len(offsets)))}}, "positions and token labels"),
        ({"generate": Generation(2)}, "generation"),
    ],
)
def test_another_capture_is_refused_and_nothing_is_lost(kept, change, named) -> None:
    before = files(kept().path)
    with pytest.raises(ValueError, match=f"holds another capture .*{named}: .*Nothing was changed"):
        kept(**change)
    assert files(kept().path) == before


def test_another_model_is_refused(kept, tiny, word_tokenizer) -> None:
    before = files(kept().path)
    other = LoadedModel.from_module(tiny("llama", seed=1), word_tokenizer, name="llama")
    with pytest.raises(ValueError, match=r"holds another capture .model's weights: "):
        kept(model=other)
    assert files(kept().path) == before


def test_other_folders_are_left_alone(kept, tmp_path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="holds no store, so it is left alone"):
        kept()
    kept_file = tmp_path / "file"
    kept_file.write_text("text")
    with pytest.raises(FileExistsError, match="holds no store"):
        kept(store=kept_file)
    saved = tmp_path / "saved"
    Activations.from_arrays({"a.0": torch.zeros(2, 2)}).save(saved)
    with pytest.raises(ValueError, match="not in the format 'microtome store 1'"):
        kept(store=saved)
    assert (tmp_path / "store" / "thesis.tex").read_text() == "years of work"


def test_a_second_writer_is_refused(kept, tmp_path) -> None:
    path = kept().path
    store_files.shard_file(path, 0).unlink()
    taken, release = threading.Event(), threading.Event()

    def hold() -> None:
        with FileLock(path / "writer.lock"):
            taken.set()
            release.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait(30)
    try:
        with pytest.raises(BlockingIOError, match="is being written by another process"):
            kept()
    finally:
        release.set()
        holder.join()
    assert kept().is_whole


def test_the_second_of_two_processes_is_told_of_the_first(kept, monkeypatch) -> None:
    path = kept().path
    second = store_files.writing(path)
    with store_files.writing(path), pytest.raises(BlockingIOError, match=f"written by process {os.getpid()} on "):
        second.__enter__()
    assert not (path / "writer.json").exists()


def test_a_store_with_edits_is_not_gone_on_with_nor_given_for_other_edits(kept) -> None:
    """Functions cannot be compared: a loop over strengths into one path must not return the first one's store."""
    path = kept(edits={"resid_post.0": torch.zeros_like}).path
    with pytest.raises(ValueError, match="was made with edits, which are functions and cannot be compared"):
        kept(edits={"resid_post.0": torch.ones_like})
    assert Store.open(path).is_whole


@pytest.fixture
def own_model(tiny, word_tokenizer) -> LoadedModel:
    """A model that a test may change."""
    return LoadedModel.from_module(tiny("llama"), word_tokenizer, name="llama")


def edit_a_weight(module: torch.nn.Module) -> None:
    with torch.no_grad():
        module.model.layers[1].mlp.down_proj.weight.mul_(1.5)


def change_a_number(module: torch.nn.Module) -> None:
    module.model.layers[1].input_layernorm.variance_epsilon = 0.1


def change_the_rotation(module: torch.nn.Module) -> None:
    module.model.rotary_emb.inv_freq.mul_(0.5)


def change_the_configuration(module: torch.nn.Module) -> None:
    module.config.rope_parameters["rope_theta"] = 77.0


def add_a_hook(module: torch.nn.Module) -> None:
    module.model.layers[1].mlp.register_forward_hook(lambda module, given, out: out * 0)


def replace_a_method(module: torch.nn.Module) -> None:
    module.model.layers[1].mlp.forward = lambda x: x * 0


def cast(module: torch.nn.Module) -> None:
    module.to(torch.float64)


CHANGES = {
    edit_a_weight: "model's weights",
    change_a_number: "model's settings",
    change_the_rotation: "model's weights",
    change_the_configuration: "model's settings",
    add_a_hook: "model's hooks",
    replace_a_method: "model's hooks",
    cast: "model's weights",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed_in_place_is_another_model(own_model, tmp_path, change) -> None:
    """Weights edited, cast or trained since they were loaded, numbers, hooks: not what the store was made with."""
    given = {"store": tmp_path / "s", "shard_tokens": 60, "progress": False}
    capture(own_model, TEXTS, "z", "all", **given)
    change(own_model.module)
    with pytest.raises(ValueError, match=rf"holds another capture .*{CHANGES[change]}: "):
        capture(own_model, TEXTS, "z", "all", **given)
    store_files.shard_file(tmp_path / "s", 1).unlink()
    with pytest.raises(ValueError, match=rf"holds another capture .*{CHANGES[change]}: "):
        capture(own_model, TEXTS, "z", "all", **given)


def test_what_does_not_change_the_model_goes_on(own_model, kept, tiny, word_tokenizer) -> None:
    """A second copy, one that was tapped, one with another attention implementation."""
    path = kept(model=own_model).path
    again = LoadedModel.from_module(tiny("llama"), word_tokenizer, name="another name")
    with taps(again, ["z.0"]):
        again.module(torch.tensor([[5, 6]]))
    again.module.set_attn_implementation("eager")
    assert kept(model=again).path == path


# Damage


def test_missing_and_shortened_shards_are_named(kept) -> None:
    path = kept().path
    whole = store_files.shard_file(path, 1).read_bytes()
    store_files.shard_file(path, 1).unlink()
    with pytest.raises(FileNotFoundError, match=r"shard 1: shard-00001.safetensors is missing \(1 of \d shards"):
        Store.open(path)
    assert Store.open(path, partial=True).n_rows < kept().n_rows
    store_files.shard_file(path, 1).write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=f"has {len(whole) - 1:,} bytes, not {len(whole):,}"):
        Store.open(path)
    (path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        Store.open(path)
    with pytest.raises(FileNotFoundError, match="There is no store"):
        Store.open(path / "nothing")


def test_verify_finds_one_flipped_bit_and_the_same_capture_mends_it(kept) -> None:
    path = kept().path
    before = files(path)
    assert verify_store(path) == []
    for name in ("shard-00001.safetensors", "rows-00002.parquet"):
        data = bytearray((path / name).read_bytes())
        data[len(data) // 2] ^= 1
        (path / name).write_bytes(data)
    faults = verify_store(path)
    assert [fault.shard for fault in faults] == [1, 2]
    assert all("hash differs" in fault.what for fault in faults)
    kept()  # sizes are right: a run alone cannot know
    assert len(verify_store(path, discard_damaged=True)) == 2
    assert store_info(path).finished == store_info(path).shards - 2
    kept()
    assert verify_store(path) == []
    assert files(path) == before


def test_a_shard_of_another_store_is_found(kept, tmp_path) -> None:
    path = kept().path
    other = kept(store=tmp_path / "other", sites=["resid_post"]).path
    lines = (path / "shards.jsonl").read_text().splitlines()
    stolen = json.loads((other / "shards.jsonl").read_text().splitlines()[0])
    store_files.shard_file(path, 0).write_bytes(store_files.shard_file(other, 0).read_bytes())
    (path / "shards.jsonl").write_text("\n".join([json.dumps(stolen), *lines[1:]]) + "\n")
    assert "holds None for" in verify_store(path)[0].what
    with pytest.raises(ValueError, match="is damaged"):
        Store.open(path)["z.1"]


# The disk


def test_a_full_disk_loses_nothing(kept, tmp_path, monkeypatch) -> None:
    """A real failing write: the process may not write files larger than a few kilobytes."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    run = collect.CaptureJob.run

    def fill_up(self, first, stop, **given):
        if first > 20:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
        return run(self, first, stop, **given)

    monkeypatch.setattr(collect.CaptureJob, "run", fill_up)
    try:
        with pytest.raises(OSError, match=r"could not be written\. Make room") as caught:
            kept()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    monkeypatch.undo()
    assert caught.value.errno == errno.EFBIG
    path = tmp_path / "store"
    assert not list(path.glob(".*.part"))
    assert 1 < store_info(path).finished < store_info(path).shards
    assert verify_store(path) == []
    assert kept().is_whole


def test_too_little_room_is_said_before_any_work(kept, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(store_writer.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=r"needs .* kB more; its disk has 1.0 kB free. Make room"):
        kept()
    assert store_info(tmp_path / "store").finished == 0


def test_a_folder_that_cannot_be_written_to(kept, monkeypatch) -> None:
    with pytest.raises(OSError, match=r"/proc/store could not be written\. Make room, or give a folder"):
        kept(store="/proc/store")


# Memory


LARGE = """
import resource, sys
from collections.abc import Sequence
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from microtome.capture import LoadedModel, Store, capture, verify_store

torch.set_num_threads(1)
torch.manual_seed(0)
config = LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=100,
                     num_key_value_heads=2, max_position_embeddings=64)
model = LoadedModel.from_module(LlamaForCausalLM(config).eval(), name="tiny")


class Texts(Sequence):
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i): return [3 + (i * 7 + k) % 90 for k in range(50)]


def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

limit, path = 2**23, sys.argv[1]
sites = ["resid_post", "z", "mlp_act", "q", "attn_out"]
small = capture(model, Texts(520), sites, "all", store=path + "/small", shard_bytes=limit, progress=False)
list(small.parts())
before = peak()
store = capture(model, Texts(2400), sites, "all", store=path + "/large", shard_bytes=limit, progress=False)
written = peak()
assert verify_store(store.path) == []
assert sum(float(part["z.1"].sum()) != 0 for part in store.parts()) > 10
print(before, written, peak(), store.nbytes, small.nbytes, limit)
"""


def test_memory_does_not_grow_with_the_texts(tmp_path) -> None:
    """A store of many shards takes no more memory than one of three: written, verified, read by parts."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MICROTOME_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", LARGE, tmp_path], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    before, written, read, large, small, limit = map(int, done.stdout.split())
    assert small > 2.9 * limit
    assert large > 13 * limit
    assert written - before < limit
    assert read - before < limit


# What is said before


def test_texts_that_are_too_long_fail_before_any_work(kept, tmp_path) -> None:
    long = " ".join(WORDS * 5)
    with pytest.raises(ValueError, match=r"1 of 40 texts are longer than 64 tokens \(row 33 has 85\)"):
        kept(texts=[*TEXTS[:33], long, *TEXTS[34:]])
    assert not (tmp_path / "store").exists()


def test_rows_are_named_as_in_the_whole_list(model, tmp_path) -> None:
    texts = [[5, 6]] * 3000
    given = {"store": tmp_path / "s", "progress": False}
    for bad, said in (([5, 500], "row 2500 holds token id 500"), ([], "row 2500 is an empty list")):
        with pytest.raises(ValueError, match=said):
            capture(model, [*texts[:2500], bad, *texts[2501:]], "z.0", "last", **given)
    with pytest.raises(ValueError, match="row 2500 has 2 tokens, special ones included; position 7 is out of range"):
        capture(model, texts, "z.0", [7 if i == 2500 else 0 for i in range(3000)], **given)
    with pytest.raises(TypeError, match="texts mix kinds: token_ids, from row 2048 on strings"):
        capture(model, [*texts[:2048], *["the cat"] * 952], "z.0", "last", **given)
    with pytest.raises(ValueError, match="positions keeps nothing of any text"):
        capture(model, texts, "z.0", [[]] * 3000, **given)
    with pytest.raises(ValueError, match="positions is a list of 2 entries for 3000 texts"):
        capture(model, texts, "z.0", [0, 1], **given)
    for name in ("shard_bytes", "shard_tokens"):
        with pytest.raises(ValueError, match=f"{name}=0: give at least 1"):
            capture(model, texts, "z.0", "last", **given, **{name: 0})


def test_no_shard_is_empty_and_none_is_over_its_limits(model, tmp_path) -> None:
    keep = [[0] if i in (0, 1, 30) else [] for i in range(40)]
    store = capture(model, TEXTS, "z", keep, store=tmp_path / "s", shard_tokens=20, progress=False)
    records = store_files.read_log(store.path)
    assert all(record.rows for record in records.values())
    assert sum(record.rows for record in records.values()) == 3
    plan = [(s["first"], s["stop"]) for s in json.loads((store.path / "manifest.json").read_text())["shards"]]
    assert [first for first, _ in plan] == [0, *[stop for _, stop in plan[:-1]]]
    assert plan[-1][1] == 40
    row_bytes = 3 * 4 * 8 * 4
    fine = capture(model, TEXTS, "z", "all", store=tmp_path / "b", shard_bytes=20 * row_bytes, progress=False)
    assert all(record.rows <= 20 for record in store_files.read_log(fine.path).values())


def test_a_long_capture_says_what_it_will_take(kept, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(estimate, "_SHORT_TOKENS", 0)
    monkeypatch.setattr(estimate, "_LONG_SECONDS", 0)
    kept(progress=True)
    said = capsys.readouterr().err
    assert "capture: 40 texts, 240 tokens; 240 rows at 8 sites" in said or "capture: 40 texts" in said
    assert "tokens/s; 5 shards in " in said or "shards in" in said
    store_files.shard_file(tmp_path / "store", 1).unlink()
    kept(progress=True)
    assert "of them there already in" in capsys.readouterr().err


def test_edits_are_not_asked_by_a_plan_or_a_calibration(model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(estimate, "_SHORT_TOKENS", 0)
    asked = []

    def count(value):
        asked.append(len(value))
        return torch.zeros_like(value)

    capture(model, TEXTS, "z", "all", edits={"resid_post.0": count}, store=tmp_path / "s", progress=False)
    assert sum(asked) == len(TEXTS)


def test_what_does_not_fit_into_memory_is_refused(model, monkeypatch) -> None:
    monkeypatch.setattr(estimate, "free_memory", lambda: 1000)
    with pytest.raises(ValueError, match=r"of memory are free. Pass store=PATH to write them to disk"):
        capture(model, TEXTS, SITES, "all", progress=False)


def test_the_estimate_counts_what_capture_keeps(model) -> None:
    kept = capture(model, TEXTS, SITES, "all", dtype=torch.float16, progress=False)
    said = collect.estimate_capture(model, TEXTS, SITES, "all", dtype=torch.float16)
    n_tokens = sum(len(text.split()) for text in TEXTS)
    assert (said.texts, said.tokens, said.rows, said.sites, said.nbytes) == (
        40,
        n_tokens,
        kept.n_rows,
        len(kept.sites),
        kept.nbytes,
    )
    assert said.seconds == pytest.approx(n_tokens / said.tokens_per_second)
    two_hours = Estimate(12_000, 1_234_567, 12_000, 45, 14_200_000_000, 7800.0, 158.3)
    assert str(two_hours) == (
        "12,000 texts, 1,234,567 tokens; 12,000 rows at 45 sites, 14.2 GB; about 2 h 10 min at 158 tokens/s"
    )


def test_texts_that_change_between_plan_and_run_are_noticed(model, tmp_path) -> None:
    class Texts(Sequence):
        asked = 0

        def __len__(self) -> int:
            return 1100

        def __getitem__(self, number: int) -> list[int]:
            self.asked += 1
            return [5, 6, 7] if self.asked <= 1100 else [5, 6, 8]

    with pytest.raises(ValueError, match=r"Texts 0 to \d+ are not those that were planned: they changed"):
        capture(model, Texts(), "z.0", "all", store=tmp_path / "s", shard_tokens=90, progress=False)


def test_other_strings_of_the_same_ids_are_other_texts(kept) -> None:
    """Both words are unknown to the tokenizer, so the ids are the same; the rows would show the old string."""
    kept(texts=["the zebra", *TEXTS[1:]])
    with pytest.raises(ValueError, match="strings, positions and token labels: "):
        kept(texts=["the giraffe", *TEXTS[1:]])


def test_a_model_in_half_precision_keeps_what_memory_keeps(tiny, word_tokenizer, tmp_path) -> None:
    """Attention rows and some streams are wider than the model's parameters; a store must not round them."""
    model = LoadedModel.from_module(tiny("llama").to(torch.bfloat16), word_tokenizer, name="half")
    sites = ["resid_post", "pattern.0", "z.1"]
    memory = capture(model, TEXTS, sites, "all", progress=False)
    store = capture(model, TEXTS, sites, "all", store=tmp_path / "s", shard_tokens=10**6, progress=False)
    assert {site: store[site].dtype for site in memory.sites} == {site: memory[site].dtype for site in memory.sites}
    assert all(same_bits(store[site], memory[site]) for site in memory.sites)
    assert collect.estimate_capture(model, TEXTS, sites, "all").nbytes == memory.nbytes


@pytest.mark.parametrize("as_kind", [np.array, torch.tensor, pd.Series])
def test_positions_longer_than_the_texts_are_refused_whatever_they_are(model, as_kind) -> None:
    with pytest.raises(ValueError, match="positions is a list of 5 entries for 3 texts"):
        capture(model, TEXTS[:3], "z.0", as_kind([0, 1, 0, 1, 0]), progress=False)
    kept = capture(model, TEXTS[:3], "z.0", as_kind([0, 1, 0]), progress=False)
    assert kept.rows["position"].tolist() == [0, 1, 0]


def test_values_in_hand_do_not_follow_the_file(kept) -> None:
    """Read means read: a file that is replaced or cut off later changes no tensor and kills no process."""
    store = kept(shard_tokens=10**6)
    held, head = store["z.1"], store["z.1.2"]
    copies = held.clone(), head.clone()
    file = store_files.shard_file(store.path, 0)
    os.truncate(file, 100)
    assert torch.equal(held, copies[0])
    assert torch.equal(head, copies[1])
    with pytest.raises(ValueError, match="is damaged"):
        store["z.0"]


def test_a_finished_store_is_given_without_writing(kept, monkeypatch) -> None:
    """It may lie on a disk that can only be read, or be read while another process holds the lock."""
    path = kept().path
    monkeypatch.setattr(store_writer, "writing", None)
    assert kept().path == path


@pytest.mark.parametrize("empty", ["", "  "])
def test_a_store_needs_a_name(kept, empty) -> None:
    with pytest.raises(ValueError, match="store is an empty name"):
        kept(store=empty)


def test_home_is_meant_by_a_tilde(kept, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    assert kept(store="~/acts").path == (tmp_path / "home" / "acts").resolve()


def test_two_threads_that_begin_one_store(model, tmp_path) -> None:
    """One writes it; the other is told so, or finds it finished. Nothing else happens."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(capture(model, TEXTS, "z", "all", store=tmp_path / "s", shard_tokens=30, progress=False))
        except BlockingIOError as error:
            found.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert any(isinstance(one, Store) for one in found)
    assert verify_store(tmp_path / "s") == []


def test_texts_are_asked_for_when_their_turn_comes(model, tmp_path) -> None:
    """A sequence that reads from disk is never listed as a whole."""
    most = 0

    class Texts(Sequence):
        def __len__(self) -> int:
            return 2500

        def __getitem__(self, number: int) -> list[int]:
            nonlocal most
            if not isinstance(number, int):
                raise TypeError("one at a time")
            most = max(most, number)
            return [3 + number % 90, 5]

    store = capture(model, Texts(), "z.0", "last", store=tmp_path / "s", progress=False)
    assert (store.n_rows, most) == (2500, 2499)


def test_taps_around_a_capture_see_its_batches_alone(model) -> None:
    """A plan runs no forward of its own."""
    with taps(model, [Read("resid_pre.0")]) as tape:
        capture(model, TEXTS[:2], "z.0", "last", progress=False)
    assert sum(len(value) for value in tape.all("resid_pre.0")) == 2


def files(path: Path) -> dict[str, bytes]:
    """The bytes of shards and row tables, by name."""
    return {file.name: file.read_bytes() for file in sorted([*path.glob("shard-*"), *path.glob("rows-*")])}


def test_errors_of_the_texts_are_not_called_errors_of_the_disk(model, tmp_path) -> None:
    class Texts(Sequence):
        asked = 0

        def __len__(self) -> int:
            return 1100

        def __getitem__(self, number: int) -> list[int]:
            self.asked += 1
            if self.asked > 1110:  # while shards are made, no longer while they are planned
                raise FileNotFoundError(2, "No such file", "corpus.txt")
            return [5, 6, 7]

    with pytest.raises(FileNotFoundError, match=r"corpus\.txt") as caught:
        capture(model, Texts(), "z.0", "all", store=tmp_path / "s", shard_tokens=9, progress=False)
    assert "could not be written" not in str(caught.value)

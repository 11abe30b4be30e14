"""Saved and loaded: bit for bit, whole or not at all."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pandas as pd
import pytest
import torch

from microtome.capture import activation_files
from microtome.capture.activations import Activations
from microtome.capture.sites import Site


def make(seed: int = 0) -> Activations:
    generator = torch.Generator().manual_seed(seed)
    rows = pd.DataFrame(
        {
            "text": [0, 0, 1, 2],
            "position": [0, 1, 3, -1],
            "token": ["a", " b", "ç\n", ""],
            "label": [0.5, 1.5, np.nan, seed],
            "group": pd.Categorical(["x", "y", "x", "x"]),
        }
    )
    tensors = {
        Site("resid_post", 3): torch.randn(4, 5, generator=generator),
        Site("resid_post", 3, call=1): torch.randn(4, 5, generator=generator, dtype=torch.float64),
        Site("z", 5, stack="encoder"): torch.randn(4, 2, 3, generator=generator).bfloat16(),
        Site("backbone.x", 1, 0): torch.randn(4, 2, generator=generator).half(),
    }
    return Activations(rows, tensors, {"model": "tiny", "seed": seed, "nested": {"list": [1, None]}})


def assert_same(one: Activations, other: Activations) -> None:
    pd.testing.assert_frame_equal(one.rows, other.rows)
    assert one.sites == other.sites
    for site, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[site].dtype
        assert torch.equal(tensor, other.tensors[site])
    assert one.provenance == other.provenance


def names_in(folder) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


# Identities


@pytest.mark.parametrize("verify", [True, False])
def test_loaded_is_what_was_saved(tmp_path, verify):
    acts = make()
    path = acts.save(tmp_path / "deep" / "acts")
    assert path == tmp_path / "deep" / "acts"
    assert names_in(path) == {"activations.safetensors", "rows.parquet", "manifest.json"}
    assert names_in(path.parent) == {"acts"}
    assert_same(Activations.load(path, verify=verify), acts)


def test_selections_that_share_memory_are_saved_alone(tmp_path):
    acts = make()
    chosen = acts.sel(kind="z", head=[0, 1])
    chosen.save(tmp_path / "heads")
    assert_same(Activations.load(tmp_path / "heads"), chosen)
    shared = Activations(acts.rows, {Site("a"): acts["resid_post.3"], Site("b"): acts["resid_post.3"]}, {})
    shared.save(tmp_path / "shared")
    whole = torch.arange(30.0).view(10, 3)
    slices = Activations(acts.rows, {Site("a"): whole[:4], Site("b"): whole[4:8], Site("c"): whole[:, :2][:4]}, {})
    slices.save(tmp_path / "slices")
    assert_same(Activations.load(tmp_path / "slices"), slices)
    assert_same(Activations.load(tmp_path / "shared"), shared)


def test_writing_to_a_loaded_tensor_leaves_the_file_alone(tmp_path):
    make().save(tmp_path / "acts")
    Activations.load(tmp_path / "acts")["resid_post.3"].zero_()
    assert_same(Activations.load(tmp_path / "acts"), make())


def test_overwriting_leaves_the_new_one_only_and_open_ones_readable(tmp_path):
    make(0).save(tmp_path / "acts")
    opened = Activations.load(tmp_path / "acts", verify=False)
    make(1).save(tmp_path / "acts", overwrite=True)
    assert_same(Activations.load(tmp_path / "acts"), make(1))
    assert_same(opened, make(0))
    assert names_in(tmp_path) == {"acts"}


def test_manifest_can_be_read_by_anyone(tmp_path):
    manifest = json.loads((make().save(tmp_path / "acts") / "manifest.json").read_text())
    assert manifest["n_rows"] == 4
    assert [(site["name"], site["shape"], site["dtype"]) for site in manifest["sites"]] == [
        ("resid_post.3", [4, 5], "float32"),
        ("resid_post.3@1", [4, 5], "float64"),
        ("encoder.z.5", [4, 2, 3], "bfloat16"),
        ("backbone.x.1.0", [4, 2], "float16"),
    ]
    assert manifest["provenance"]["model"] == "tiny"


# Interrupted


@pytest.mark.parametrize("step", ["write_safetensors", "file_sha256", "_put_in_place"])
def test_an_interrupt_at_any_step_keeps_the_old_one(tmp_path, monkeypatch, step):
    make(0).save(tmp_path / "acts")

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(activation_files, step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        make(1).save(tmp_path / "acts", overwrite=True)
    monkeypatch.undo()
    assert_same(Activations.load(tmp_path / "acts"), make(0))
    assert names_in(tmp_path) == {"acts"}


def test_a_failed_replacement_puts_the_old_one_back(tmp_path, monkeypatch):
    make(0).save(tmp_path / "acts")
    rename = os.rename

    def refuse(source, target):
        if str(source).endswith(".part"):
            raise OSError("disk full")
        rename(source, target)

    monkeypatch.setattr(activation_files.os, "rename", refuse)
    with pytest.raises(OSError, match="disk full"):
        make(1).save(tmp_path / "acts", overwrite=True)
    monkeypatch.undo()
    assert_same(Activations.load(tmp_path / "acts"), make(0))


def test_a_killed_process_keeps_the_old_one(tmp_path):
    """A real kill while the new files are half written."""
    make(0).save(tmp_path / "acts")
    # the package's own __init__ imports transformers, which this process can do without: an empty one stands in
    script = f"""
        import pathlib, sys, time, types
        package = sys.modules["microtome.capture"] = types.ModuleType("microtome.capture")
        package.__path__ = [{str(pathlib.Path(activation_files.__file__).parent)!r}]
        from microtome.capture import activation_files
        write = activation_files.write_safetensors
        def stall(path, *given):
            write(path, *given)
            pathlib.Path({str(tmp_path / "reached")!r}).touch()
            time.sleep(600)
        activation_files.write_safetensors = stall
        saved = activation_files.load_activations({str(tmp_path / "acts")!r})
        activation_files.save_activations({str(tmp_path / "acts")!r}, *saved, overwrite=True)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path)
    try:
        while not (tmp_path / "reached").exists():
            assert process.poll() is None, "the process ended before it was killed"
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert_same(Activations.load(tmp_path / "acts"), make(0))
    make(1).save(tmp_path / "acts", overwrite=True)
    assert_same(Activations.load(tmp_path / "acts"), make(1))


def test_a_kill_between_the_two_renames_is_told(tmp_path):
    path = make().save(tmp_path / "acts")
    path.rename(tmp_path / ".acts.previous")
    with pytest.raises(
        FileNotFoundError, match=r"interrupted overwrite left the old one as .*acts.previous: rename it"
    ):
        Activations.load(path)
    make(1).save(path)
    assert_same(Activations.load(path), make(1))


# Errors


def test_nothing_is_overwritten_unasked(tmp_path):
    path = make(0).save(tmp_path / "acts")
    with pytest.raises(FileExistsError, match=r"exists. Give another path, or pass overwrite=True"):
        make(1).save(path)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("all of it")
    with pytest.raises(FileExistsError, match="holds no activations, so it is left alone"):
        make().save(tmp_path / "thesis", overwrite=True)
    assert names_in(tmp_path / "thesis") == {"chapter1.tex"}


@pytest.mark.parametrize("name", ["activations.safetensors", "rows.parquet"])
def test_a_changed_byte_is_found(tmp_path, name):
    path = make().save(tmp_path / "acts")
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is damaged: it is not the file the manifest was written for"):
        Activations.load(path)


def test_a_cut_file_is_found_even_unverified(tmp_path):
    path = make().save(tmp_path / "acts")
    content = (path / "activations.safetensors").read_bytes()
    (path / "activations.safetensors").write_bytes(content[:-8])
    with pytest.raises(ValueError, match=r"activations.safetensors is damaged"):
        Activations.load(path, verify=False)


def test_a_broken_header_is_found_even_unverified(tmp_path):
    path = make().save(tmp_path / "acts")
    content = (path / "activations.safetensors").read_bytes()
    (path / "activations.safetensors").write_bytes(b"\xff" * 20 + content[20:])
    with pytest.raises(ValueError, match=r"acts is damaged: .*Capture again"):
        Activations.load(path, verify=False)


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (
            lambda path: (path / "rows.parquet").unlink(),
            FileNotFoundError,
            "rows.parquet is missing, though the manifest",
        ),
        (lambda path: (path / "manifest.json").unlink(), ValueError, "holds no activations: it has no manifest.json"),
        (lambda path: (path / "manifest.json").write_text("{"), ValueError, "manifest.json is damaged"),
        (lambda path: (path / "manifest.json").write_text("{}"), ValueError, "is not in the format 'microtome activ"),
    ],
)
def test_incomplete_folders_are_named(tmp_path, spoil, error, message):
    path = make().save(tmp_path / "acts")
    spoil(path)
    with pytest.raises(error, match=message):
        Activations.load(path)


def test_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"There is no folder .*nowhere"):
        Activations.load(tmp_path / "nowhere")


@pytest.mark.parametrize("value", [np.float32(1), {1, 2}, float("nan")])
def test_provenance_must_be_plain(tmp_path, value):
    acts = make()
    with pytest.raises(TypeError, match="provenance must hold plain JSON values"):
        Activations(acts.rows, acts.tensors, {"value": value}).save(tmp_path / "acts")
    assert names_in(tmp_path) == set()


def test_columns_must_have_one_type(tmp_path):
    acts = make()
    rows = acts.rows.assign(mixed=pd.Series([1, "a", None, 2.5], dtype=object))
    with pytest.raises(TypeError, match=r"rows cannot be written as Parquet: .*mixed.*Give every column one type"):
        Activations(rows, acts.tensors, {}).save(tmp_path / "acts")
    assert names_in(tmp_path) == set()


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path) -> None:
    acts = Activations.from_arrays({"a.0": np.ones((3, 2))})
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "manifest.json").write_text('{"mine": 1}')
    with pytest.raises(FileExistsError, match="holds no activations"):
        acts.save(foreign, overwrite=True)
    own = acts.save(tmp_path / "own")
    (own / "notes.txt").write_text("precious")
    with pytest.raises(FileExistsError, match=r"holds notes\.txt beside activations"):
        acts.save(own, overwrite=True)
    assert (own / "notes.txt").read_text() == "precious"


@pytest.mark.parametrize("change", [{"files": None}, {"files": {}}, {"sites": []}, {"sites": ["z"]}])
def test_a_manifest_that_lists_nothing_is_damaged(tmp_path, change) -> None:
    path = Activations.from_arrays({"a.0": np.ones((3, 2))}).save(tmp_path / "acts")
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | change))
    with pytest.raises(ValueError, match="does not list the files and sites"):
        Activations.load(path)


def test_what_killed_writers_left_goes_with_the_next_save(tmp_path) -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    left = tmp_path / f".acts.{int(gone.stdout)}.abc.part"
    running = tmp_path / f".acts.{os.getpid()}.abc.part"
    left.mkdir()
    running.mkdir()
    Activations.from_arrays({"a.0": np.ones((3, 2))}).save(tmp_path / "acts")
    assert not left.exists()
    assert running.exists()

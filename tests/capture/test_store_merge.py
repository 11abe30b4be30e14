"""Merged stores hold the rows of all, shards untouched; exports hold what the store holds, in other tools' forms."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from microtome.app import store_commands
from microtome.capture.activations import Activations
from microtome.capture.collect import capture
from microtome.capture.models import LoadedModel
from microtome.capture.store import Store
from microtome.capture.store_check import store_info, verify_store
from microtome.capture.store_export import export
from microtome.capture.store_files import shard_file
from microtome.capture.store_merge import merge_stores

TEXTS = [
    f"the {animal} sat on the {thing} ." for animal in ("cat", "dog", "bird") for thing in ("house", "book", "tree")
]


@pytest.fixture(scope="module")
def model(tiny, word_tokenizer) -> LoadedModel:
    return LoadedModel.from_module(tiny("llama"), word_tokenizer, name="llama")


@pytest.fixture
def part(model, tmp_path):
    """`part(name, first, stop)`: a store of some of the texts."""

    def make(name: str, first: int, stop: int, sites=("z", "resid_post.1"), **changes) -> Store:
        labels = {"label": [i % 2 for i in range(first, stop)], "group": [f"g{i}" for i in range(first, stop)]}
        given = {"labels": labels, "store": tmp_path / name, "shard_tokens": 20, "progress": False}
        return capture(model, TEXTS[first:stop], list(sites), "all", **(given | changes))

    return make


def test_the_rows_of_all(model, part, tmp_path) -> None:
    parts = [part("a", 0, 4), part("b", 4, 6), part("c", 6, 9)]
    merged = merge_stores(tmp_path / "all", [store.path for store in parts])
    labels = {"label": [i % 2 for i in range(9)], "group": [f"g{i}" for i in range(9)]}
    whole = capture(model, TEXTS, ["z", "resid_post.1"], "all", labels=labels, progress=False)
    pd.testing.assert_frame_equal(merged.rows.astype({"string": "str"}), whole.rows.astype({"string": "str"}))
    assert all(torch.equal(merged[s], torch.cat([store[s] for store in parts])) for s in merged.sites)
    assert verify_store(merged.path) == []
    info = store_info(merged.path)
    assert (info.is_whole, info.texts, info.rows, info.model) == (True, 9, whole.n_rows, "llama")
    assert shard_file(merged.path, 0).read_bytes() == shard_file(parts[0].path, 0).read_bytes()
    again = merge_stores(tmp_path / "twice", [merged.path, part("d", 2, 3).path])
    assert again.rows["text"].max() == 9
    with pytest.raises(ValueError, match="holds another capture"):
        capture(model, TEXTS, ["z", "resid_post.1"], "all", labels=labels, store=merged.path, progress=False)


def test_what_cannot_be_merged(part, tmp_path) -> None:
    a, out = part("a", 0, 4).path, tmp_path / "out"
    cases = [
        ([a], ValueError, r"1 store\(s\) given"),
        ([a, a], ValueError, "hold the same texts. Name each once"),
        ([a, part("same", 0, 4).path], ValueError, "hold the same texts. Name each once"),
        ([a, part("sites", 4, 6, sites=["z"]).path], ValueError, "differ in: sites, dtype"),
        ([a, part("half", 4, 6, dtype=torch.float16).path], ValueError, "differ in: dtype"),
        ([a, part("columns", 4, 6, labels={"other": [0, 1]}).path], ValueError, "differ in: columns"),
        ([a, tmp_path / "nothing"], FileNotFoundError, "There is no store"),
    ]
    for paths, kind, said in cases:
        with pytest.raises(kind, match=said):
            merge_stores(out, paths)
    b = part("b", 4, 9).path
    shard_file(b, 1).unlink()
    with pytest.raises(FileNotFoundError, match=r"shard-00001.safetensors is missing. Run its capture again"):
        merge_stores(out, [a, b])
    (b / "shards.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"has 0 of 3 shards. Finish it first"):
        merge_stores(out, [a, b])
    with pytest.raises(FileExistsError, match=r"exists. Give another folder to merge into"):
        merge_stores(a, [a, b])
    assert sorted(file.name for file in tmp_path.iterdir() if file.name.startswith(".")) == []
    assert not out.exists()


def test_exports_hold_what_the_store_holds(part, tmp_path) -> None:
    store = part("s", 0, 9).select_rows("position == 2")
    export(store, tmp_path / "npy", "npy")
    assert np.array_equal(np.load(tmp_path / "npy" / "z.1.npy"), store["z.1"].numpy())
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "npy" / "rows.parquet"), store.rows)
    table = pd.read_parquet(export(store, tmp_path / "one.parquet", "parquet"))
    assert np.array_equal(np.stack(table["z.1.3"]), store["z.1.3"].numpy())
    assert table["group"].tolist() == store.rows["group"].tolist()
    saved = Activations.load(export(store, tmp_path / "acts", "activations"))
    assert torch.equal(saved["resid_post.1"], store["resid_post.1"])


def test_bfloat16_and_activations_in_memory(part, tmp_path) -> None:
    store = part("s", 0, 9, dtype=torch.bfloat16)
    for number, source in enumerate((store, store.to_memory())):
        out = export(source, tmp_path / f"npy{number}", "npy")
        assert np.array_equal(np.load(out / "z.0.npy"), store["z.0"].float().numpy())
        table = pd.read_parquet(export(source, tmp_path / f"t{number}", "parquet"))
        assert np.array_equal(np.stack(table["z.0.0"]), store["z.0.0"].float().numpy())


def test_an_export_replaces_nothing(part, tmp_path) -> None:
    store = part("s", 0, 4)
    (tmp_path / "out").write_text("mine")
    with pytest.raises(FileExistsError, match=r"out exists. Give another path"):
        export(store, tmp_path / "out")
    with pytest.raises(ValueError, match="format='csv': expected one of activations, npy, parquet"):
        export.__wrapped__(store, tmp_path / "x", "csv")


# Commands


def test_info_and_verify_print_what_they_find(part, tmp_path, capsys) -> None:
    path = part("s", 0, 9).path
    store_commands.show_store(path)
    said = capsys.readouterr().out
    assert "shards    3 of 3 (whole)" in said or "of" in said
    assert "sites     z.0-2 [4 x 8], resid_post.1 [32]; float32" in said
    store_commands.show_store(path, as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert (facts["is_whole"], facts["texts"], facts["model"]) == (True, 9, "llama")
    assert store_commands.verify_store(path)
    assert "every byte as it was written" in capsys.readouterr().out
    data = bytearray(shard_file(path, 1).read_bytes())
    data[-1] ^= 1
    shard_file(path, 1).write_bytes(data)
    assert not store_commands.verify_store(path)
    assert "--discard-damaged" in capsys.readouterr().out
    assert not store_commands.verify_store(path, discard_damaged=True, as_json=True)
    assert [fault["shard"] for fault in json.loads(capsys.readouterr().out)["faults"]] == [1]
    assert store_commands.verify_store(path)
    assert "the others are not finished" in capsys.readouterr().out


def test_export_of_some_sites_and_rows(part, tmp_path, capsys) -> None:
    path = part("s", 0, 9).path
    store_commands.export_store(path, tmp_path / "o", "npy", ["z.1.2"], "label == 1 and position > 0", as_json=True)
    facts = json.loads(capsys.readouterr().out)
    expected = Store.open(path).select_rows("label == 1 and position > 0")
    assert facts["rows"] == expected.n_rows
    assert np.array_equal(np.load(tmp_path / "o" / "z.1.2.npy"), expected["z.1.2"].numpy())
    with pytest.raises(ValueError, match=r"'label = 1' is no query over the columns"):
        store_commands.export_store(path, tmp_path / "p", "npy", None, "label = 1")
    with pytest.raises(ValueError, match=r"is no query over the columns .*nothing"):
        store_commands.export_store(path, tmp_path / "p", "npy", None, "nothing > 1")
    with pytest.raises(KeyError, match=r"z\.9 was not captured"):
        store_commands.export_store(path, tmp_path / "p", "npy", ["z.9"])


def test_merge_says_what_came_of_it(part, tmp_path, capsys) -> None:
    paths = [part("a", 0, 4).path, part("b", 4, 9).path]
    store_commands.merge_stores(tmp_path / "all", paths, as_json=True)
    assert json.loads(capsys.readouterr().out)["parts"] == 2
    store_commands.show_store(tmp_path / "all")
    assert "of 9 texts" in capsys.readouterr().out

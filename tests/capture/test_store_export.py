"""Exports hold what the store holds, in other tools' forms."""

import json
import re

import numpy as np
import pandas as pd
import pytest
import torch

from microtome.app import store_commands
from microtome.capture.activations import Activations
from microtome.capture.collect import capture
from microtome.capture.models import LoadedModel
from microtome.capture.store import Store
from microtome.capture.store_export import export

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


def test_columns_named_like_a_site_are_refused(part, tmp_path) -> None:
    store = part("s", 0, 2, labels={"z.0.1": [0, 1]})
    out = tmp_path / "new" / "table.parquet"
    with pytest.raises(ValueError, match=r"^z\.0 makes a column 'z\.0\.1', and the row table has a column of that"):
        export(store, out, "parquet")
    assert not out.parent.exists()
    assert export(store.sel(kind="resid_post"), out, "parquet") == out
    export(store, tmp_path / "npy", "npy")
    both = Activations.from_arrays({"z.0": np.ones((2, 3, 4)), "z.0.1": np.zeros((2, 4))})
    with pytest.raises(ValueError, match=r"^z\.0\.1 makes a column 'z\.0\.1', and z\.0 makes one of that name"):
        export(both, tmp_path / "both.parquet", "parquet")
    other = Activations.from_arrays({"token": np.ones((2, 3))})
    with pytest.raises(ValueError, match=r"^token makes a column 'token', and the row table has a column"):
        export(other, tmp_path / "other.parquet", "parquet")


def test_sites_that_are_no_files_of_their_own_are_refused(tmp_path) -> None:
    for name in ("../up", "/tmp/up", "a/b", "a\\b", "a\0b"):
        acts = Activations.from_arrays({"z.0": np.ones((2, 3, 4)), name: np.ones((2, 3))})
        with pytest.raises(ValueError, match=f"Site {re.escape(repr(name))} cannot be the name of a file"):
            export(acts, tmp_path / "folder" / "out", "npy")
    acts = Activations.from_arrays({"Q.1": np.ones((2, 3)), "extra.1": np.ones((2, 3)), "EXTRA.1": np.ones((2, 3))})
    with pytest.raises(ValueError, match=r"Sites 'extra\.1' and 'EXTRA\.1' would be one file where case makes no"):
        export(acts, tmp_path / "folder" / "out", "npy")
    assert list(tmp_path.iterdir()) == []
    assert pd.read_parquet(export(acts, tmp_path / "t.parquet", "parquet")).shape == (2, 6)


def test_columns_of_two_types_are_refused_before_anything_is_written(tmp_path) -> None:
    acts = Activations.from_arrays({"a.0": np.ones((2, 3))}, rows=pd.DataFrame({"label": [1, "one"]}))
    for form in ("npy", "parquet"):
        with pytest.raises(TypeError, match=r"rows cannot be written as Parquet: .*Give every column one type"):
            export(acts, tmp_path / "folder" / "out", form)
    assert list(tmp_path.iterdir()) == []


# Command


def test_export_of_some_sites_and_rows(part, tmp_path, capsys) -> None:
    path = part("s", 0, 9).path
    store_commands.export_store(path, tmp_path / "o", "npy", ["z.1.2"], "label == 1 and position > 0", as_json=True)
    facts = json.loads(capsys.readouterr().out)
    expected = Store.open(path).select_rows("label == 1 and position > 0")
    assert facts["rows"] == expected.n_rows
    assert np.array_equal(np.load(tmp_path / "o" / "z.1.2.npy"), expected["z.1.2"].numpy())
    with pytest.raises(ValueError, match=r"'label = 1' is no condition, true or false of each row"):
        store_commands.export_store(path, tmp_path / "p", "npy", None, "label = 1")
    with pytest.raises(ValueError, match=r"is no query over the columns .*nothing"):
        store_commands.export_store(path, tmp_path / "p", "npy", None, "nothing > 1")
    with pytest.raises(KeyError, match=r"z\.9 was not captured"):
        store_commands.export_store(path, tmp_path / "p", "npy", ["z.9"])

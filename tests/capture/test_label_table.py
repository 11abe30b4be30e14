"""Labels are one column of one type per name, by place; what is none is named before any forward."""

import numpy as np
import pandas as pd
import pytest
import torch

from microtome.capture.collect import capture
from microtome.capture.label_table import label_table, labels_sha256
from microtome.capture.models import LoadedModel
from microtome.capture.store import Store


def test_columns_of_any_kind_keep_their_type_and_go_by_place() -> None:
    shuffled = pd.DataFrame({"label": [3, 1, 2]}, index=[7, 0, 3])
    assert label_table(shuffled, 3)["label"].tolist() == [3, 1, 2]
    table = label_table(
        {
            "ids": pd.array([10**17 + 1, None, 3], dtype="Int64"),
            "self": ["a", None, "b"],
            "when": pd.to_datetime(["2026-01-01", None, "2026-01-03"]),
            "kind": pd.Categorical(["x", "y", "x"]),
            "tensor": torch.tensor([1, 0, 1]),
            "array": np.array([0.5, 1.5, 2.5]),
            "flags": (True, False, True),
        },
        3,
    )
    assert table["ids"].tolist()[0] == 10**17 + 1
    assert [str(dtype) for dtype in table.dtypes] == [
        *["Int64", "str", "datetime64[us]", "category", "int64", "float64", "bool"]
    ] or str(table["when"].dtype).startswith("datetime64")


@pytest.mark.parametrize(
    ("labels", "kind", "said"),
    [
        ({"label": [1, "a", 2]}, TypeError, r"labels\['label'\] cannot be kept in a table: .*It holds int, str"),
        ({"label": [1, 2, 2**70]}, TypeError, r"labels\['label'\] cannot be kept in a table"),
        ({"label": [True, 2, "x"]}, TypeError, "It holds bool, int, str; give it one type"),
        ({"label": [1, 2]}, ValueError, "has 2 entries for 3 texts"),
        ({"label": "abc"}, TypeError, r"labels\['label'\] is a str; give a list"),
        ({"label": 3}, TypeError, r"labels\['label'\] is a int; give a list"),
        ({"label": (i for i in range(3))}, TypeError, "is a generator; give a list"),
        ({"token": [1, 2, 3]}, ValueError, "'token', which the row table has itself"),
        (pd.DataFrame([[1, 2]] * 3, columns=["a", "a"]), ValueError, "the column 'a' twice"),
    ],
)
def test_what_is_no_column(labels, kind, said) -> None:
    with pytest.raises(kind, match=said):
        label_table(labels, 3)


def test_the_hash_tells_types_and_values_apart() -> None:
    several = [[0, 1], ["0", "1"], [False, True], ["False", "True"], [0.0, 1.0], [None, 1], ["", "1"], [None, "1"]]
    hashes = {labels_sha256(label_table({"label": values}, 2)) for values in several}
    assert len(hashes) == len(several)
    one = labels_sha256(label_table({"a": [1, 2], "b": [3, 4]}, 2))
    assert one == labels_sha256(label_table({"b": [3, 4], "a": [1, 2]}, 2))
    assert one != labels_sha256(label_table({"a": [3, 4], "b": [1, 2]}, 2))
    assert labels_sha256(None) is None
    plain, category = pd.Series(["x", "y"]), pd.Categorical(["x", "y"])
    assert labels_sha256(label_table({"k": plain}, 2)) != labels_sha256(label_table({"k": category}, 2))


@pytest.fixture(scope="module")
def model(tiny, word_tokenizer) -> LoadedModel:
    return LoadedModel.from_module(tiny("llama"), word_tokenizer, name="llama")


def test_shards_of_labels_with_gaps_are_read_as_one(model, tmp_path) -> None:
    texts = ["the cat sat"] * 30
    labels = {
        "some": [None] * 20 + ["x"] * 10,
        "number": pd.array([None] * 10 + list(range(20)), dtype="Int64"),
        "self": list(range(30)),
        "kind": pd.Categorical(["a"] * 15 + ["b"] * 15),
    }
    given = {"labels": labels, "progress": False}
    store = capture(model, texts, "z.0", "last", **given, store=tmp_path / "s", shard_tokens=9)
    memory = capture(model, texts, "z.0", "last", **given)
    for name in labels:
        assert store.rows[name].astype(object).where(store.rows[name].notna(), None).tolist() == (
            memory.rows[name].astype(object).where(memory.rows[name].notna(), None).tolist()
        )


def test_labels_of_another_type_are_another_capture(model, tmp_path) -> None:
    given = {"store": tmp_path / "s", "shard_tokens": 9, "progress": False}
    texts = ["the cat sat"] * 9
    path = capture(model, texts, "z.0", "last", labels={"label": [0, 1, 0] * 3}, **given).path
    (path / "shard-00001.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds another capture .labels: "):
        capture(model, texts, "z.0", "last", labels={"label": ["0", "1", "0"] * 3}, **given)
    assert Store.open(path, partial=True).rows["label"].tolist() == [0, 1, 0] * 2


def test_bad_labels_are_said_before_any_forward(model, tmp_path) -> None:
    with pytest.raises(TypeError, match="cannot be kept in a table"):
        capture(model, ["the cat"] * 40, "z.0", "last", labels={"y": [1] * 39 + ["a"]}, store=tmp_path / "s")
    assert not (tmp_path / "s").exists()

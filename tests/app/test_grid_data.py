"""Data of cells: tables of one's own, sets of the catalogue, and labels checked before any model is loaded."""

from pathlib import Path

import pandas as pd
import pytest

from microtome.app.grid_config import CatalogueData, FileData, LabelSettings
from microtome.app.grid_data import GridData, load_grid_data

LABEL, KIND, TOKEN = (LabelSettings(column=name) for name in ("label", "kind", "is_last"))


@pytest.fixture
def both_kinds() -> GridData:
    table = pd.DataFrame({"text": list("abcd"), "group": range(4), "label": [0, 1, 0, 1], "kind": ["x", "y", "z", "x"]})
    return GridData("mine", table, {"is_last": [[0, 1]] * 4}, ("label", "is_last"), {})


def test_defaults_are_of_texts_or_of_tokens(both_kinds) -> None:
    assert both_kinds.labels_at("last", None) == [LABEL]
    assert both_kinds.labels_at("all", None) == [TOKEN]
    assert both_kinds.labels_at("all", [LABEL, TOKEN]) == [LABEL, TOKEN]


def test_defaults_that_are_numbers_are_taken_above_their_median(both_kinds) -> None:
    table = both_kinds.table[["text", "group"]].assign(stars=[1, 2, 3, 4])
    places = {"place": [[0, 1, 2]] * 4, "length": lambda text, offsets: [len(text)] * len(offsets)}
    data = GridData("mine", table, places, ("stars", "place"), {})
    assert data.labels_at("last", None) == [LabelSettings(column="stars", above="median")]
    assert data.labels_at("all", None) == [LabelSettings(column="place", above="median")]


SPANS = [[(0, 1, kind)] for kind in ("x", "y", "z", "x")]


@pytest.mark.parametrize(
    ("given", "label", "says"),
    [
        ([[(0, 1, number)] for number in (1, 2, 3, 1)], {}, "has 3 values"),
        (SPANS, {"positive": "w"}, "no row is 'w'; its values are 'x', 'y', 'z'"),
        ([[1, 2, 3]] * 4, {}, "has 3 values"),
        (lambda text, offsets: ["abcd".index(text) % 3 for _ in offsets], {}, "has 3 values"),
    ],
)
def test_labels_of_tokens_are_checked_before_there_are_tokens(both_kinds, given, label, says) -> None:
    data = GridData("mine", both_kinds.table, {"part": given}, ("part",), {})
    with pytest.raises(ValueError, match=f"data set 'mine': label 'part'.*{says}"):
        data.labels_at("all", [LabelSettings(column="part", **label)])
    words = GridData("mine", both_kinds.table, {"part": SPANS}, ("part",), {})
    assert words.labels_at("all", [LabelSettings(column="part", positive="x"), LabelSettings(column="part")])


@pytest.mark.parametrize(
    ("label", "positions", "says"),
    [
        (TOKEN, "last", "label 'is_last' of 'mine' has a value per token, and positions: last keeps.*positions: all"),
        (LabelSettings(column="lable"), "all", r"no label 'lable'.*\['label', 'kind'\].*\['is_last'\].*mean 'label'"),
        (LabelSettings(column="text"), "all", "no label 'text'"),
    ],
)
def test_labels_that_cannot_be_probed(both_kinds, label, positions, says) -> None:
    with pytest.raises(ValueError, match=says):
        both_kinds.labels_at(positions, [label])


def test_a_set_of_token_labels_alone_needs_all_positions(both_kinds) -> None:
    tokens_alone = GridData("mine", both_kinds.table[["text", "group"]], both_kinds.token_labels, ("is_last",), {})
    with pytest.raises(ValueError, match="no label to probe at positions: last"):
        tokens_alone.labels_at("last", None)


def test_a_table_with_gaps(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("body,who,stars,fresh,kind\na b,x,1,true,n\nc d,x,,,\ne f,y,3,false,7\n", encoding="utf-8")
    labels = [LabelSettings(column=name) for name in ("stars", "fresh", "kind")]
    data = load_grid_data(FileData(file=file, text="body", group="who"), "mine", labels, 0)
    assert data.table["text"].tolist() == ["a b", "c d", "e f"]
    assert data.table["group"].tolist() == ["x", "x", "y"]
    assert data.table["stars"].dropna().tolist() == [1, 3]
    assert data.table["fresh"].dropna().tolist() == [True, False]
    assert data.table["kind"].dropna().tolist() == ["n", "7"]
    assert data.table[["stars", "fresh", "kind"]].isna().sum().tolist() == [1, 1, 1]
    assert len(data.facts["table_sha256"]) == 64


def test_groups_from_texts_and_a_draw(tables) -> None:
    data = load_grid_data(
        FileData(file=tables[0], text="review", group="texts", texts=12), "first", [LabelSettings(column="verdict")], 3
    )
    assert len(data.table) == 12
    assert "group" in data.table


def test_a_file_needs_labels_and_a_name_needs_the_catalogue(tables) -> None:
    with pytest.raises(ValueError, match="needs labels"):
        load_grid_data(FileData(file=tables[0], text="review", group="author"), "first", [], 0)
    with pytest.raises(ValueError, match=r"there is no data set 'citties'; there are .*Write \{file: ...\}"):
        load_grid_data(CatalogueData(name="citties"), "citties", [], 0)

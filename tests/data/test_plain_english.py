import sys

import pandas as pd
import pytest

from microtome.data.plain_english import SOURCES, SPLITS, passages_of, plain_english, splits_of

THREE = ["gutenberg", "brown", "news"]


def documents(count: int, sentences: int) -> pd.DataFrame:
    texts = [" ".join(f"Sentence {row} of text {text}." for row in range(sentences)) for text in range(count)]
    return pd.DataFrame({"text": texts, "document": range(count)})


@pytest.fixture(autouse=True)
def small_sources(monkeypatch):
    """Three sources in memory: few long documents, many short ones, and next to nothing."""
    sizes = {"gutenberg": (17, 400), "brown": (500, 20), "news": (12, 3)}
    module = sys.modules["microtome.data.plain_english"]
    monkeypatch.setattr(module, "_READ", {name: lambda size=size: documents(*size) for name, size in sizes.items()})


def test_whole_documents_by_default():
    table = plain_english(THREE)
    assert table.columns.tolist() == ["text", "source", "document", "part", "split"]
    assert table.groupby("source").size().to_dict() == {"gutenberg": 17, "brown": 500, "news": 12}
    assert table["document"].is_unique
    assert table["document"][0] == "gutenberg:0"
    assert (table["part"] == 0).all()


def test_splits_share_no_document_and_hold_everything():
    whole = plain_english(THREE)
    parts = [plain_english(THREE, split=split) for split in SPLITS]
    names = [set(part["document"]) for part in parts]
    assert set.union(*names) == set(whole["document"])
    assert sum(map(len, names)) == len(whole)
    sizes = whole.groupby(["source", "split"]).size().unstack()
    assert sizes.loc["brown"].to_dict() == {"fit": 400, "test": 50, "validation": 50}
    assert sizes.loc["gutenberg"].to_dict() == {"fit": 13, "test": 2, "validation": 2}


def test_a_held_out_source_is_test_alone():
    assert set(plain_english(THREE, split="fit", held_out=["news"])["source"]) == {"gutenberg", "brown"}
    assert (plain_english(THREE, split="test", held_out=["news"])["source"] == "news").sum() == 12
    with pytest.raises(ValueError, match=r"no document of \['news'\] is in the split 'fit'"):
        plain_english(["news"], split="fit", held_out=["news"])


def test_the_split_of_a_document_depends_on_names_alone():
    names = [f"brown:{number}" for number in range(50)]
    split = dict(zip(names, splits_of(names), strict=True))
    assert dict(zip(names[::-1], splits_of(names[::-1]), strict=True)) == split
    assert splits_of(["bible:bible-kjv"]) == ["test"]


def test_draws_are_balanced_by_characters_and_nested():
    large = plain_english(THREE, characters=60_000, passage=500, seed=1)
    sizes = large.assign(size=large["text"].str.len()).groupby("source")["size"].sum()
    news = plain_english(["news"])["text"].str.len().sum()
    assert sizes["news"] == news  # all there is
    for source in ("gutenberg", "brown"):
        assert 0 <= sizes[source] - (60_000 - news) // 2 < 500
    small = plain_english(THREE, characters=20_000, passage=500, seed=1)
    keys = large[["document", "part"]].apply(tuple, axis=1).tolist()
    drawn = small[["document", "part"]].apply(tuple, axis=1).tolist()
    assert set(drawn) < set(keys)
    assert drawn == [key for key in keys if key in set(drawn)]
    other = plain_english(THREE, characters=20_000, passage=500, seed=2)
    assert set(other["text"]) != set(small["text"])


def test_passages_hold_the_text_and_end_with_sentences():
    text = plain_english(["gutenberg"])["text"][0]
    pieces = passages_of(text, 300)
    assert " ".join(pieces) == text
    assert all(len(piece) <= 300 and piece.endswith(".") for piece in pieces)
    assert passages_of("short", 300) == ["short"]
    assert passages_of("x" * 250, 100) == ["x" * 100, "x" * 100, "x" * 50]
    assert passages_of("one two three four", 8) == ["one two", "three", "four"]
    assert passages_of('He said "go." Then he left the room.', 30) == ['He said "go." Then he left the', "room."]
    assert passages_of("First part.\n\nSecond part is here. And more.", 20) == [
        "First part.",
        "Second part is here.",
        "And more.",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sources": ["novels"]}, r"sources is \['novels'\]. Give a list of one or more of \['gutenberg', "),
        ({"sources": "brown"}, r"sources is 'brown'"),
        ({"sources": ["brown", "brown"]}, r"each once"),
        ({"held_out": ["novels"]}, r"held_out is \['novels'\]"),
        ({"split": "train"}, r"split is 'train'. Give 'fit', 'validation', 'test', or None"),
        ({"characters": 0}, r"characters is 0. Give 1 or more"),
        ({"passage": 99}, r"passage is 99 characters. Give 100 or more"),
    ],
)
def test_bad_choices(arguments, message):
    with pytest.raises(ValueError, match=message):
        plain_english(**{"sources": THREE, **arguments})


@pytest.mark.slow
@pytest.mark.network
class TestRealSources:
    @pytest.fixture(autouse=True)
    def small_sources(self):
        """The real ones."""

    def test_documents_and_characters(self):
        table = plain_english([*SOURCES, "bible"])
        sizes = table.assign(size=table["text"].str.len()).groupby("source")["size"].agg(["count", "sum"])
        assert sizes.apply(tuple, axis=1).to_dict() == {
            "gutenberg": (17, 7_389_934),
            "brown": (500, 5_958_764),
            "encyclopedia": (94, 2_550_010),
            "editorials": (498, 545_598),
            "news": (293, 351_838),
            "reviews": (300, 328_500),
            "bible": (1, 4_331_976),
        }
        assert table["text"].is_unique
        assert table.loc[table["source"] == "bible", "split"].tolist() == ["test"]

import sys
from collections import Counter

import numpy as np
import pandas as pd
import pytest

from microtome.data.lines import PASSAGE_CHARACTERS, WIDTHS, lines, passages, wrapped


def sentences(count: int, seed: int = 0) -> list[str]:
    generator = np.random.default_rng(seed)
    return [" ".join("x" * length for length in generator.integers(1, 12, 15)) + "." for _ in range(count)]


@pytest.fixture
def made_up_corpus(monkeypatch):
    table = pd.DataFrame(
        [(text, f"c{document:02}", "news") for document in range(30) for text in sentences(200, document)],
        columns=["text", "group", "genre"],
    )
    monkeypatch.setattr(sys.modules["microtome.data.lines"], "brown_sentences", lambda repeated: table)


def test_passages_are_whole_sentences_in_order():
    texts = sentences(100)
    found = passages(texts)
    assert " ".join(texts).startswith(" ".join(found))
    assert all(PASSAGE_CHARACTERS <= len(passage) < PASSAGE_CHARACTERS + 300 for passage in found)
    assert len(" ".join(texts)) - len(" ".join(found)) < PASSAGE_CHARACTERS + 300
    assert passages(["short."]) == []


@pytest.mark.parametrize("width", [WIDTHS[0], 40, WIDTHS[-1]])
def test_wrapped_lines_are_full(width):
    text = " ".join(sentences(20))
    words = text.split()
    found = wrapped(text, width).split("\n")
    assert " ".join(found).split() == words[: sum(len(line.split()) for line in found)]
    used = 0
    for line in found:
        used += len(line.split())
        assert len(line) <= width < len(line) + 1 + len(words[used])  # the next word did not fit


def test_words_stay_whole():
    assert wrapped("a " + "b" * 30 + " c d e f g", 15) == "a\n" + "b" * 30
    assert wrapped("aaaaaaaaaaaa bb-ccccc dddd eeee", 16) == "aaaaaaaaaaaa\nbb-ccccc dddd"


@pytest.mark.usefixtures("made_up_corpus")
def test_widths_are_dealt_evenly_over_documents():
    table = lines()
    assert list(table.columns) == ["text", "group", "genre", "width"]
    assert table["group"].nunique() == 30
    counts = Counter(table["width"])
    assert set(counts) == set(WIDTHS)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert table.groupby("group")["width"].nunique().min() > 5
    longest = table["text"].str.split("\n").map(lambda found: max(map(len, found)))
    assert (longest <= table["width"]).all()
    assert (longest == table["width"]).any()
    pd.testing.assert_frame_equal(lines(), table)
    assert lines(seed=1)["width"].tolist() != table["width"].tolist()


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.usefixtures("empty_cache")
def test_the_real_corpus():
    table = lines()
    assert len(table) == 6595
    assert table["group"].nunique() == 500
    assert set(table["width"].value_counts()) == {48, 49}

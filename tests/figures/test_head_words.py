"""The figure of heads and their words: every head, its numbers, its words as they are spelled, the caveat."""

import pandas as pd
import pytest

from microtome.figures.head_words import head_words

TABLE = pd.DataFrame(
    {
        "layer": 14,
        "head": [0, 1, 2],
        "peer_r2": [0.25, 0.75, -0.1],
        "drop_kl": [0.1, 0.3, -0.02],
        "words": ["cat dog bird", "<b> & </b>", "one " * 60],
        "plain_words": ["the a", "of", ""],
    }
)


def texts(figure) -> list[list[str]]:
    return [list(trace.text) for trace in figure.data]


def test_every_head_has_its_numbers_and_words() -> None:
    figure = head_words(TABLE)
    r2, drop, words, bare = texts(figure)
    assert r2 == ["0.25", "0.75", "-0.10"]
    assert drop == ["0.10", "0.30", "-0.02"]
    assert words[0] == "cat dog bird"
    assert words[1] == "&lt;b&gt; &amp; &lt;/b&gt;"
    assert words[2].count("<br>") == 1
    assert words[2].endswith("…")
    assert bare == ["the a", "of", "–"]
    assert list(figure.layout.yaxis.ticktext) == ["head 0", "head 1", "head 2"]
    assert "layer 14" in figure.layout.title.text
    assert figure.data[0].marker.color[1] != figure.data[0].marker.color[0]
    # a bar of R2 below 0 stays at 0, its number does not
    assert list(figure.data[0].x) == [0.25, 0.75, 0.0]


def test_the_caveat_is_on_the_figure() -> None:
    notes = " ".join(note.text for note in head_words(TABLE).layout.annotations)
    assert "cannot say whose" in notes.replace("<br>", " ")


def test_heads_that_matter_most_come_first() -> None:
    figure = head_words(TABLE, sort_by="drop_kl")
    assert list(figure.layout.yaxis.ticktext) == ["head 1", "head 0", "head 2"]
    assert texts(figure)[0] == ["0.75", "0.25", "-0.10"]


def test_lenses_of_single_heads_show_their_own_kl() -> None:
    alone = TABLE.drop(columns=["plain_words", "layer"]).assign(drop_kl=float("nan"), kl=[3.0, 2.0, 1.0])
    figure = head_words(alone)
    assert texts(figure)[1] == ["3.00", "2.00", "1.00"]
    assert len(figure.data) == 3
    assert any(note.text == "KL alone, nats" for note in figure.layout.annotations)
    with pytest.raises(ValueError, match="sort_by='drop_kl'"):
        head_words(alone, sort_by="drop_kl")


def test_bad_tables_are_told() -> None:
    with pytest.raises(KeyError, match="no column"):
        head_words(TABLE.drop(columns="peer_r2"))
    with pytest.raises(ValueError, match="names a head twice"):
        head_words(pd.concat([TABLE, TABLE]))
    with pytest.raises(ValueError, match="is empty"):
        head_words(TABLE[:0])
    with pytest.raises(ValueError, match="sort_by='words'"):
        head_words(TABLE, sort_by="words")

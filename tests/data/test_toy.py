import pytest

from microtome.data.toy import toy_sentiment


@pytest.mark.parametrize("rows", [2, 38, 200, 1440])
def test_rows_differ_and_labels_are_balanced(rows):
    table = toy_sentiment(rows)
    assert len(table) == rows
    assert table["text"].is_unique
    assert table["label"].dtype == bool
    assert table["label"].sum() * 2 == rows
    assert list(table.index) == list(range(rows))


def test_a_group_has_one_label_and_frames_have_both_equally():
    table = toy_sentiment(200)
    assert (table.groupby("group")["label"].nunique() == 1).all()
    assert table["group"].nunique() == 40
    for frame in ("template", "noun"):
        assert (table.groupby(frame)["label"].mean() == 0.5).all()
        assert table[frame].nunique() == 6


def test_the_adjective_is_in_the_text_and_articles_fit():
    table = toy_sentiment(1440)
    assert all(adjective in text for adjective, text in zip(table["group"], table["text"], strict=True))
    assert not table["text"].str.contains(r"\b[Aa] [aeiou]").any()
    assert table["text"].str.contains(" an awful ").any()


def test_seed_decides_everything():
    assert toy_sentiment(seed=1).equals(toy_sentiment(seed=1))
    assert not toy_sentiment(seed=1).equals(toy_sentiment(seed=2))


@pytest.mark.parametrize("rows", [0, 1, 3, 1442])
def test_impossible_sizes(rows):
    with pytest.raises(ValueError, match=f"rows is {rows}. Give an even number from 2 to 1440"):
        toy_sentiment(rows)

"""Variety and repetition of texts, counted by hand."""

import math

import pytest

from microtome.interventions.text_measures import distinct, longest_loop, ngrams, pooled_distinct, text_measures


def test_ngrams_of_words():
    assert ngrams(["a", "b", "c", "d"], 3) == [("a", "b", "c"), ("b", "c", "d")]
    assert ngrams(["a"], 2) == []


@pytest.mark.parametrize(
    ("text", "n", "share"),
    [("a b c d", 1, 1), ("a b a b", 1, 0.5), ("a b a b", 2, 2 / 3), ("a a a a", 3, 0.5), ("a a a a a", 2, 0.25)],
)
def test_distinct_by_hand(text, n, share):
    assert distinct(text.split(), n) == pytest.approx(share)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", 0),
        ("a", 0),
        ("a b", 0),
        ("a a", 1),
        ("x a a a a", 3),
        ("x a b a b a b", 4),
        ("a b c a b", 0),  # the second round is not whole
        ("a b c a b c", 3),
        ("a a a b", 0),  # it has ended
    ],
)
def test_loops_at_the_end(text, words):
    assert longest_loop(text.split()) == words


def test_a_row_per_text():
    table = text_measures(["The the THE the", "", "  \n", "one two three", "one"])
    assert table["n_words"].tolist() == [4, 0, 0, 3, 1]
    assert table["empty"].tolist() == [False, True, True, False, False]
    assert table["distinct_1"].tolist()[0] == 0.25
    assert table["distinct_1"].isna().tolist() == [False, True, True, False, False]
    assert table["repetition"].tolist()[0] == 0.5
    assert table["repetition"].isna().tolist() == [False, True, True, False, True]
    assert table["loop"].tolist() == [3, 0, 0, 0, 0]


def test_pooled_counts_over_all_texts():
    assert pooled_distinct(["a b", "a b"], 1) == 0.5
    assert pooled_distinct(["a b", "b a"], 2) == 1
    assert pooled_distinct(["a b", "", "A B"], 2) == 0.5
    assert math.isnan(pooled_distinct(["", "a"], 2))
    assert math.isnan(pooled_distinct([], 1))

import numpy as np
import pandas as pd
import pytest

from microtome.probes import groups as groups_module
from microtome.probes.groups import group_codes, merged_groups, normalised_texts

TEXTS = ["A cat sat", "a  CAT sat ", "Straße", "STRASSE", "dogs", "birds"]


def test_rows_are_their_own_groups():
    assert group_codes("rows", n_rows=4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "groups",
    [["b", "b", "a", "c"], np.array([7, 7, 2, 9]), pd.Series(["x", "x", "y", "z"]), [("k", 1), ("k", 1), ("l", 1), 3]],
    ids=["strings", "numbers", "series", "tuples"],
)
def test_codes_follow_first_appearance(groups):
    assert group_codes(groups, n_rows=4).tolist() == [0, 0, 1, 2]


def test_equal_text_in_different_groups_names_text_and_groups():
    with pytest.raises(
        ValueError, match=r"2 text value\(s\) occur in more than one group.*'a cat sat' in groups 'p', 'q'"
    ):
        group_codes(["p", "q", "r", "s", "t", "u"], n_rows=6, texts=TEXTS)
    with pytest.raises(ValueError, match=r"merged_groups\(groups, texts"):
        group_codes("rows", n_rows=6, texts=TEXTS)


def test_equal_entity_in_different_groups_is_refused_and_missing_keys_are_not():
    entities = {"city": ["Rome", None, "Rome", None]}
    with pytest.raises(ValueError, match=r"entity key in column 'city'.*'Rome' in groups 0, 2"):
        group_codes("rows", n_rows=4, entities=entities)
    assert group_codes([5, 1, 5, 2], n_rows=4, entities=entities).tolist() == [0, 1, 0, 2]


def test_missing_texts_take_no_part():
    assert group_codes("rows", n_rows=3, texts=["a", None, float("nan")]).tolist() == [0, 1, 2]
    assert merged_groups("rows", ["a", None, "A"]).tolist() == [0, 1, 0]


def test_merging_is_what_the_check_asks_for():
    merged = merged_groups("rows", TEXTS)
    assert merged.tolist() == [0, 0, 1, 1, 2, 3]
    assert group_codes(merged, n_rows=6, texts=TEXTS).tolist() == merged.tolist()


def test_merging_chains_groups_texts_and_entities():
    # row 0 -group- 1 -text- 2 -entity- 3; row 4 alone
    groups, texts, entity = [0, 0, 1, 2, 3], ["a", "b", "B", "c", "d"], {"who": [None, None, "x", "x", None]}
    assert merged_groups(groups, texts, entities=entity).tolist() == [0, 0, 0, 0, 1]
    assert merged_groups(groups).tolist() == [0, 0, 1, 2, 3]
    once = merged_groups(groups, texts, entities=entity)
    assert merged_groups(once, texts, entities=entity).tolist() == once.tolist()


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ([1, 2, 3], ValueError, "groups has 3 entries for 4 rows"),
        (["a", "a", "a", "a"], ValueError, "All 4 rows are in one group"),
        (["a", None, "b", "b"], ValueError, r"no key for 1 of 4 rows \(first: row 1\)"),
        (np.array([0.0, 1.0, np.nan, 1.0]), ValueError, r"no key for 1 of 4 rows \(first: row 2\)"),
        ("question", TypeError, "groups='question' is a string"),
        (7, TypeError, "needs one key per row"),
        (np.zeros((4, 2)), ValueError, r"shape \(4, 2\)"),
    ],
)
def test_bad_groups_are_named(groups, error, message):
    with pytest.raises(error, match=message):
        group_codes(groups, n_rows=4)


def test_bad_texts_are_named():
    with pytest.raises(ValueError, match="texts has 2 entries for 4 rows"):
        group_codes([1, 2, 3, 4], n_rows=4, texts=["a", "b"])
    with pytest.raises(TypeError, match=r"texts\[1\] is 5 \(int\)"):
        group_codes([1, 2], n_rows=2, texts=["a", 5])
    with pytest.raises(ValueError, match="needs texts or entities"):
        merged_groups("rows")


def test_a_text_is_normalised_once_however_many_tokens_it_has(monkeypatch):
    seen = []
    real = groups_module.unicodedata.normalize
    monkeypatch.setattr(
        groups_module.unicodedata, "normalize", lambda form, text: seen.append(text) or real(form, text)
    )
    compared = normalised_texts(["One  Text", "two", None, "One  Text"] * 500, n_rows=2000)
    assert compared[:4].tolist() == ["one text", "two", None, "one text"]
    assert seen == ["One  Text", "two"]

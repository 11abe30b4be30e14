import sys
from dataclasses import replace

import pandas as pd
import pytest

from microtome.data.relations import (
    ANALOGIES_TABLE,
    RELATIONS,
    parse_analogies,
    parse_antonyms,
    relation_pairs,
    select_countries,
)

ANALOGIES = """: gram8-plural
cat cats dog dogs
dog dogs cat cats
cat cats new_word new_words
: family
boy girl king queen
: gram3-comparative
big bigger bad worse
"""
ADJECTIVES = """  1 the licence | of many
00000001 00 a 02 hot 0 warm(p) 0 002 ! 00000002 a 0101 & 00000003 a 0000 | of heat; "x"
00000002 00 a 01 cold 0 001 ! 00000001 a 0101 | of cold
00000003 00 a 01 Tepid 0 002 ! 00000002 a 0101 ! 00000004 a 0101 | rare
00000004 00 a 01 unhot 0 002 ! 00000001 a 0101 ! 00000003 a 0101 | derived
00000005 00 a 01 big 0 002 ! 00000006 a 0101 ! 00000006 a 0102 | size
00000006 00 a 02 small 0 little 0 002 ! 00000005 a 0101 ! 00000005 a 0201 | size
"""
COUNTS = """hot%3:00:01:: 1 9
cold%3:00:01:: 1 8
cold%1:00:01:: 1 90
tepid%5:00:01:: 1 4
unhot%3:00:01:: 1 50
big%3:00:01:: 1 30
little%3:00:01:: 1 20
small%3:00:01:: 1 25
"""


def country(name: str, capital: str, currency: str, population: int = 10_000_000) -> dict:
    return {"name": name, "capital": capital, "currencyname": currency, "population": population}


def test_analogies_give_each_pair_of_a_known_relation_once():
    assert parse_analogies(ANALOGIES).to_dict("list") == {
        "relation": ["plural"] * 3 + ["comparative"] * 2,
        "subject": ["cat", "dog", "new word", "big", "bad"],
        "object": ["cats", "dogs", "new words", "bigger", "worse"],
    }


def test_opposites_are_frequent_and_not_derived_and_one_to_a_subject():
    table = parse_antonyms(ADJECTIVES, COUNTS)
    assert list(zip(table["subject"], table["object"], strict=True)) == [
        *(("big", "small"), ("small", "big"), ("little", "big"), ("cold", "hot"), ("hot", "cold")),
    ]


def test_countries_take_their_article_and_one_word_of_currency():
    table = select_countries(
        [
            country("The Netherlands", "Amsterdam", "Euro"),
            country("China", "Beijing", "Yuan Renminbi", 10**9),
            country("Mexico", "Mexico City", "Peso"),
            country("Belarus", "Minsk", "Belarusian ruble"),
            country("Andorra", "Andorra la Vella", "Euro", 80_000),
            country("Kosovo", "Pristina", "Euro"),
            country("Nowhere", "", ""),
        ]
    )
    assert list(table.itertuples(index=False, name=None)) == [
        ("capital", "China", "Beijing"),
        ("currency", "China", "yuan"),
        ("capital", "the Netherlands", "Amsterdam"),
        ("currency", "the Netherlands", "euro"),
        ("currency", "Mexico", "peso"),
        ("capital", "Belarus", "Minsk"),
        ("currency", "Belarus", "ruble"),
    ]


@pytest.fixture
def small_tables(cache, monkeypatch):
    module = sys.modules["microtome.data.relations"]
    names = {"capital": "Paris", "plural": "cats", "opposite": "cold"}
    pairs = [
        ("plural", "cat", "cats"),
        ("plural", "dog", "dogs"),
        ("opposite", "hot", "cold"),
        ("opposite", "cold", "hot"),
        ("opposite", "big", "small"),
        ("opposite", "little", "big"),
        ("capital", "France", "Paris"),
        ("capital", "Paris", "France"),
    ]
    path = ANALOGIES_TABLE.path
    pd.DataFrame(pairs, columns=["relation", "subject", "object"]).to_parquet(path)
    table = replace(ANALOGIES_TABLE, check=lambda *_: None)
    monkeypatch.setattr(module, "ANALOGIES_TABLE", table)
    monkeypatch.setattr(module, "_TABLES", dict.fromkeys(names, table))


@pytest.mark.usefixtures("small_tables")
def test_words_that_are_linked_are_one_group():
    table = relation_pairs(["opposite"])
    assert table["group"].tolist() == ["opposite:cold"] * 2 + ["opposite:big"] * 2
    assert relation_pairs(["plural"])["group"].tolist() == ["plural:cat", "plural:dog"]
    assert relation_pairs(["capital"])["group"].tolist() == ["capital:France", "capital:Paris"]


@pytest.mark.usefixtures("small_tables")
def test_templates_multiply_the_rows():
    assert len(relation_pairs(["plural"])) == 2
    table = relation_pairs(["plural"], templates=None)
    assert table["template"].unique().tolist() == list(RELATIONS["plural"].templates)
    assert len(table) == 2 * len(RELATIONS["plural"].templates)


def test_every_template_names_the_subject_once_and_ends_without_a_space():
    for kind in RELATIONS.values():
        for template in kind.templates:
            assert template.count("{subject}") == 1
            assert template == template.strip()


@pytest.mark.parametrize("names", [[], "capital", ["capital", "capital"], ["capitals"]])
def test_unknown_relations(names):
    with pytest.raises(ValueError, match=r"Give a list of one or more of \['capital', .* each once"):
        relation_pairs(names)


def test_no_templates():
    with pytest.raises(ValueError, match=r"templates is 0. Give 1 or more, or None for all"):
        relation_pairs(["capital"], templates=0)


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.usefixtures("empty_cache")
def test_the_real_packages():
    table = relation_pairs()
    assert table.groupby("relation").size().to_dict() == {
        **{"capital": 154, "currency": 163, "opposite": 252, "city_state": 67, "nationality": 41},
        **{"opposite_prefix": 29, "plural": 37, "third_person": 30, "comparative": 37, "superlative": 34},
        **{"adverb": 32, "past_tense": 40},
    }
    assert not table.duplicated(["relation", "subject"]).any()
    keys = set(zip(table["relation"], table["subject"], table["object"], strict=True))
    assert {("capital", "France", "Paris"), ("currency", "Japan", "yen"), ("opposite", "hot", "cold")} <= keys
    assert {("plural", "mouse", "mice"), ("past_tense", "going", "went"), ("comparative", "bad", "worse")} <= keys
    assert table.loc[table["relation"] == "opposite", "group"].nunique() == 110

"""The words of true and false statements are balanced in every group, so that only knowledge tells them apart."""

from collections import Counter

import numpy as np
import pandas as pd
import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold, cross_val_predict
from sklearn.pipeline import make_pipeline

from microtome.data.statements import VARIANTS, Relation, build_statements, swap_pairs

COLOUR = Relation("colour", ("{entity} {is_} {object}", "the colour of {entity} {is_} {object}"))
SIZE = Relation("size", ("{entity} {is_} of size {object}",), alike=frozenset([frozenset(("large", "huge"))]))
SIZES = ("small", "large", "huge", "tiny", "flat")


def facts(count: int = 62) -> pd.DataFrame:
    """Made-up things; two fifths of them are red."""
    colours = ["red", "red", "blue", "green", "grey"]
    return pd.DataFrame(
        {
            "entity": [f"thing{row}" for row in range(count)],
            "colour": [colours[row % 5] for row in range(count)],
            "size": [SIZES[row // 2 % 5] for row in range(count)],
            "popularity": np.arange(count),
        }
    )


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return build_statements(facts(), [COLOUR], variants=VARIANTS, seed=1)


def words(texts: pd.Series) -> Counter:
    return Counter(" ".join(texts.str.lower().str.replace(".", "")).split())


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_word_is_as_often_true_as_false_in_every_group(table, variant):
    for _, rows in table[table["variant"] == variant].groupby("group"):
        assert words(rows.loc[rows["label"], "text"]) == words(rows.loc[~rows["label"], "text"])


def test_a_bag_of_words_is_at_chance(table):
    for _, rows in table.groupby("variant"):
        model = make_pipeline(CountVectorizer(token_pattern=r"\w+"), LogisticRegression())
        predicted = cross_val_predict(
            model, rows["text"], rows["label"], groups=rows["group"], cv=GroupKFold(5, shuffle=True, random_state=0)
        )
        assert abs((predicted == rows["label"]).mean() - 0.5) < 0.03


def test_labels_are_what_the_facts_say(table):
    colour = dict(zip(facts()["entity"], facts()["colour"], strict=True))
    for row in table.itertuples():
        entities, objects = row.entity.split("; "), row.object.split("; ")
        holds = [colour[entity] == thing for entity, thing in zip(entities, objects, strict=True)]
        assert row.true_object == "; ".join(colour[entity] for entity in entities)
        assert row.label == ((not holds[0]) if row.variant == "negated" else all(holds))
        assert all(name in row.text.lower() for name in (*entities, *objects))


def test_counts_columns_and_balance(table):
    assert list(table.columns) == [
        *("text", "label", "group", "variant", "relation", "template", "entity", "object", "true_object"),
        "popularity",
    ]
    # 62 entities: 31 pairs in 15 blocks, the last of three pairs, one of which takes no part in conjunctions
    assert table.groupby("variant").size().to_dict() == {"plain": 124, "negated": 124, "conjunction": 120}
    assert (table.groupby("variant")["label"].mean() == 0.5).all()
    assert table["group"].nunique() == 15
    assert table["text"].is_unique
    assert table["label"].dtype == bool


def test_sentences(table):
    first = table.iloc[0]
    assert first["text"] in ("Thing0 is red.", "The colour of thing0 is red.")
    assert (table["text"].str[0] == table["text"].str[0].str.upper()).all()
    assert table["text"].str.endswith(".").all()
    assert table.loc[table["variant"] == "negated", "text"].str.contains(" is not ").all()
    both = table[table["variant"] == "conjunction"].iloc[0]
    assert both["text"].startswith("It is the case both that ")
    assert both["popularity"] == min(int(name[5:]) for name in both["entity"].split("; "))


def test_statements_of_an_entity_share_group_and_template(table):
    plain = table[table["variant"] == "plain"]
    assert (plain.groupby("entity")[["group", "template"]].nunique() == 1).all(axis=None)
    assert (plain.groupby("entity")["label"].sum() == 1).all()
    assert sorted(plain["template"].unique()) == ["colour.0", "colour.1"]
    group_of = plain.drop_duplicates("entity").set_index("entity")["group"]
    for row in table[table["variant"] == "conjunction"].itertuples():
        assert {group_of[name] for name in row.entity.split("; ")} == {row.group}


def test_variants_alone_and_in_any_order_are_the_same_rows(table):
    for variants in (["conjunction"], ["negated", "plain"]):
        expected = pd.concat([table[table["variant"] == variant] for variant in variants], ignore_index=True)
        pd.testing.assert_frame_equal(build_statements(facts(), [COLOUR], variants=variants, seed=1), expected)
    other = build_statements(facts(), [COLOUR], seed=2)
    assert set(other["text"]) != set(table.loc[table["variant"] == "plain", "text"])


def test_one_pairing_serves_all_relations_and_never_exchanges_what_is_alike():
    table = build_statements(facts(), [COLOUR, SIZE])
    assert table["relation"].value_counts().to_dict() == {"colour": 124, "size": 124}
    assert (table.groupby("entity")["group"].nunique() == 1).all()
    false = table[~table["label"]]
    assert (false["object"] != false["true_object"]).all()
    sizes = false[false["relation"] == "size"]
    assert all({row.object, row.true_object} != {"large", "huge"} for row in sizes.itertuples())
    for _, rows in table.groupby("group"):
        assert words(rows.loc[rows["label"], "text"]) == words(rows.loc[~rows["label"], "text"])


@pytest.mark.parametrize("count", [2, 4, 6, 100])
def test_pairs_hold_everything_once_and_do_not_clash(count):
    def same_half(first: int, second: int) -> bool:
        return (first < count // 2) == (second < count // 2)

    pairs = swap_pairs(count, same_half, np.random.default_rng(0))
    assert sorted(pairs.ravel().tolist()) == list(range(count))
    assert not any(same_half(*pair) for pair in pairs.tolist())


def test_what_cannot_be_paired():
    with pytest.raises(ValueError, match=r"5 entities cannot be paired. Give an even number"):
        build_statements(facts(5), [COLOUR])
    with pytest.raises(ValueError, match=r"no way to pair 6 entities .* More than half of them may share one object"):
        build_statements(facts(6).assign(colour="red"), [COLOUR])


@pytest.mark.parametrize("variants", [[], "plain", ["plain", "plain"], ["negation"]])
def test_unknown_variants(variants):
    with pytest.raises(ValueError, match=r"Give a list of one or more of \['plain', 'negated', 'conjunction'\]"):
        build_statements(facts(), [COLOUR], variants=variants)

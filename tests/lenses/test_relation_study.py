import importlib

import numpy as np
import pytest
import torch

from microtome.capture.models import LoadedModel
from microtome.lenses.relation_study import relation_study

WORDS = [
    *("cat", "dog", "bird", "film", "book", "day", "man", "woman", "child"),
    *("house", "river", "tree", "city", "old", "new", "big", "small", "red"),
]
PAIRS = list(zip(WORDS, [*WORDS[1:], WORDS[0]], strict=True))
TEMPLATE = "the {subject} is a"


@pytest.fixture
def loaded(tiny, word_tokenizer):
    return LoadedModel.from_module(tiny("llama"), word_tokenizer, name="tiny")


def test_a_study_of_a_model_that_knows_nothing_is_complete(loaded):
    study = relation_study(loaded, PAIRS, TEMPLATE, examples=3, betas=(1.0, 2.0), ranks=(8, 32, 64))
    faithfulness = study.faithfulness
    assert faithfulness["method"].unique().tolist() == ["relation", "identity", "mean", "logit lens", "shuffled"]
    assert (faithfulness.groupby("prompts")["count"].nunique() == 1).all()
    every = faithfulness[faithfulness["prompts"] == "all"]
    assert (every["count"] == (study.pairs["part"] == "test").sum()).all()
    assert (every["low"] <= every["share"]).all()
    assert (every["share"] <= every["high"]).all()
    assert study.pairs["part"].value_counts().to_dict() == {"test": 10, "validation": 5, "example": 3}
    assert set(study.pairs["subject"]) == set(WORDS)
    assert study.depth in (0, 1, 2)
    assert study.beta in (1.0, 2.0)
    assert "faithful" in repr(study)
    assert set(study.to_frame()["score"]) <= {"faithfulness", "causality"}
    again = relation_study(loaded, PAIRS, TEMPLATE, examples=3, betas=(1.0, 2.0), ranks=(8, 32, 64))
    assert again.faithfulness.equals(faithfulness)
    torch.testing.assert_close(again.operator.jacobian, study.operator.jacobian)


def test_groups_stay_together(loaded):
    groups = [str(number // 2) for number in range(len(PAIRS))]
    study = relation_study(loaded, PAIRS, TEMPLATE, groups=groups, examples=2, depths=[1], betas=(1.0,), ranks=())
    part = dict(zip(study.pairs["subject"], study.pairs["part"], strict=True))
    of = dict(zip(WORDS, groups, strict=True))
    for first in WORDS:
        for second in WORDS:
            if first != second and of[first] == of[second] and first in part and second in part:
                assert part[first] == part[second]
    assert len(part) == len(WORDS) - 2  # the other pair of each example's group is left out
    assert study.rank is None
    assert study.causality.empty


@pytest.mark.parametrize(
    ("pairs", "settings", "message"),
    [
        (PAIRS[:5], {"examples": 2}, r"5 pairs in 5 groups do not leave 4 groups besides 2 examples"),
        (PAIRS, {"examples": 1}, "examples is 1. Give 2 or more"),
        (PAIRS, {"groups": ["a"]}, "there are 1 groups for 18 pairs"),
        ([*PAIRS, PAIRS[0]], {}, "Give each subject once"),
    ],
)
def test_bad_input(loaded, pairs, settings, message):
    with pytest.raises(ValueError, match=message):
        relation_study(loaded, pairs, TEMPLATE, **settings)


def test_known_pairs_are_edited(loaded, monkeypatch):
    """With the objects set to what the model says, all pairs are known, and whole states carry the answer over."""
    module = importlib.import_module("microtome.lenses.relation_study")

    real = module.relation_states

    def all_known(*arguments, **settings):
        states = real(*arguments, **settings)
        return type(states)(states.depths, states.subject, states.object, states.said, states.said)

    monkeypatch.setattr(module, "relation_states", all_known)
    study = relation_study(loaded, PAIRS, TEMPLATE, examples=3, depths=[0], betas=(1.0,), ranks=(32,))
    if study.rank is None:
        assert study.pairs.loc[study.pairs["part"] == "test", "said"].nunique() == 1
        return
    table = study.causality.set_index("method")
    assert table.loc["other state", "share"] == 1.0
    assert np.isnan(table.loc["random", "rank"])
    assert set(table.index) == {"relation", "identity", "random", "other state"}

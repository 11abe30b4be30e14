import importlib

import pytest
import torch

from microtome.capture.models import LoadedModel
from microtome.lenses.concept_directions import concept_directions, concept_study, mean_directions
from microtome.lenses.relation_prompts import relation_prompts
from microtome.lenses.relations import RelationOperator, relation_operator

WORDS = [
    *("cat", "dog", "bird", "film", "book", "day", "man", "woman", "child"),
    *("house", "river", "tree", "city"),
]


def planted(seed: int = 0):
    """Objects o = J s + b of subjects near three centres, J of rank 6 in 12 channels."""
    generator = torch.Generator().manual_seed(seed)
    jacobian = torch.randn(12, 6, generator=generator) @ torch.randn(6, 12, generator=generator)
    bias = torch.randn(12, generator=generator)
    row_space = jacobian.T @ torch.linalg.pinv(jacobian.T)
    centres = torch.randn(3, 12, generator=generator) * 3 @ row_space
    names = [name for name in ("euro", "franc", "peso") for _ in range(20)]
    s = centres.repeat_interleave(20, 0) + 0.3 * torch.randn(60, 12, generator=generator) @ row_space
    operator = RelationOperator((5,), jacobian[None], bias[None])
    return operator, s, names


def test_the_inverse_brings_objects_back_to_their_subjects():
    operator, s, names = planted()
    o = operator(s, 5)
    directions = concept_directions(operator, 5, 6, o, names)
    assert directions.names == ("euro", "franc", "peso")
    assert directions.counts == (20, 20, 20)
    torch.testing.assert_close(directions.vectors.norm(dim=1), torch.ones(3))
    # s lies in the row space of J, so that the direction is that of the subjects' mean
    means = torch.stack([s[start : start + 20].mean(0) for start in (0, 20, 40)])
    expected = torch.nn.functional.normalize(means, dim=1)
    torch.testing.assert_close(directions.vectors, expected, atol=1e-3, rtol=1e-3)


def test_unseen_subjects_are_classified_and_shuffled_names_are_not():
    operator, s, names = planted()
    odd, even = list(range(1, 60, 2)), list(range(0, 60, 2))
    directions = concept_directions(operator, 5, 6, operator(s[even], 5), [names[i] for i in even])
    truth = [names[i] for i in odd]
    assert directions.classify(s[odd]) == truth
    assert mean_directions(s[even], [names[i] for i in even], 5).classify(s[odd]) == truth
    mixed = [truth[i] for i in torch.randperm(30, generator=torch.Generator().manual_seed(1)).tolist()]
    wrong = concept_directions(operator, 5, 6, operator(s[even], 5), mixed).classify(s[odd])
    assert sum(a == b for a, b in zip(wrong, truth, strict=True)) < 25


def test_a_swap_moves_from_one_direction_to_another():
    operator, s, names = planted()
    directions = concept_directions(operator, 5, 6, operator(s, 5), names)
    change = directions.swap(s[:3], ["euro"] * 3, ["peso", "franc", "euro"], scale=2.0)
    expected = 2 * s[0].norm() * (directions.vectors[2] - directions.vectors[0])
    torch.testing.assert_close(change[0], expected)
    assert not change[2].any()
    with pytest.raises(KeyError, match=r"no direction for \['yen'\]; there are \['euro', 'franc', 'peso'\]"):
        directions.swap(s[:1], ["euro"], ["yen"])


def test_bad_input():
    operator, s, names = planted()
    with pytest.raises(ValueError, match="there are 2 names for 60 object states"):
        concept_directions(operator, 5, 6, s, names[:2])
    with pytest.raises(ValueError, match="rank is 13"):
        concept_directions(operator, 5, 13, s, names)
    with pytest.raises(ValueError, match="not fitted at depth 4"):
        concept_directions(operator, 4, 6, s, names)


@pytest.mark.parametrize("target", [None, 2])
def test_a_study_has_every_method_on_the_same_subjects(tiny, word_tokenizer, monkeypatch, target):
    module = importlib.import_module("microtome.lenses.concept_directions")

    real = module.relation_states

    def all_known(*arguments, **settings):
        states = real(*arguments, **settings)
        return type(states)(states.depths, states.subject, states.object, states.wanted, states.wanted)

    monkeypatch.setattr(module, "relation_states", all_known)
    model = LoadedModel.from_module(tiny("llama"), word_tokenizer, name="tiny")
    template = "the {subject} is a"
    pairs = [(word, ("cat", "dog", "man")[number % 3]) for number, word in enumerate(WORDS)]
    operator = relation_operator(model, relation_prompts(model, pairs[:2], template), [1], target=target)
    study = concept_study(
        model, pairs, template, operator, 1, examples=pairs[:1], target=target, ranks=(8, 32, 64), seed=1
    )
    assert study.directions.names == ("cat", "dog", "man")
    # 12 pairs besides the example, three or more to an object: a quarter tests
    assert study.table.groupby("score")["count"].unique().map(list).to_dict() == {"accuracy": [3], "causality": [3]}
    assert study.rank in (8, 32)
    assert study.table["share"].between(0, 1).all()
    assert study.choice["rank"].tolist() == [8, 32]


def test_a_relation_of_one_subject_to_an_object_has_no_concepts(tiny, word_tokenizer):
    model = LoadedModel.from_module(tiny("llama"), word_tokenizer, name="tiny")
    template = "the {subject} is a"
    pairs = [(word, WORDS[number - 1]) for number, word in enumerate(WORDS)]
    operator = RelationOperator((1,), torch.eye(32)[None], torch.zeros(1, 32))
    with pytest.raises(ValueError, match="0 objects have three subjects that the model knows"):
        concept_study(model, pairs, template, operator, 1)


def test_an_operator_of_another_model_or_target_is_told(tiny, word_tokenizer):
    model, other = (LoadedModel.from_module(tiny("llama", seed=n), word_tokenizer, name=str(n)) for n in (0, 1))
    template, pairs = "the {subject} is a", [(word, WORDS[0]) for word in WORDS]
    operator = relation_operator(model, relation_prompts(model, pairs[:1], template), [1], target=2)
    with pytest.raises(ValueError, match="the operator was made for weights"):
        concept_study(other, pairs, template, operator, 1, target=2)
    with pytest.raises(ValueError, match=r"o is at depth 2, target is None\. Give target=2"):
        concept_study(model, pairs, template, operator, 1)


def test_objects_of_one_first_token_cannot_be_edited_into_each_other(tiny, word_tokenizer, monkeypatch):
    """An edit of nothing would say the new object's token each time."""
    module = importlib.import_module("microtome.lenses.concept_directions")
    real = module.relation_states

    def all_known(*arguments, **settings):
        states = real(*arguments, **settings)
        return type(states)(states.depths, states.subject, states.object, states.wanted, states.wanted)

    monkeypatch.setattr(module, "relation_states", all_known)
    model = LoadedModel.from_module(tiny("llama"), word_tokenizer, name="tiny")
    pairs = [(word, ("old cat", "old dog")[number % 2]) for number, word in enumerate(WORDS)]
    operator = RelationOperator((1,), torch.eye(32)[None], torch.zeros(1, 32))
    with pytest.raises(ValueError, match="all begin with the same token"):
        concept_study(model, pairs, "the {subject} is a", operator, 1)
    pairs = [(word, ("cat", "dog")[number % 2]) for number, word in enumerate(WORDS)]
    with pytest.raises(ValueError, match="no rank is at most d_model, 32"):
        concept_study(model, pairs, "the {subject} is a", operator, 1, ranks=(64,))

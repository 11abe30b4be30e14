"""Relations as affine maps: exact on an affine toy, against finite differences on real ones."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from microtome.capture.models import LoadedModel
from microtome.lenses.relation_prompts import relation_prompts
from microtome.lenses.relations import (
    RelationOperator,
    edited_logits,
    relation_operator,
    relation_states,
)
from microtome.lenses.shared_prefix import SharedPrefix, common_prefix, shared_prefix
from microtome.lenses.unembedding import unembedding_of
from microtome.lenses.wilson_interval import wilson_interval

PAIRS = [("cat", "dog"), ("bird", "tree"), ("man", "woman"), ("river", "city"), ("day", "film")]
TEMPLATE = "the {subject} is a"
KINDS = ["llama", "gpt2", "neox", "gemma2", "qwen3"]


@pytest.fixture
def loaded(tiny, word_tokenizer):
    def build(kind: str) -> LoadedModel:
        return LoadedModel.from_module(tiny(kind), word_tokenizer, name=kind)

    return build


def test_prompts_hold_other_pairs_and_say_where_the_subject_ends(word_tokenizer):
    prompts = relation_prompts(word_tokenizer, PAIRS[:3], TEMPLATE, examples=PAIRS[:2])
    assert prompts.texts[0] == "the bird is a tree\nthe cat is a"
    assert prompts.texts[2] == "the cat is a dog\nthe bird is a tree\nthe man is a"
    words = [word_tokenizer.convert_ids_to_tokens(ids) for ids in prompts.ids]
    assert [row[place] for row, place in zip(words, prompts.subject_place, strict=True)] == ["cat", "bird", "man"]
    assert word_tokenizer.convert_ids_to_tokens(prompts.object_ids.tolist()) == ["dog", "tree", "woman"]
    two = relation_prompts(word_tokenizer, [("old man", "city")], TEMPLATE)
    assert two.ids[0][int(two.subject_place[0])] == word_tokenizer.convert_tokens_to_ids("man")
    assert len(prompts.take([2, 0])) == 2
    assert prompts.take([2, 0]).subjects == ["man", "cat"]


@pytest.mark.parametrize(
    ("pairs", "template", "message"),
    [
        ([], TEMPLATE, "there are no pairs"),
        (PAIRS, "the subject is", r"It must hold \{subject\} once"),
        ([("", "dog")], TEMPLATE, r"the pair \('', 'dog'\) does not continue"),
        ([("cat", "")], TEMPLATE, r"the pair \('cat', ''\) does not continue"),
    ],
)
def test_prompts_that_cannot_be_made(word_tokenizer, pairs, template, message):
    with pytest.raises(ValueError, match=message):
        relation_prompts(word_tokenizer, pairs, template)


def test_slow_tokenizers_are_refused():
    with pytest.raises(ValueError, match="need a fast tokenizer"):
        relation_prompts(SimpleNamespace(tokenizer=SimpleNamespace(is_fast=False)), PAIRS, TEMPLATE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_prefix_changes_nothing(tiny, kind):
    model = tiny(kind)
    ids = torch.arange(4, 30).reshape(2, 13)
    ids[1, :9] = ids[0, :9]
    prefix = shared_prefix(model, ids[0, :9].tolist())
    assert prefix.cache is not None
    with torch.no_grad():
        whole = model(input_ids=ids).logits[:, -4:]
        for _ in range(2):  # the kept cache is not written to
            torch.testing.assert_close(prefix.run(ids[:, 9:]).logits, whole, atol=2e-5, rtol=1e-4)
        anew = SharedPrefix(model, ids[0, :9].tolist()).run(ids[:, 9:]).logits[:, -4:]
    torch.testing.assert_close(anew, whole, atol=2e-5, rtol=1e-4)
    assert common_prefix(ids.tolist(), 20) == 9
    assert common_prefix(ids.tolist(), 5) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_jacobians_are_those_of_central_differences(loaded, kind):
    model = loaded(kind)
    end = unembedding_of(model)
    prompts = relation_prompts(model, PAIRS[:1], TEMPLATE, examples=PAIRS[1:3])
    operator = relation_operator(model, prompts, [0, 1, 2], rows=5)
    states = relation_states(model, prompts, [0, 1, 2], end)
    step = 1e-2
    for depth in (0, 1, 2):
        generator = torch.Generator().manual_seed(depth)
        direction = nn.functional.normalize(torch.randn(1, 32, generator=generator), dim=-1)
        ahead, behind = (_final(model, prompts, depth, sign * step * direction) for sign in (1, -1))
        torch.testing.assert_close(
            (ahead - behind) / (2 * step), direction @ operator.jacobian[depth].T, atol=2e-3, rtol=2e-2
        )
        # at its own point LRE with beta 1 is o
        torch.testing.assert_close(operator(states.at(depth), depth), states.object, atol=1e-4, rtol=1e-4)


def _final(model, prompts, depth, delta):
    """r_L at the last token with delta added at the subject: whole texts, no prefix."""
    from microtome.capture.dissect import dissect
    from microtome.capture.taps import taps
    from microtome.lenses.relations import stream_site

    site = stream_site(dissect(model.module), depth)

    def edit(value):
        change = torch.zeros_like(value)
        change[:, int(prompts.subject_place[0])] = delta
        return change

    with torch.no_grad(), taps(model, "resid_post.2", {site: edit}) as tape:
        model.module(input_ids=torch.tensor(prompts.ids))
    return tape["resid_post.2"][:, -1]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_states_and_answers_are_the_models_own(loaded, kind):
    model = loaded(kind)
    prompts = relation_prompts(model, [*PAIRS, ("old man", "city")], TEMPLATE, examples=PAIRS[:2])
    states = relation_states(model, prompts, [0, 3], unembedding_of(model))
    for row, ids in enumerate(prompts.ids):
        with torch.no_grad():
            output = model.module(input_ids=torch.tensor([ids]), output_hidden_states=True)
        assert int(output.logits[0, -1].argmax()) == int(states.said[row])
        first = output.hidden_states[0][0, int(prompts.subject_place[row])]
        torch.testing.assert_close(states.at(0)[row], first, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=r"depth 1 was not read; there are \[0, 3\]"):
        states.at(1)


def test_an_edit_of_the_whole_state_gives_the_other_prompts_answer(loaded):
    model = loaded("llama")
    end = unembedding_of(model)
    prompts = relation_prompts(model, PAIRS, TEMPLATE)
    states = relation_states(model, prompts, [0], end)
    nothing = edited_logits(model, prompts, 0, torch.zeros(5, 32), end)
    torch.testing.assert_close(nothing, end.logits(states.object), atol=1e-5, rtol=1e-4)
    order = [1, 2, 3, 4, 0]
    # at depth 0 the state is the subject's embedding: exchanging it is exchanging the word
    swapped = edited_logits(model, prompts, 0, states.at(0)[order] - states.at(0), end)
    torch.testing.assert_close(swapped, end.logits(states.object[order]), atol=1e-4, rtol=1e-4)


def test_on_an_affine_model_the_relation_is_exact_for_unseen_subjects(affine_model):
    model, end = affine_model
    prompts = relation_prompts(model, PAIRS, TEMPLATE)
    operator = relation_operator(model, prompts.take([0, 1]), [0, 1])
    states = relation_states(model, prompts, [0, 1], end)
    torch.testing.assert_close(operator(states.at(0), 0), states.object, atol=1e-4, rtol=1e-4)
    # further up the tokens behind the subject have read it already: one state does not say it all
    assert (operator(states.at(1), 1) - states.object).abs().max() > 0.1
    # the inverse brings o - b back to a state of the same object
    back = (states.object - operator.bias[0]) @ operator.inverse(0, 32).T
    torch.testing.assert_close(operator(back, 0), states.object, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(back, states.at(0), atol=5e-2, rtol=5e-2)
    translator = operator.linear_map(1, beta=2.0)
    torch.testing.assert_close(translator(states.at(1)), operator(states.at(1), 1, beta=2.0))
    assert translator.facts["examples"] == ["cat", "bird"]


@pytest.fixture
def affine_model(tiny, word_tokenizer):
    """A gpt2 of uniform attention, linear MLPs and inner norms that are the identity: r_L is affine in each r_l."""
    model = copy.deepcopy(tiny("gpt2"))
    for block in model.transformer.h:
        block.mlp.act = nn.Identity()
        block.attn.c_attn.weight.data[:, :32] = 0
        block.attn.c_attn.bias.data[:32] = 0
        block.ln_1, block.ln_2 = nn.Identity(), nn.Identity()
    loaded = LoadedModel.from_module(model, word_tokenizer, name="affine")
    return loaded, unembedding_of(loaded)


def test_inverse_of_limited_rank():
    jacobian = torch.diag(torch.tensor([4.0, 2.0, 1.0, 0.0]))[None]
    operator = RelationOperator((3,), jacobian, torch.zeros(1, 4))
    torch.testing.assert_close(operator.inverse(3, 2), torch.diag(torch.tensor([0.25, 0.5, 0.0, 0.0])))
    torch.testing.assert_close(operator.inverse(3, 4), torch.diag(torch.tensor([0.25, 0.5, 1.0, 0.0])))
    with pytest.raises(ValueError, match=r"rank is 5. Give 1 to 4"):
        operator.inverse(3, 5)
    with pytest.raises(ValueError, match=r"not fitted at depth 2; there are \[3\]"):
        operator(torch.zeros(4), 2)


@pytest.mark.parametrize(
    ("depths", "message"),
    [
        ([], "at least one prompt and one depth"),
        ([3], "depth 3 is not before o at depth 3"),
        ([-1], "depth -1 is not there"),
    ],
)
def test_bad_depths(loaded, depths, message):
    model = loaded("llama")
    with pytest.raises(ValueError, match=message):
        relation_operator(model, relation_prompts(model, PAIRS[:2], TEMPLATE), depths)


def test_wilson_intervals_are_those_of_scipy():
    from scipy.stats import binomtest

    for hits, count in ((0, 5), (3, 10), (10, 10), (40, 97)):
        expected = binomtest(hits, count).proportion_ci(method="wilson")
        assert np.allclose(wilson_interval(hits, count), (expected.low, expected.high), atol=1e-9)
    assert np.isnan(wilson_interval(0, 0)).all()


def test_the_last_token_of_a_subject_is_its_last_byte():
    """A byte-level tokenizer cuts one character into several tokens, all with the offsets of that character."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    prompts = relation_prompts(tokenizer, [("北京", "b"), ("Łódź", "b")], "of {subject} is")
    assert prompts.subject_place.tolist() == [-4, -4]  # " is" is three bytes


def test_examples_are_written_as_the_prompt_is(word_tokenizer):
    prompts = relation_prompts(word_tokenizer, PAIRS[:2], "{{x}} {y} {subject} is", examples=PAIRS[:2])
    assert prompts.texts[0] == "{{x}} {y} bird is tree\n{{x}} {y} cat is"


@pytest.mark.parametrize("family", ["mamba", "jamba", "bamba", "granitemoehybrid", "qwen3_next"])
def test_a_cache_that_does_not_go_on_is_not_used(family):
    from tiny_families import built

    model = built(family)
    ids = torch.arange(4, 30).reshape(2, 13)
    ids[1, :9] = ids[0, :9]
    prefix = shared_prefix(model, ids[0, :9].tolist())
    with torch.no_grad():
        for rows in (ids, ids[:1]):
            whole = model(input_ids=rows, use_cache=False).logits[:, -4:]
            found = prefix.run(rows[:, 9:]).logits[:, -4:]
            torch.testing.assert_close(found, whole, atol=2e-5, rtol=1e-3)


def test_dropout_is_refused(loaded):
    model = loaded("gpt2")
    prompts, end = relation_prompts(model, PAIRS, TEMPLATE), unembedding_of(model)
    model.module.train()
    for run in (
        lambda: relation_operator(model, prompts, [0]),
        lambda: relation_states(model, prompts, [0], end),
        lambda: edited_logits(model, prompts, 0, torch.zeros(5, 32), end),
    ):
        with pytest.raises(ValueError, match="in training mode"):
            run()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_taken_where_none_are_asked_for(loaded, mode):
    model = loaded("llama")
    prompts = relation_prompts(model, PAIRS[:1], TEMPLATE)
    expected = relation_operator(model, prompts, [1]).jacobian
    with mode():
        found = relation_operator(model, prompts, [1]).jacobian
    assert torch.equal(found, expected)


def test_a_saved_map_says_what_it_was_fitted_on(loaded, tmp_path):
    from microtome.lenses.linear_map import LinearMap

    model = loaded("llama")
    prompts = relation_prompts(model, PAIRS[:2], TEMPLATE, examples=PAIRS[:2])
    for target, name in ((None, "last stream"), (2, "depth 2")):
        operator = relation_operator(model, prompts.take([1, 0]), [1], target=target)
        operator.linear_map(1, beta=2.0).save(tmp_path / name)
        again = LinearMap.load(tmp_path / name)
        assert again.target == name
        assert again.facts["weight_sha256"] == model.provenance.weight_sha256
        assert (again.facts["model"], again.facts["dtype"], again.facts["layers"]) == ("llama", "float32", 3)
        assert (again.facts["template"], again.facts["depth"], again.facts["beta"]) == (TEMPLATE, 1, 2.0)
        assert again.facts["target"] == (target or 3)
        assert again.facts["pairs"] == [list(PAIRS[1]), list(PAIRS[0])]
        assert again.facts["prompts"] == [prompts.texts[1], prompts.texts[0]]


def test_what_is_not_finite_is_told(loaded):
    model = loaded("llama")
    prompts = relation_prompts(model, PAIRS[:1], TEMPLATE)
    relation_operator(model, prompts, [0])
    with torch.no_grad():
        model.module.model.embed_tokens.weight[int(prompts.ids[0][0])] = torch.nan
    with pytest.raises(ValueError, match="'the cat is a' gives NaN or infinity"):
        relation_operator(model, prompts, [0])

"""A pass gives each real token once, with what follows it, whatever the padding; values are those of the text alone."""

import pytest
import torch

from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.capture.tap_plan import Read
from microtome.capture.taps import taps
from microtome.lenses.corpus_pass import corpus_pass

TEXTS = ["the cat sat on the new red house", "a dog", "he saw the old river and a small tree", "good", "we ran"]
SITE = Site("resid_post", 1)


@pytest.fixture
def loaded(tiny, word_tokenizer):
    return lambda kind="llama": LoadedModel.from_module(tiny(kind), word_tokenizer, name=kind)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "neox", "gemma2", "qwen3", "bert"])
def test_values_are_those_of_each_text_alone(loaded, word_tokenizer, kind):
    model = loaded(kind)
    seen = {}
    for chunk in corpus_pass(model, TEXTS, SITE, max_tokens=20).chunks():
        for row, text in enumerate(chunk.text.tolist()):
            key = text, int(chunk.position[row])
            assert key not in seen
            seen[key] = chunk.values[SITE][row], int(chunk.token_ids[row]), int(chunk.targets[row])
    for number, text in enumerate(TEXTS):
        ids = word_tokenizer(text)["input_ids"]
        with torch.no_grad(), taps(model, [SITE]) as tape:
            model.module(torch.tensor([ids]))
        for position, token in enumerate(ids):
            value, own, target = seen.pop((number, position))
            torch.testing.assert_close(value, tape[SITE][0, position], rtol=1e-4, atol=1e-5)
            assert own == token
            assert target == (ids[position + 1] if position + 1 < len(ids) else -1)
    assert not seen


def test_a_pass_goes_on_from_a_batch(loaded):
    plan = corpus_pass(loaded(), TEXTS, SITE, max_tokens=10)
    whole = list(plan.chunks())
    assert len(whole) > 2
    assert sum(map(len, whole)) == plan.tokens
    rest = list(plan.chunks(start=1))
    assert [chunk.number for chunk in rest] == [chunk.number for chunk in whole[1:]]
    assert all(torch.equal(a.values[SITE], b.values[SITE]) for a, b in zip(rest, whole[1:], strict=True))


def test_batches_may_be_shuffled(loaded):
    texts = [[5] * length for length in range(2, 9)]
    plans = [corpus_pass(loaded(), texts, max_tokens=8, shuffle=seed).batches for seed in (None, 1, 1)]
    assert plans[1] == plans[2]
    assert plans[0] != plans[1]
    assert sorted(plans[0]) == sorted(plans[1])


def test_logits_and_edits(loaded):
    model = loaded()
    push = {"resid_post.0": lambda x: torch.ones_like(x)}
    plain, edited = (next(corpus_pass(model, TEXTS[:1], ["logits"], edits=e).chunks()) for e in (None, push))
    with torch.no_grad(), taps(model, (), push):
        expected = model.module(plain.token_ids[None]).logits[0]
    torch.testing.assert_close(edited.values[Site("logits")], expected)
    assert not torch.allclose(edited.values[Site("logits")], plain.values[Site("logits")])


def test_a_graph_is_kept_only_when_asked_for(loaded):
    plan = corpus_pass(loaded(), TEXTS[:1], SITE)
    assert not next(plan.chunks()).values[SITE].requires_grad
    assert next(plan.chunks(keep_graph=True)).values[SITE].requires_grad


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_patterns_are_those_of_each_text_alone(loaded, word_tokenizer, kind):
    model = loaded(kind)
    heads = [Site("pattern", 1, 2), Site("pattern", 0, 3)]
    texts = 0
    for chunk in corpus_pass(model, TEXTS, patterns=heads, max_tokens=20).chunks():
        assert int(chunk.is_real.sum()) == len(chunk)
        assert torch.equal(chunk.input_ids[chunk.is_real], chunk.token_ids)
        rows = chunk.is_real.nonzero()[:, 0]
        for row in range(len(chunk.is_real)):
            text, at = int(chunk.text[rows == row][0]), chunk.is_real[row].nonzero()[:, 0]
            ids = torch.tensor([word_tokenizer(TEXTS[text])["input_ids"]])
            with torch.no_grad(), taps(model, [Read(head, queries="all") for head in heads]) as tape:
                model.module(ids)
            for head in heads:
                own = chunk.patterns[head][row][at][:, at]
                torch.testing.assert_close(own, tape[head][0], rtol=1e-4, atol=1e-5)
            texts += 1
    assert texts == len(TEXTS)


def test_without_sites_nothing_runs(loaded):
    model = loaded()
    corpus_pass(model, TEXTS[:1])  # finds the parts, which runs it
    model.module.forward = lambda **_: pytest.fail("a forward ran")
    assert [len(chunk) for chunk in corpus_pass(model, TEXTS[:1]).chunks()] == [8]


def test_what_cannot_be_passed_is_refused(loaded):
    with pytest.raises(ValueError, match="no row per token"):
        corpus_pass(loaded(), TEXTS, "pattern.0.1")
    for several in ("pattern.0", "z.0.1"):
        with pytest.raises(ValueError, match="is no single head's pattern"):
            corpus_pass(loaded(), TEXTS, patterns=[several])
    with pytest.raises(KeyError, match="offers no site"):
        corpus_pass(loaded(), TEXTS, "mixer_out.0")
    with pytest.raises(ValueError, match="ready inputs"):
        corpus_pass(loaded(), {"pixel_values": torch.zeros(1, 3, 4, 4)})
    model = loaded()
    model.module.train()
    with pytest.raises(ValueError, match=r"Call model.eval\(\)"):
        corpus_pass(model, TEXTS, SITE)

"""Vocabulary statistics and next-token nats on SmolLM2: equal to the model's own logits, and sensible."""

import pytest
import torch

from microtome.capture import LoadedModel
from microtome.kernels.vocabulary_statistics import TOLERANCE, vocabulary_statistics
from microtome.kernels.vocabulary_statistics_reference import vocabulary_statistics_reference
from microtome.lenses.corpus_pass import corpus_pass
from microtome.lenses.next_token import continuation_nll, next_token_kl, text_nll
from microtome.lenses.unembedding import unembedding_of

pytestmark = pytest.mark.slow

TEXTS = ["The capital of France is Paris, and the capital of Italy is Rome.", "It arrived on time; the box was dented."]


def test_statistics_of_depths_are_the_dense_ones(smollm2: LoadedModel) -> None:
    end = unembedding_of(smollm2)
    chunk = next(corpus_pass(smollm2, TEXTS, ["resid_pre.0", "resid_post"]).chunks())
    states = torch.stack([end.normed(value) for value in chunk.values.values()]).detach()
    found = vocabulary_statistics(states, end.weight, final=states[-1], targets=chunk.targets)
    exact = vocabulary_statistics_reference(
        states.double(), end.weight.double(), final=states[-1].double(), targets=chunk.targets
    )
    limit = 3 * TOLERANCE[torch.float32]
    for name in ("entropy", "kl", "kl_reverse", "target_log_prob", "top_log_probs"):
        torch.testing.assert_close(
            getattr(found, name).double(), exact[name], atol=limit, rtol=limit, equal_nan=True, msg=name
        )
    assert float((found.top_ids == exact["top_ids"]).double().mean()) > 0.995
    assert float(((found.target_rank - exact["target_rank"]).abs() <= 2).double().mean()) > 0.995
    assert float(found.kl[-1].max()) < 1e-6
    assert bool(found.agrees[-1].all())


def test_nats_are_those_of_the_models_loss_and_facts_are_likelier(smollm2: LoadedModel) -> None:
    found = text_nll(smollm2, TEXTS)
    for number, text in enumerate(TEXTS):
        ids = smollm2.require_tokenizer()(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            loss = float(smollm2.module(input_ids=ids, labels=ids).loss)
        assert float(found.nats[number] / found.tokens[number]) == pytest.approx(loss, abs=1e-4)
    prompt = "The capital of France is"
    facts = continuation_nll(smollm2, [prompt] * 3, [" Paris", " Rome", " Madrid"])
    assert int(facts.nats.argmin()) == 0


def test_removing_a_block_moves_the_distribution(smollm2: LoadedModel) -> None:
    late = next_token_kl(smollm2, TEXTS, {"mlp_out.20": torch.neg})
    first = next_token_kl(smollm2, TEXTS, {"mlp_out.0": torch.neg})
    assert bool((late.kl >= 0).all())
    assert float(first.kl.mean()) > float(late.kl.mean()) > 1e-3

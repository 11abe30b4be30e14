"""Pairs of letters: balanced, read at the letter's own token; and what adding a vector at the end does to logits."""

import numpy as np
import pytest
import torch
from steering_steps import BAD, GOOD, noise
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace, WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from microtome.capture import LoadedModel, capture
from microtome.interventions.caa import LetterPair, Question, letter_pairs, letter_rows, matching_probability
from microtome.interventions.contrast import contrast
from microtome.interventions.operations import Add
from microtome.interventions.steering import Intervention, Steering

QUESTIONS = [Question(f"what is {n}?", f"good film {n}", f"bad film {n}") for n in ("it", "that", "this", "old")]
WORDS = ["A", "B", "(", ")", "Answer", ":", "what", "is", "it", "that", "this", "old", "good", "bad", "film", "?"]


@pytest.fixture(scope="module")
def lettered(tiny):
    """`lettered(split)`: a tiny llama whose tokenizer knows letters; set apart by punctuation, or by spaces alone."""

    def build(split=Whitespace) -> LoadedModel:
        tokenizer = Tokenizer(
            WordLevel({word: n for n, word in enumerate(["<pad>", "<unk>", *WORDS])}, unk_token="<unk>")
        )
        tokenizer.pre_tokenizer = split()
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")
        return LoadedModel.from_module(tiny("llama"), fast, name="lettered")

    return build


def test_letters_are_balanced_and_answers_follow_them() -> None:
    pairs = letter_pairs(QUESTIONS, seed=3)
    assert sum(pair.matching == "A" for pair in pairs) == 2
    for pair, question in zip(pairs, QUESTIONS, strict=True):
        assert f"({pair.matching}) {question.matching}" in pair.prompt
        assert f"({pair.other}) {question.other}" in pair.prompt
        assert pair.prompt.endswith("Answer: (")
    with pytest.raises(ValueError, match="even number"):
        letter_pairs(QUESTIONS[:3])


def test_rows_are_the_letters_own(lettered) -> None:
    model, pairs = lettered(), letter_pairs(QUESTIONS)
    rows = letter_rows(model, pairs, ["resid_pre.0", "resid_post.1"])
    table = model.module.get_input_embeddings().weight
    ids = [model.tokenizer.convert_tokens_to_ids(letter) for letter in "AB"]
    wanted = [ids["AB".index(pair.matching)] for pair in pairs]
    assert torch.equal(rows.activations["resid_pre.0"][:4], table[wanted])
    assert rows.counts == (4, 4)
    # the mean of balanced letters is the same for both sides, so that no letter is in the vector
    with pytest.raises(ValueError, match="read the same"):
        contrast(model, rows, sites=["resid_pre.0"])
    # what comes behind the letter has no part in it
    longer = [pair.prompt + pair.matching + ") what is it" for pair in pairs]
    alone = capture(model, longer, ["resid_post.1"], [-5] * len(pairs), progress=False)
    torch.testing.assert_close(alone["resid_post.1"], rows.activations["resid_post.1"][:4], rtol=1e-4, atol=1e-5)
    assert rows.differences("resid_post.1").shape == (4, 32)


def test_letters_that_are_not_balanced_or_no_tokens_are_refused(lettered) -> None:
    pairs = letter_pairs(QUESTIONS)
    with pytest.raises(ValueError, match="would hold the letter"):
        letter_rows(lettered(), [LetterPair(pair.prompt, "A") for pair in pairs])
    with pytest.raises(ValueError, match="part of the token"):
        letter_rows(lettered(WhitespaceSplit), pairs)


def test_probabilities_are_those_of_the_two_letters(lettered) -> None:
    model, pairs = lettered(), letter_pairs(QUESTIONS)
    found = matching_probability(model, pairs)
    logits = capture(model, [pair.prompt for pair in pairs], ["logits"], "last", progress=False)["logits"].double()
    ids = {letter: model.tokenizer.convert_tokens_to_ids(letter) for letter in "AB"}
    both = torch.stack([logits[:, ids[letter]] for letter in "AB"], 1).softmax(1)
    expected = [float(both[n, "AB".index(pair.matching)]) for n, pair in enumerate(pairs)]
    assert found == pytest.approx(np.array(expected), rel=1e-5)
    rows = letter_rows(model, pairs)
    pushed = matching_probability(
        model, pairs, contrast(model, rows).only("resid_post.1").steering(model, strength=3.0)
    )
    assert not np.allclose(pushed, found)


def test_adding_before_a_linear_end_moves_logits_by_what_the_unembedding_reads(tiny, word_tokenizer) -> None:
    module = tiny("llama")
    module.model.norm = torch.nn.Identity()
    module.eval()
    model = LoadedModel.from_module(module, word_tokenizer, name="no norm")
    vector = noise(32)
    steering = Steering(Intervention("resid_post.2", Add(vector), "last", 1.7))
    texts = [*GOOD, *BAD]
    clean, steered = (
        capture(model, texts, ["logits"], "last", edits=edits, progress=False)["logits"]
        for edits in (None, steering.edits(model))
    )
    expected = 1.7 * module.lm_head.weight.detach() @ vector
    torch.testing.assert_close(steered - clean, expected.expand(8, -1), rtol=1e-4, atol=1e-4)

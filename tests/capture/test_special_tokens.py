"""Which tokens are special, the unknown token above all."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from microtome.capture.special_tokens import SpecialTokens


def test_nothing_is_special_without_a_tokenizer():
    assert not SpecialTokens.of(None).mask([0, 1, 2]).any()


def test_unknown_words_are_words(word_tokenizer):
    special = SpecialTokens.of(word_tokenizer)
    text = "the zebra <unk> sat"
    batch = word_tokenizer(text, return_offsets_mapping=True)
    unknown = word_tokenizer.unk_token_id
    assert batch["input_ids"].count(unknown) >= 2
    mask = special.mask(batch["input_ids"], offsets=batch["offset_mapping"], text=text)
    spelled = [text[start:end] for start, end in batch["offset_mapping"]]
    assert mask.tolist() == [piece == "<unk>" for piece in spelled]
    assert sum(mask.tolist()) == 1
    assert not special.mask([unknown]).any(), "ids alone: taken for a word"


def test_declared_and_added_tokens_are_special(word_tokenizer):
    special = SpecialTokens.of(word_tokenizer)
    assert special.mask([0, 1, 2, 5]).tolist() == [True, True, True, False]
    assert special.mask([5, 6, 7], added=[1, 0, 0]).tolist() == [True, False, False]


def test_every_token_declared_special_counts_not_only_those_with_a_role(word_tokenizer):
    backend = Tokenizer.from_str(word_tokenizer.backend_tokenizer.to_str())
    backend.add_special_tokens(["<mark>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    mark = tokenizer.convert_tokens_to_ids("<mark>")
    assert mark not in tokenizer.all_special_ids
    assert SpecialTokens.of(tokenizer).mask([mark, 5]).tolist() == [True, False]


@pytest.mark.parametrize("role", ["bos_token", "eos_token"])
def test_an_unknown_token_with_another_role_is_special(role):
    backend = Tokenizer(WordLevel({"<end>": 0, "the": 1}, unk_token="<end>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<end>", **{role: "<end>"})
    assert SpecialTokens.of(tokenizer).mask([0, 1]).tolist() == [True, False]

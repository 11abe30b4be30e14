import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedTokenizerFast

from microtome.capture.models import LoadedModel
from microtome.lenses.token_words import token_words

WORDS = [" the", "\n", " ", "a b", "  ", " \n", "\tx"]


@pytest.fixture
def loaded(tiny):
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="a b")))
    return LoadedModel.from_module(tiny("llama"), tokenizer, name="tiny")


def test_words_are_decoded_one_by_one_in_order(loaded):
    assert token_words(loaded, [3, 0, 1, 0]) == ["a b", " the", "\n", " the"]
    assert token_words(loaded, torch.tensor([[0], [5]])) == [" the", " \n"]


def test_visible_words_stand_between_spaces(loaded):
    found = token_words(loaded, range(len(WORDS)), is_visible=True)
    assert found == ["the", "\\n", "␣", "a␣b", "␣␣", "␣\\n", "\\tx"]


def test_without_a_tokenizer_words_are_numbers():
    assert token_words(None, [3, 1, 3]) == ["3", "1", "3"]
    assert token_words(nn.Linear(2, 2), torch.tensor([[3, 1], [2, 0]])) == ["3", "1", "2", "0"]
    assert token_words(None, np.array([7]), is_visible=True) == ["7"]

"""Tiny models with a tokenizer of words, and texts of two kinds for them."""

import pytest

from microtome.capture import LoadedModel

GOOD = [
    "the happy cat ran to the river .",
    "she liked the good film .",
    "a great big city .",
    "we saw good green trees .",
]
BAD = ["the sad cat sat in the house .", "she hated the bad film .", "an awful old city .", "we saw bad small books ."]


@pytest.fixture(scope="session")
def loaded(tiny, word_tokenizer):
    """`loaded(kind, seed=0)`: a tiny model with its tokenizer."""

    def build(kind: str = "llama", seed: int = 0) -> LoadedModel:
        return LoadedModel.from_module(tiny(kind, seed), word_tokenizer, name=f"tiny {kind}")

    return build


@pytest.fixture(scope="session")
def llama(loaded) -> LoadedModel:
    return loaded("llama")


@pytest.fixture(scope="session")
def gpt2(loaded) -> LoadedModel:
    return loaded("gpt2")

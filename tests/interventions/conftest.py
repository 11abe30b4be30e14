"""Tiny models with a tokenizer of words."""

import pytest

from microtome.capture import LoadedModel


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

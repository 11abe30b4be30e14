"""Lenses on SmolLM2: what it knows of capitals comes up late, and ends as the model says it."""

import numpy as np
import pytest

from microtome.lenses.lens_table import lens_table
from microtome.lenses.vector_words import vector_words


@pytest.mark.slow
def test_the_capital_of_italy_comes_up_in_the_last_blocks(smollm2) -> None:
    found = lens_table(smollm2, "The capital of France is Paris, and the capital of Italy is").at(-1)
    assert found["word"].iloc[-1] == " Rome"
    assert found["rank"].iloc[-1] == 0
    assert found["kl"].iloc[-1] < 1e-5
    # measured 30 November 2026: rank 3,000 to 6,600 up to the middle, 425 at depth 24, 6 at depth 29
    assert found["rank"].iloc[:20].min() > 1000
    assert found["rank"].iloc[29] < 50
    assert np.isfinite(found["kl"]).all()


@pytest.mark.slow
def test_a_row_of_the_embedding_says_its_own_word(smollm2) -> None:
    number = smollm2.tokenizer.encode(" Paris", add_special_tokens=False)[0]
    row = smollm2.module.get_input_embeddings().weight[number].detach()
    assert vector_words(smollm2, row, top=1, norm="gain")["word"].tolist() == [" Paris"]

"""Lenses on SmolLM2: what it knows of capitals comes up late, and ends as the model says it."""

import numpy as np
import pytest

from microtome.lenses.lens_table import lens_table


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

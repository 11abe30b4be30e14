"""Shuffled pairings: no row keeps its document, every draw is another one, and nothing is carried."""

import numpy as np
import pandas as pd
import pytest
import torch

from microtome.capture.activations import Activations
from microtome.lenses.pair_splits import PairSplits
from microtome.lenses.transport.shuffled_splits import shuffled_splits
from microtome.lenses.transport.subspace import transport_subspace

TEXTS, LENGTH, WIDTH = 90, 12, 5


@pytest.fixture
def activations() -> Activations:
    """x and y of a token are equal, but for the text's own number in the last channel of y."""
    rows = torch.randn(TEXTS * LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    text = torch.arange(TEXTS).repeat_interleave(LENGTH)
    position = torch.arange(LENGTH).repeat(TEXTS)
    return Activations.from_arrays(
        {"resid_post.0": rows, "resid_post.1": rows * 2},
        rows=pd.DataFrame({"text": text.numpy(), "position": position.numpy(), "token": "x"}),
    )


def test_draws_differ_and_carry_nothing(activations):
    shards = ["fit"] * 50 + ["validation"] * 15 + ["test"] * 25
    found = shuffled_splits(activations, "resid_post.0", "resid_post.1", shards=shards, draws=3)
    assert [each.fit.count for each in found] == [50 * (LENGTH - 1)] * 3
    assert found[0].validation.count == 15 * (LENGTH - 1)
    assert not torch.allclose(found[0].fit.xy, found[1].fit.xy)
    assert torch.allclose(found[0].fit.xx, found[1].fit.xx)
    rows = torch.from_numpy(np.arange(TEXTS * LENGTH) % LENGTH > 0)
    x, y = activations["resid_post.0"][rows], activations["resid_post.1"][rows]
    real = PairSplits.from_rows(x, y, (50, 15, 25))
    size = transport_subspace(real, nulls=found, draws=0)
    assert size["above_edge"] == size["above_null"] == WIDTH
    assert size.table.set_index("measure").loc["above_edge", "null_high"] == 0


def test_no_row_keeps_its_document(activations):
    """With y the number of the text, x y^T over rows would be that of equal numbers."""
    number = torch.arange(TEXTS).repeat_interleave(LENGTH).float()[:, None]
    held = Activations.from_arrays(
        {"resid_post.0": number, "resid_post.1": number},
        rows=activations.rows,
    )
    shards = ["fit"] * 60 + ["test"] * 30
    one = shuffled_splits(held, "resid_post.0", "resid_post.1", shards=shards, draws=1)[0]
    assert abs(float(one.fit.xy)) < 0.5 * float(one.fit.xx)


def test_refuses_one_document_and_means(activations):
    with pytest.raises(ValueError, match="no two documents"):
        shuffled_splits(activations, "resid_post.0", "resid_post.1", documents=["a"] * TEXTS, shards={"fit": 1.0})
    with pytest.raises(ValueError, match="draws=0"):
        shuffled_splits(activations, "resid_post.0", "resid_post.1", draws=0)
    with pytest.raises(KeyError):
        shuffled_splits(activations, "resid_post.0", "resid_post.2")

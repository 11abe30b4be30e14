"""An attention lens of SmolLM2: its size, its loss with and without padding, a few steps of training, its words."""

import pytest
import torch

from microtome.lenses.attention_lens_loss import readout_kl
from microtome.lenses.attention_lens_rows import lens_rows
from microtome.lenses.attention_lens_start import folded_unembedding, plain_weight
from microtome.lenses.attention_lens_training import fit_attention_lens
from microtome.lenses.head_writes import head_maps
from microtome.lenses.unembedding import unembedding_of

pytestmark = pytest.mark.slow

PLACES = ["France", "Italy", "the old town", "a small village", "Japan", "my country", "the north"]
TEXTS = [
    text.format(place)
    for place in PLACES
    for text in (
        "The capital of {} is far away, and few of us have ever been there.",
        "She came from {} when she was a child.",
        "In {} the winter is long; people stay at home and read.",
        "Two men walked through {} and talked about the weather.",
        "He wrote a book about {}.",
    )
]


def test_padding_does_not_count(smollm2) -> None:
    batched = lens_rows(smollm2, TEXTS[:5], 25, positions="last")
    alone = lens_rows(smollm2, TEXTS[:5], 25, positions="last", max_tokens=1)
    end = unembedding_of(smollm2)
    weight = 0.05 * plain_weight(head_maps(smollm2, 25)[0], folded_unembedding(end)).flatten(0, 1)[None]
    bias = torch.zeros(1, 1, end.vocab)
    losses = [readout_kl(rows.mixed.flatten(1)[None], weight, bias, rows.normed, end) for rows in (batched, alone)]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)


def test_a_few_steps_lower_the_loss(smollm2) -> None:
    shards = lens_rows(smollm2, TEXTS, 25).split()
    run = fit_attention_lens(smollm2, shards, start="zero", steps=6, evaluate_every=3, batch_rows=64)
    assert run.lens.parameters == 576 * 49152 + 49152
    assert run.history["validation_kl"].is_monotonic_decreasing
    assert run.scores.kl < run.start_kl
    readings = run.lens.decode(smollm2, ["The capital of France is"])
    frame = readings.to_frame()
    assert frame["token"].tolist() == ["is"] * 9
    assert frame["words"].str.len().min() > 0
    assert "cannot say whose" in repr(readings)

"""Kept positions in a batch: the same on either side of the padding, and equal to plain indexing of each text."""

import numpy as np
import pytest
import torch

from microtome.capture.batches import PaddingRecipe, make_batch
from microtome.capture.encoded_text import EncodedText
from microtome.capture.positions import Span, resolve_positions

LENGTHS = [4, 2, 7, 3, 5]
BATCHES = ([2, 0], [4], [1, 3])


def encoded(length: int, seed: int) -> EncodedText:
    ids = torch.arange(length) + 10 * seed
    offsets = torch.stack([2 * torch.arange(length), 2 * torch.arange(length) + 2], dim=1)
    special = torch.arange(length) == 0
    words = "".join(f"{chr(97 + n)} " for n in range(length))
    return EncodedText(length, special, tuple(words[::2]), token_ids=ids, offsets=offsets, text=words)


TEXTS = [encoded(length, seed) for seed, length in enumerate(LENGTHS)]
# what the model makes of each text: [position, head, d_head]
VALUES = [torch.randn(length, 3, 2, generator=torch.Generator().manual_seed(length)) for length in LENGTHS]

POLICIES = {
    "last": ("last", [[value[-1]] for value in VALUES]),
    "first": ("first", [[value[0]] for value in VALUES]),
    "index": (-2, [[value[-2]] for value in VALUES]),
    "all": ("all", [list(value) for value in VALUES]),
    "mean": ("mean", [[value[1:].mean(0)] for value in VALUES]),
    "per text": ([[1, 0], [], [-1], [0], [2, 2]], [[VALUES[0][1], VALUES[0][0]], [], [VALUES[2][-1]], [VALUES[3][0]],
                                                   [VALUES[4][2]] * 2]),
    "span": ((2, 4), [[value[1]] for value in VALUES]),
    "span means": (
        [[Span(0, 4, pool="mean"), Span(1, 3, pool="all")]] * 5,
        [[value[:2].mean(0), value[0], value[1]] for value in VALUES],
    ),
}  # fmt: skip


def gathered(positions, side: str) -> torch.Tensor:
    """Every kept row of all texts, taken batch by batch out of padded values; padding is NaN."""
    kept = resolve_positions(positions, TEXTS)
    out = torch.full((kept.n_kept, 3, 2), torch.nan)
    for row_ids in BATCHES:
        batch = make_batch(TEXTS, row_ids, pad_id=0, recipe=PaddingRecipe(side, "none"), device="cpu")
        values = torch.full((*batch.input_ids.shape, 3, 2), torch.nan)
        for place, row in enumerate(row_ids):
            values[place][batch.attention_mask[place].bool()] = VALUES[row]
        here = kept.in_batch(row_ids, batch.attention_mask)
        out[here.kept_index] = here.select(values)
    return out


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_are_those_of_each_text_alone_on_either_side(policy):
    positions, expected = POLICIES[policy]
    left, right = gathered(positions, "left"), gathered(positions, "right")
    torch.testing.assert_close(left, right, rtol=0, atol=0)
    torch.testing.assert_close(right, torch.stack([row for rows in expected for row in rows]))


def test_single_tokens_are_copied_exactly():
    torch.testing.assert_close(gathered("all", "left"), torch.cat(VALUES), rtol=0, atol=0)


def test_a_selection_is_a_copy_even_without_padding():
    values = torch.zeros(1, 2, 3)
    here = resolve_positions("all", TEXTS[1:2]).in_batch([0], torch.ones(1, 2, dtype=torch.long))
    taken = here.select(values)
    values += 1
    assert (taken == 0).all()


def test_any_layout_of_the_values_will_do():
    kept = resolve_positions("all", TEXTS[1:2]).in_batch([0], torch.ones(1, 2, dtype=torch.long))
    values = torch.randn(1, 3, 2, 4).transpose(1, 2)
    torch.testing.assert_close(kept.select(values), values[0].contiguous(), rtol=0, atol=0)


def test_means_of_half_precision_do_not_overflow_in_the_sum():
    text = EncodedText(4096, torch.zeros(4096, dtype=torch.bool), ("",) * 4096)
    here = resolve_positions("mean", [text]).in_batch([0], torch.ones(1, 4096, dtype=torch.long))
    values = torch.full((1, 4096, 2), 100.0, dtype=torch.float16)
    assert torch.equal(here.select(values), values[:, 0])


def test_positions_count_real_tokens():
    kept = resolve_positions("all", TEXTS)
    batch = make_batch(TEXTS, [2, 1], pad_id=0, recipe=PaddingRecipe("left", "none"), device="cpu")
    here = kept.in_batch([2, 1], batch.attention_mask)
    assert here.position.tolist() == [*range(7), *range(2)]
    assert here.position_index.tolist() == [*range(7), 5, 6]
    assert here.row_index.tolist() == [0] * 7 + [1] * 2
    assert kept.text[here.kept_index].tolist() == [2] * 7 + [1] * 2


def test_table_says_what_each_row_is():
    table = resolve_positions("all", TEXTS).table(TEXTS)
    assert list(table) == ["text", "position", "token"]
    assert table["token"].tolist() == [token for text in TEXTS for token in text.tokens]
    assert table["position"].tolist() == [n for length in LENGTHS for n in range(length)]
    assert table["text"].tolist() == np.repeat(range(5), LENGTHS).tolist()


def test_table_of_means():
    table = resolve_positions("mean", TEXTS).table(TEXTS)
    assert (table["position"] == -1).all()
    assert (table["token"] == "").all()
    spans = resolve_positions([[Span(1, 3, pool="mean"), (2, 4)]] * 5, TEXTS).table(TEXTS)
    assert spans["token"].tolist() == ["a b ", "b"] * 5
    assert spans["span"].tolist() == [0, 1] * 5
    assert spans["position"].tolist() == [-1, 1] * 5


def test_a_mask_of_other_texts_is_refused():
    kept = resolve_positions("last", TEXTS)
    with pytest.raises(ValueError, match=r"The mask has \[3\] real tokens; texts \[0\] have \[4\]"):
        kept.in_batch([0], torch.tensor([[1, 1, 1, 0]]))


def test_values_of_another_batch_are_refused():
    here = resolve_positions("last", TEXTS[:1]).in_batch([0], torch.ones(1, 4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"positions are of a batch \(1, 4\); the values begin with \(2, 4\)"):
        here.select(torch.zeros(2, 4, 3))

"""Cutting an encoded text: what stays, on either side."""

import pytest
import torch

from microtome.capture.encoded_text import EncodedText


@pytest.fixture
def text() -> EncodedText:
    return EncodedText(
        length=8,
        is_special=torch.tensor([True, *[False] * 6, True]),
        tokens=tuple("<abcdef>"),
        token_ids=torch.arange(8),
        token_type_ids=torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
        offsets=torch.tensor([[0, 0], *([n, n + 1] for n in range(6)), [0, 0]]),
        text="abcdef",
        n_added=(1, 1),
    )


@pytest.mark.parametrize(("end", "left"), [("left", "<def>"), ("right", "<abc>")])
def test_every_field_is_cut_alike(text, end, left):
    cut = text.cut(5, end)
    assert "".join(cut.tokens) == left
    assert [text.tokens[index] for index in cut.token_ids] == list(cut.tokens)
    assert cut.token_type_ids.tolist() == text.token_type_ids[cut.token_ids].tolist()
    assert cut.is_special.tolist() == text.is_special[cut.token_ids].tolist()
    assert cut.offsets.tolist() == text.offsets[cut.token_ids].tolist()
    assert (cut.length, cut.n_dropped, cut.text) == (5, 3, "abcdef")


@pytest.mark.parametrize("end", ["left", "right"])
def test_cutting_twice_is_cutting_once(text, end):
    once, twice = text.cut(4, end), text.cut(6, end).cut(4, end)
    assert once.tokens == twice.tokens
    assert once.n_dropped == twice.n_dropped == 4


def test_more_can_be_kept_at_the_start(text):
    assert "".join(text.cut(5, "left", keep_first=3).tokens) == "<abf>"


def test_no_room(text):
    with pytest.raises(ValueError, match="2 tokens leave no room for text beside 2 special tokens"):
        text.cut(2, "left")

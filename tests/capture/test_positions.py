"""Position policies: identities first, then brute force over characters, then messages."""

import numpy as np
import pytest
import torch

from microtome.capture.encoded_text import EncodedText
from microtome.capture.positions import Span, resolve_positions


def random_text(rng: np.random.Generator) -> EncodedText:
    """Tokens of random widths over a text, some with gaps between them, some sharing a character, [CLS] and [SEP]."""
    offsets, at = [(0, 0)], 0
    for _ in range(rng.integers(1, 12)):
        at += rng.integers(0, 2)
        end = at + rng.integers(1, 4)
        offsets += [(at, end)] * rng.integers(1, 3)
        at = end
    offsets.append((0, 0))
    special = [True, *[False] * (len(offsets) - 2), True]
    text = "x" * (at + int(rng.integers(0, 2)))
    return EncodedText(
        len(offsets), torch.tensor(special), ("t",) * len(offsets), offsets=torch.tensor(offsets), text=text
    )


TEXTS = [random_text(np.random.default_rng(seed)) for seed in range(12)]
LENGTHS = [text.length for text in TEXTS]


def kept(positions, texts=TEXTS, **options) -> list[list[int]]:
    """Real-token indices per text; a mean as one list."""
    resolved = resolve_positions(positions, texts, **options)
    starts = np.cumsum(resolved.size) - resolved.size
    per_text: list[list[int]] = [[] for _ in texts]
    for text, start, size in zip(resolved.text, starts, resolved.size, strict=True):
        per_text[text] += resolved.tokens[start : start + size].tolist()
    return per_text


# Identities


@pytest.mark.parametrize(
    ("one", "same"),
    [
        ("first", 0),
        ("last", -1),
        ("last", [n - 1 for n in LENGTHS]),
        ("last", np.array(LENGTHS) - 1),
        ("last", torch.tensor(LENGTHS) - 1),
        ("last", np.int64(-1)),
        ("all", [list(range(n)) for n in LENGTHS]),
        (["last"] * 12, [-1] * 12),
        ([[0, -1]] * 12, [[0, n - 1] for n in LENGTHS]),
        ((0, 3), Span(0, 3)),
        ((0, 3), [(0, 3)] * 12),
        ((0, 3), [[(0, 3)]] * 12),
    ],
)
def test_two_ways_to_say_the_same(one, same):
    assert kept(one) == kept(same)


def test_mean_is_over_all_tokens_but_the_special_ones():
    assert kept("mean") == [list(range(1, n - 1)) for n in LENGTHS]
    assert kept("mean", include_special=True) == kept("all")
    resolved = resolve_positions("mean", TEXTS)
    assert (resolved.position == -1).all()
    assert resolved.text.tolist() == list(range(12))


def test_order_and_repeats_are_the_callers():
    assert kept([[-1, 0, 0], *[[]] * 11])[0] == [LENGTHS[0] - 1, 0, 0]


def test_a_text_may_keep_nothing():
    resolved = resolve_positions([[], *[[0]] * 11], TEXTS)
    assert resolved.text.tolist() == list(range(1, 12))


# Spans


@pytest.mark.parametrize("seed", range(30))
def test_span_is_the_tokens_that_share_a_character(seed):
    rng = np.random.default_rng(seed)
    text = random_text(rng)
    for start in range(len(text.text)):
        for end in range(start + 1, len(text.text) + 1):
            wanted = set(range(start, end))
            expected = [n for n, (first, stop) in enumerate(text.offsets.tolist()) if wanted & set(range(first, stop))]
            if not expected:
                with pytest.raises(ValueError, match=rf"row 0: span \({start}, {end}\), 'x+', covers no token\."):
                    kept((start, end), [text])
                continue
            assert kept((start, end), [text]) == [expected]
            assert kept(Span(start, end, pool="first"), [text]) == [expected[:1]]
            assert kept(Span(start, end, pool="last"), [text]) == [expected[-1:]]
            mean = resolve_positions(Span(start, end, pool="mean"), [text])
            assert (mean.tokens.tolist(), mean.size.tolist(), mean.position.tolist()) == (
                expected,
                [len(expected)],
                [-1],
            )


def test_spans_are_numbered_within_their_text():
    whole = [(0, len(text.text)) for text in TEXTS]
    resolved = resolve_positions([[Span(*span, pool="mean"), Span(*span, pool="last")] for span in whole], TEXTS)
    assert resolved.span.tolist() == [0, 1] * 12
    assert (resolve_positions("all", TEXTS).span == -1).all()


# Errors

SPECIAL_ONLY = EncodedText(2, torch.tensor([True, True]), ("<", ">"))
SHORT = EncodedText(3, torch.zeros(3, dtype=torch.bool), ("a", "b", "c"))
CUT = EncodedText(1, torch.tensor([False]), ("abc",), offsets=torch.tensor([[0, 3]]), text="abcdef", n_dropped=2)


@pytest.mark.parametrize(
    ("positions", "texts", "error", "message"),
    [
        ("middle", [SHORT], ValueError, "positions='middle': expected one of last, first, mean, all, an index or a"),
        (
            3,
            [SHORT, SHORT],
            ValueError,
            r"row 0 has 3 tokens, special ones included; position 3 is out of range \(-3 to 2",
        ),
        ([0, -4], [SHORT, SHORT], ValueError, "row 1 has 3 tokens.*position -4 is out of range"),
        ([0], [SHORT, SHORT], ValueError, "list of 1 entries for 2 texts: a list has one entry per text"),
        ([[], []], [SHORT, SHORT], ValueError, "keeps nothing of any text"),
        ("mean", [SHORT, SPECIAL_ONLY], ValueError, "row 1 holds special tokens only.*include_special=True"),
        ((0, 2), [SHORT], ValueError, "row 0 has no character offsets, which spans need"),
        ((2, 2), [CUT], ValueError, r"row 0: span \(2, 2\) is empty or not inside the text's 6 characters"),
        ((0, 7), [CUT], ValueError, r"row 0: span \(0, 7\) is empty or not inside"),
        ((4, 6), [CUT], ValueError, "'ef', covers no token; 2 tokens of it were cut off"),
        (Span(0, 2, pool="max"), [CUT], ValueError, "row 0: pool='max'; expected mean, last, first or all"),
        ((0, 1, 2), [CUT], TypeError, r"row 0: expected a span \(start, end\) or Span"),
        ([[(0, 1), 3]], [CUT], TypeError, "row 0: expected a span.*Got 3"),
        ([1.5], [SHORT], TypeError, "row 0: position 1.5 is neither an index"),
        ([True], [SHORT], TypeError, "row 0: position True is neither an index"),
        (["middle"], [SHORT], ValueError, "row 0: unknown position 'middle'"),
        ({0: 1}, [SHORT], TypeError, "positions={0: 1}: expected last, first, mean, all"),
        (1.5, [SHORT], TypeError, "positions=1.5: expected"),
    ],
)
def test_bad_positions_are_named(positions, texts, error, message):
    with pytest.raises(error, match=message):
        resolve_positions(positions, texts)


def test_a_boolean_is_no_index():
    with pytest.raises(TypeError, match="row 0: position True"):
        resolve_positions(True, [SHORT])

import numpy as np
import pytest

from microtome.data.computed_labels import line_left, line_position, token_length

TEXT = "One two\n  three\n\nfour"


def offsets(*tokens: str) -> np.ndarray:
    """The offsets of tokens that make up TEXT one after the other; "" is a special token."""
    place, rows = 0, []
    for token in tokens:
        rows.append((place, place + len(token)) if token else (0, 0))
        assert TEXT[place : place + len(token)] == token
        place += len(token)
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


TOKENS = offsets("", "One", " two", "\n", "  ", "thr", "ee", "\n", "\n", "four", "")


def test_token_length_leaves_white_space_out():
    assert token_length(TEXT, TOKENS) == [0, 3, 3, 0, 0, 3, 2, 0, 0, 4, 0]


def test_line_position_counts_from_the_last_newline():
    assert line_position(TEXT, TOKENS) == [None, 0, 3, 7, 0, 2, 5, 7, 0, 0, None]


def test_line_left_counts_to_the_next_newline():
    assert line_left(TEXT, TOKENS) == [None, 7, 4, 0, 7, 5, 2, 0, 0, 4, None]


@pytest.mark.parametrize("seed", range(5))
def test_they_are_what_splitting_the_lines_gives(seed):
    generator = np.random.default_rng(seed)
    text = "".join(generator.choice(list("ab \n"), 60))
    cuts = np.unique(np.concatenate([[0, 60], generator.integers(1, 60, 20)]))
    tokens = np.stack([cuts[:-1], cuts[1:]], axis=1)
    for (start, _), position, left in zip(tokens, line_position(text, tokens), line_left(text, tokens), strict=True):
        assert position == len(text[:start].rpartition("\n")[2])
        assert left == len(text[start:].partition("\n")[0])


@pytest.mark.parametrize("label", [token_length, line_position, line_left])
def test_no_tokens_no_labels(label):
    assert label("", np.zeros((0, 2), dtype=np.int32)) == []

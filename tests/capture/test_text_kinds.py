"""Kinds of texts: what counts as a list of which."""

import numpy as np
import pytest
import torch

from microtome.capture.text_kinds import kind_of_texts, list_ids, list_texts, name_rows


@pytest.mark.parametrize(
    ("items", "kind"),
    [
        (["a"], "strings"),
        ([[{"role": "user", "content": "a"}]], "messages"),
        ([[1, 2]], "token_ids"),
        ([(1, 2)], "token_ids"),
        ([torch.tensor([1, 2])], "token_ids"),
        ([np.array([1, 2], dtype=np.int32)], "token_ids"),
        ([[np.int64(1)]], "token_ids"),
    ],
)
def test_kind(items, kind):
    assert kind_of_texts(items) == kind


def test_ids_become_plain_integers():
    for given in ([1, 2], torch.tensor([1, 2]), np.array([1, 2]), (np.int64(1), 2)):
        assert list_ids(given) == [1, 2]
        assert {type(index) for index in list_ids(given)} == {int}


def test_a_column_of_a_matrix_is_no_list_of_texts():
    with pytest.raises(TypeError, match="must be a list of texts"):
        list_texts(np.zeros((2, 2)))


def test_rows_are_named_in_few_words():
    assert name_rows([3]) == "row 3 has"
    assert name_rows(range(9)) == "rows 0, 1, 2, 3, 4, ... have"

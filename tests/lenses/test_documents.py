import numpy as np
import pandas as pd
import pytest

from microtome.lenses.documents import document_numbers


def test_numbers_stay_and_names_are_hashed_the_same_everywhere():
    assert document_numbers(None, 3).tolist() == [0, 1, 2]
    assert document_numbers(np.array([7, 7, -1]), 3).tolist() == [7, 7, -1]
    names = document_numbers(pd.Series(["a", "b", "a"]), 3)
    assert names[0] == names[2] != names[1]
    assert names.tolist() == document_numbers(["a", "b", "a"], 3).tolist()
    assert names[:2].tolist() == [2340832890917691671, 4771952420932724666]


@pytest.mark.parametrize("wrong", [["a", 1], [1.5, 2.0], [True, False], [None, "a"]])
def test_other_kinds_are_refused(wrong):
    with pytest.raises(TypeError, match="whole number"):
        document_numbers(wrong, 2)


def test_another_length_is_refused():
    with pytest.raises(ValueError, match="2 documents for 3 texts"):
        document_numbers(["a", "b"], 3)

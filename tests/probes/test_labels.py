import numpy as np
import pandas as pd
import pytest
import torch

from microtome.probes.labels import binary_labels


@pytest.mark.parametrize(
    ("labels", "values"),
    [
        ([True, False, True], (False, True)),
        (np.array([2, 1, 2]), (1, 2)),
        (pd.Series(["yes", "no", "yes"], index=[7, 8, 9]), ("no", "yes")),
        (torch.tensor([1.0, -1.0, 1.0]), (-1.0, 1.0)),
        (pd.array([1, 0, 1], dtype="Int64"), (0, 1)),
    ],
    ids=["bool", "int", "strings", "tensor", "nullable"],
)
def test_larger_value_is_positive(labels, values):
    positive, found = binary_labels(labels, n_rows=3)
    assert positive.tolist() == [True, False, True]
    assert found == values


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([1, 1, 1], r"labels holds 1 different value\(s\) \(1\); a sweep needs two. A probe needs both classes"),
        ([0.5, 1.5, -2.0], r"3 different value\(s\) \(-2\.0, 0\.5, 1\.5\).*labels=\(acts\.rows\[NAME\] > 0\)"),
        ([1.0, float("nan"), 0.0], r"1 of 3 labels are missing \(first: row 1\)"),
        (["a", None, "b"], r"1 of 3 labels are missing \(first: row 1\)"),
        ([0, 1], r"labels has shape \(2,\), activations 3 rows"),
        (np.zeros((3, 1)), r"labels has shape \(3, 1\)"),
    ],
)
def test_unusable_labels_are_named(labels, message):
    with pytest.raises(ValueError, match=message):
        binary_labels(labels, n_rows=3)

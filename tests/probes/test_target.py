import numpy as np
import pandas as pd
import pytest
import torch

from microtome.probes.target import target_of


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
def test_the_larger_of_two_values_is_positive(labels, values) -> None:
    target = target_of(labels, n_rows=3)
    assert target.kind == "binary"
    assert target.values.tolist() == [True, False, True]
    assert target.classes == values


def test_names_are_classes_and_fractions_are_numbers() -> None:
    names = target_of(["b", "a", "c", "a"], n_rows=4)
    assert (names.kind, names.classes) == ("classes", ("a", "b", "c"))
    assert names.values.tolist() == [1, 0, 2, 0]
    categories = target_of(pd.Series([3, 1, 2], dtype="category"), n_rows=3)
    assert (categories.kind, categories.classes) == ("classes", (1, 2, 3))
    numbers = target_of([0.5, 1.5, -2.0], n_rows=3)
    assert (numbers.kind, numbers.classes) == ("numbers", ())
    assert numbers.values.tolist() == [0.5, 1.5, -2.0]


def test_whole_numbers_are_what_the_caller_says() -> None:
    assert target_of([1, 5, 9], n_rows=3, kind="classes").values.tolist() == [0, 1, 2]
    assert target_of([1, 5, 9], n_rows=3, kind="numbers").values.tolist() == [1.0, 5.0, 9.0]
    assert target_of([0, 1, 0], n_rows=3, kind="numbers").kind == "numbers"
    assert target_of([0, 1, 0], n_rows=3, kind="classes").values.dtype == torch.int64


def test_folds_of_numbers_are_stratified_by_fifths() -> None:
    target = target_of(np.random.default_rng(0).permutation(50) + 0.5, n_rows=50)
    assert np.bincount(target.codes).tolist() == [10] * 5
    order = np.argsort(target.values.numpy())
    assert (np.diff(target.codes[order]) >= 0).all()


@pytest.mark.parametrize(
    ("labels", "kind", "message"),
    [
        ([1, 1, 1], None, r"holds 1 different value \(1\)\. A probe needs rows of two classes"),
        ([1, 2, 3], None, r"3 whole numbers \(1, 2, 3\).*target=\"classes\" or target=\"numbers\""),
        ([1.0, 2.0, 3.0], None, r"3 whole numbers"),
        ([1, 2, 3], "binary", r"3 different values \(1, 2, 3\); a binary target needs two"),
        (["a", "b", "c"], "numbers", "labels are no numbers"),
        ([1.0, float("inf"), 0.5], None, r"labels\[1\] is inf; a number must be finite"),
        ([1.0, float("nan"), 0.0], None, r"1 of 3 labels are missing \(first: row 1\)"),
        (["a", None, "b"], None, r"1 of 3 labels are missing \(first: row 1\)"),
        ([0, 1], None, r"labels has shape \(2,\), activations 3 rows"),
        (np.zeros((3, 1)), None, r"labels has shape \(3, 1\)"),
    ],
)
def test_unusable_labels_are_named(labels, kind, message) -> None:
    with pytest.raises(ValueError, match=message):
        target_of(labels, n_rows=3, kind=kind)


@pytest.mark.parametrize("unit", [1e150, 1e-150])
def test_numbers_whose_squares_no_float_holds_are_refused(unit):
    with pytest.raises(ValueError, match="in another unit"):
        target_of(np.array([1.0, 2.5, 3.0]) * unit, n_rows=3, kind="numbers")


def test_complex_numbers_and_what_has_no_hash_are_no_labels():
    with pytest.raises(ValueError, match="complex numbers"):
        target_of(np.array([1 + 1j, 2 + 1j, 3 + 0j]), n_rows=3, kind="numbers")
    with pytest.raises(TypeError, match=r"labels\[0\] is {} \(dict\), which is no key"):
        target_of(pd.Series([{}, {}, {"a": 1}]), n_rows=3)

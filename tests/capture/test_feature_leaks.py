"""Copies of the label among the features: found under any coding, and nothing else."""

import numpy as np
import pytest
import torch

from microtome.capture.activation_sites import any_site
from microtome.capture.feature_leaks import FEWEST_ROWS, features_that_tell, said_leaks

RNG = np.random.default_rng(0)
NAMES = ["a", "b", "copy", "d"]


def told(column: np.ndarray, labels: np.ndarray, *, dtype=torch.float32) -> list[str]:
    features = RNG.normal(size=(len(labels), 4))
    features[:, 2] = column
    return features_that_tell({any_site("eeg.0"): torch.tensor(features, dtype=dtype)}, labels, {"eeg.0": NAMES})


CLASSES = np.arange(90) % 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("labels", [CLASSES, CLASSES.astype(float), np.array(["x", "y", "z"])[CLASSES], CLASSES == 1])
def test_a_copy_under_any_coding(labels, dtype) -> None:
    codes = np.unique(labels, return_inverse=True)[1]
    assert told(np.array([5, -2, 11])[codes], labels, dtype=dtype) == ["copy"]


def test_missing_labels_do_not_count_and_numbers_must_be_equal() -> None:
    labels = np.where(np.arange(90) == 7, None, np.array(["x", "y", "z"], dtype=object)[CLASSES])
    assert told(np.where(np.arange(90) == 7, 4, CLASSES), labels) == ["copy"]
    numbers = RNG.normal(size=90)
    assert told(numbers, numbers) == ["copy"]
    assert told(numbers + 1e-3, numbers) == []


@pytest.mark.parametrize(
    "column",
    [
        np.zeros(90),
        CLASSES == 1,  # two classes share a value
        np.where(np.arange(90) == 80, 7, CLASSES),  # differs in one late row
        np.arange(90),
    ],
)
def test_what_tells_less_is_no_copy(column) -> None:
    assert told(column, CLASSES) == []


def test_few_rows_and_one_class_say_nothing() -> None:
    few = np.arange(FEWEST_ROWS - 1) % 2
    assert told(few, few) == []
    assert told(np.append(few, 0), np.append(few, 0)) == ["copy"]
    assert told(np.zeros(90), np.zeros(90)) == []


def test_features_without_names_are_numbered() -> None:
    heads = torch.zeros(90, 2, 3)
    heads[:, 1, 2] = torch.tensor(CLASSES)
    assert features_that_tell({any_site("z.1"): heads}, CLASSES) == ["z.1[5]"]
    assert said_leaks(["a"]).startswith("'a' tells the label exactly")
    assert said_leaks(list("abcdef")).startswith("'a', 'b', 'c', 'd' and 2 more tell the label")

"""Keys of rows: what counts as one, and what is no list of them."""

import numpy as np
import pandas as pd
import pytest
import torch

from microtome.probes.control_task import control_task
from microtome.probes.groups import group_codes, merged_groups
from microtome.probes.row_keys import row_keys
from microtome.probes.sweep import sweep
from microtome.probes.target import target_of

KEYS = [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    "keys",
    [
        np.array(KEYS),
        pd.Series(KEYS, index=[5, 4, 3, 2, 1, 0]),
        pd.Categorical(KEYS),
        torch.tensor(KEYS),
        torch.tensor(KEYS).bfloat16(),
        [[key] for key in KEYS],
        [(key,) * (1 + key) for key in KEYS],
        [str(key) if key else key for key in KEYS],
    ],
    ids=["array", "series", "categories", "tensor", "bfloat16", "lists", "tuples", "mixed"],
)
def test_equal_keys_are_one_group(keys):
    assert group_codes(keys, n_rows=6).tolist() == KEYS


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        (dict(enumerate(KEYS)), TypeError, "a dict, which says nothing of rows"),
        ({0, 1, 2, 3, 4, 5}, TypeError, "a set, which says nothing of rows"),
        ("abcdef", TypeError, "one key per row"),
        (3, TypeError, "one key per row"),
        ([0, 0, 1], ValueError, "3 entries for 6 rows"),
        (np.zeros((6, 2)), ValueError, r"shape \(6, 2\)"),
        ([1, 1, 1, 1, 1, {}], TypeError, r"keys\[5\] is {} \(dict\), which is no key"),
    ],
)
def test_what_is_no_list_of_keys_is_refused(keys, error, message):
    with pytest.raises(error, match=message):
        row_keys(keys, 6, "keys")


def test_a_dictionary_is_not_read_as_its_keys():
    with pytest.raises(TypeError, match="groups is a dict"):
        merged_groups({"a": 1, "b": 1}, ["x", "y"])
    with pytest.raises(TypeError, match="types is a dict"):
        control_task(dict(enumerate(KEYS)), np.array(KEYS) > 1)


def test_labels_may_be_bfloat16():
    target = target_of(torch.tensor(KEYS).bfloat16(), n_rows=6, kind="classes")
    assert target.values.tolist() == KEYS


@pytest.mark.parametrize("length", [1, 2])
def test_types_of_a_sweep_may_be_tuples(length):
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, 5, 60)
    found = sweep(
        rng.normal(size=(60, 2)),
        np.arange(60) % 2,
        groups="rows",
        types=[(int(kind),) * (1 + kind % length) for kind in kinds],
        folds=3,
        inner_folds=2,
        permutations=0,
        bootstraps=100,
        progress=False,
    )
    assert found.provenance["data"]["control_task"]["types"] == 5

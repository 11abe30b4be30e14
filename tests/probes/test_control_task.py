from inspect import unwrap

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from microtome.probes.control_task import control_task, coverage, shuffled_labels
from microtome.probes.folds import grouped_folds
from microtome.probes.metrics import fold_auroc


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    types = rng.integers(40, size=400)
    return types, rng.random(400) < 0.3, grouped_folds(np.arange(400) % 2, np.arange(400), folds=5)


@pytest.mark.parametrize("kind", ["bool", "classes", "numbers"])
def test_a_type_has_one_label_and_it_is_one_of_the_datas(rows, kind):
    types, positive, _ = rows
    labels = {"bool": positive, "classes": types % 3, "numbers": np.arange(400) / 7.0}[kind]
    control = control_task([f"word {number}" for number in types], labels, seed=1)
    assert control.dtype == labels.dtype
    assert set(control) <= set(labels)
    for number in range(40):
        assert len(set(control[types == number])) == 1
    assert len(set(control)) > 1
    np.testing.assert_array_equal(control, control_task([f"word {number}" for number in types], labels, seed=1))
    assert (control != control_task(types, labels, seed=2)).any()


def test_types_draw_from_the_labels_frequencies():
    labels = np.arange(20_000) % 10 == 0
    control = control_task(np.arange(20_000), labels)
    assert control.mean() == pytest.approx(0.1, abs=4 * np.sqrt(0.09 / 20_000))


def test_a_probe_of_the_types_identity_learns_covered_types_and_no_others(rows):
    types, positive, test = rows
    control = control_task(types, positive, seed=3)
    one_hot = np.eye(40)[types]

    def out_of_fold(folds):
        scores = np.zeros(400)
        for tested in folds:
            fit = LogisticRegression(C=10.0).fit(one_hot[~tested], control[~tested])
            scores[tested] = fit.decision_function(one_hot[tested])
        return fold_auroc(torch.from_numpy(scores), torch.from_numpy(control), torch.from_numpy(folds)).item()

    assert coverage(types, test) == 1.0
    assert out_of_fold(test) == 1.0
    by_type = grouped_folds(positive.astype(np.int64), types, folds=5)
    assert coverage(types, by_type) == 0.0
    assert out_of_fold(by_type) == 0.5


def test_coverage_counts_test_rows():
    test = np.array([[True, True, False, False], [False, False, True, True]])
    assert coverage(["a", "b", "a", "c"], test) == 0.5
    assert coverage(np.arange(4), test) == 0.0
    only_last = np.array([[False, False, False, True], [False] * 4])
    assert coverage(["a", "b", "a", "a"], test, only_last) == 0.25


def test_every_training_mask_holds_every_class(rows):
    # three types: most draws give all of them one label
    labels = np.arange(60) % 10 == 0
    types = np.arange(60) // 20
    train = np.stack([types != 0, types != 1, types != 2])
    with pytest.raises(ValueError, match=r"None of 100 draws over 3 types.*finer type"):
        control_task(types, labels, train=train)
    types = np.arange(60) // 5
    train = np.stack([types % 4 != number for number in range(4)])
    for seed in range(20):
        control = control_task(types, labels, train=train, seed=seed)
        assert all(control[mask].any() and not control[mask].all() for mask in train)


def test_bad_input_is_explained(rows):
    types, positive, test = rows
    with pytest.raises(ValueError, match="399 entries for 400 rows"):
        control_task(types[1:], positive)
    with pytest.raises(TypeError, match=r"types is .token. .str.; it needs one key per row"):
        coverage("token", test)
    with pytest.raises(ValueError, match="no key for row 2"):
        control_task(["a", "b", None, "c"], np.array([True, False, True, False]))
    with pytest.raises(ValueError, match=r"of one type \('the'\)"):
        control_task(["the"] * 4, np.array([True, False, True, False]))
    with pytest.raises(ValueError, match="test has no row"):
        coverage(types, np.zeros_like(test))


def test_shuffled_labels_keep_groups_together():
    rng = np.random.default_rng(0)
    groups = rng.permutation(np.repeat(np.arange(50), rng.integers(1, 5, 50)))
    by_group = (np.arange(50) % 3)[groups]
    shuffled = shuffled_labels(by_group, groups, seed=1)
    assert (shuffled != by_group).any()
    assert all(len(set(shuffled[groups == group])) == 1 for group in range(50))
    pairs = np.repeat(np.arange(40), 2)
    twins = np.arange(80) % 2 == 0
    flipped = shuffled_labels(twins, pairs, seed=2)
    assert (flipped.reshape(40, 2).sum(axis=1) == 1).all()
    assert 8 < (flipped != twins).sum() / 2 < 32
    mixed = rng.random(len(groups)) < 0.5
    sizes = np.bincount(groups)[groups]
    again = shuffled_labels(mixed, groups, seed=3)
    for size in set(sizes):
        assert again[sizes == size].sum() == mixed[sizes == size].sum()
    np.testing.assert_array_equal(again, shuffled_labels(mixed, groups, seed=3))

    # one mixed group makes the label vary inside groups; whole groups must still exchange theirs
    nearly = np.repeat(np.arange(40) % 2 == 0, 2)
    nearly[0] = False
    exchanged = shuffled_labels(nearly, pairs, seed=4).reshape(40, 2).sum(axis=1)
    assert (exchanged != nearly.reshape(40, 2).sum(axis=1)).sum() > 8
    assert sorted(exchanged) == sorted(nearly.reshape(40, 2).sum(axis=1))


@pytest.mark.parametrize("groups", [np.arange(4), np.array(list("aabbccddee")), np.arange(10) - 1])
def test_a_shuffle_wants_a_group_number_for_every_label(groups):
    with pytest.raises(ValueError, match="one group number per row"):
        unwrap(shuffled_labels)(np.arange(10) % 2 == 0, groups)

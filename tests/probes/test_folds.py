import numpy as np
import pytest
from sklearn.linear_model import Ridge
from sklearn.metrics import roc_auc_score

from microtome.probes.folds import grouped_folds, nested_folds
from microtome.probes.groups import group_codes


def many_groups(seed):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2, 300), rng.zipf(1.7, 300) % 60


@pytest.mark.parametrize("seed", range(5))
def test_every_row_once_and_every_group_whole(seed):
    labels, groups = many_groups(seed)
    test = grouped_folds(labels, groups, folds=4, seed=seed)
    assert test.sum(axis=0).tolist() == [1] * 300
    for group in np.unique(groups):
        assert test[:, groups == group].any(axis=1).sum() == 1


@pytest.mark.parametrize("seed", range(5))
def test_nested_folds_partition_the_training_rows(seed):
    labels, groups = many_groups(seed)
    test = grouped_folds(labels, groups, folds=4, seed=seed)
    nested = nested_folds(labels, groups, test, folds=3, seed=seed)
    assert np.array_equal(nested.sum(axis=1), (~test).astype(int))
    for fold in nested:
        for group in np.unique(groups):
            assert fold[:, groups == group].any(axis=1).sum() <= 1


def test_classes_and_sizes_are_level():
    labels = np.random.default_rng(0).permutation(np.arange(600) % 600 < 150).astype(int)
    test = grouped_folds(labels, np.arange(600), folds=5)
    assert test.sum(axis=1).tolist() == [120] * 5
    assert [int(labels[rows].sum()) for rows in test] == [30] * 5


def test_same_seed_same_folds_other_seed_others():
    labels, groups = many_groups(0)
    first = grouped_folds(labels, groups, seed=1)
    assert np.array_equal(first, grouped_folds(labels, groups, seed=1))
    assert not np.array_equal(first, grouped_folds(labels, groups, seed=2))


def out_of_fold_auroc(features, labels, test):
    scores = []
    for rows in test:
        fit = Ridge(alpha=100.0).fit(features[~rows], labels[~rows])
        scores.append(roc_auc_score(labels[rows], fit.predict(features[rows])))
    return np.mean(scores)


@pytest.mark.parametrize(("design", "row_split"), [("twins", 0.27), ("same label", 0.69)])
def test_leakage_fixture(design, row_split):
    # no signal: each of 400 entities is a random vector, its rows are that vector plus noise
    by_row, by_group = [], []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        entity = np.repeat(np.arange(400), 2 if design == "twins" else 4)
        labels = np.tile([0, 1], 400) if design == "twins" else np.repeat(rng.permutation(np.arange(400) % 2), 4)
        features = rng.normal(size=(400, 128))[entity] + 0.6 * rng.normal(size=(len(entity), 128))
        rows = np.arange(len(entity))
        by_row.append(out_of_fold_auroc(features, labels, grouped_folds(labels, rows, seed=seed)))
        by_group.append(out_of_fold_auroc(features, labels, grouped_folds(labels, entity, seed=seed)))
        with pytest.raises(ValueError, match="400 entity key in column 'entity' value"):
            group_codes("rows", n_rows=len(entity), entities={"entity": entity})
    assert np.mean(by_row) == pytest.approx(row_split, abs=0.04)
    assert np.mean(by_group) == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize(
    ("labels", "groups", "message"),
    [
        ([0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 2, 2], "3 groups cannot fill 5 folds"),
        ([1, 1, 1, 1, 1, 1], [0, 1, 2, 3, 4, 5], "folds need two classes"),
        ([0, 0, 0, 0, 0, 1], [0, 1, 2, 3, 4, 5], "Class 1 has 1 rows for 5 folds"),
        (
            [0, 0, 0, 0, 0, 1, 1, 1, 1, 1],
            [0, 1, 2, 3, 4, 5, 5, 5, 5, 5],
            "hold no row of class 1, which lies in 1 of 6 groups",
        ),
        ([0, 1, 0], [0, 1], "3 labels for 2 groups"),
    ],
)
def test_impossible_folds_are_named(labels, groups, message):
    with pytest.raises(ValueError, match=message):
        grouped_folds(np.array(labels), np.array(groups), folds=5)


def test_one_fold_is_no_cross_validation():
    with pytest.raises(ValueError, match="folds=1; cross-validation needs at least 2"):
        grouped_folds(np.arange(6) % 2, np.arange(6), folds=1)


def test_a_class_in_two_groups_has_no_inner_training_rows():
    labels = np.array([0] * 8 + [1] * 8)
    groups = np.array([0, 1, 2, 3, 4, 5, 6, 7] + [8] * 4 + [9] * 4)
    with pytest.raises(ValueError, match=r"inner training \(outer fold 0\) rows of fold \d hold no row of class 1"):
        nested_folds(labels, groups, grouped_folds(labels, groups, folds=2), folds=2)


def test_classes_are_called_by_their_names() -> None:
    labels, groups = np.array([0] * 30 + [1] * 2), np.arange(32)
    with pytest.raises(ValueError, match="Class 'rare' has 2 rows for 3 folds"):
        grouped_folds(labels, groups, folds=3, names=("'often'", "'rare'"))
    with pytest.raises(ValueError, match="no row of class 'rare', which lies in 1 of 31 groups"):
        grouped_folds(np.append(labels, 1), np.append(np.minimum(groups, 30), 30), folds=3, names=("'often'", "'rare'"))


def test_inner_folds_are_at_least_two():
    labels = np.arange(40) % 2
    test = grouped_folds(labels, np.arange(40), folds=4)
    for folds in (0, 1):
        with pytest.raises(ValueError, match=f"inner_folds={folds}"):
            nested_folds(labels, np.arange(40), test, folds=folds)

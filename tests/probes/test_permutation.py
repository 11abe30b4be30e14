import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler

from microtome.probes.folds import grouped_folds
from microtome.probes.permutation import RIDGE, best_site_null, group_permutations, ridge_auroc


def grouped_labels(design, rng):
    if design == "rows":
        return rng.random(60) < 0.4, np.arange(60)
    if design == "constant in group":
        return np.repeat(rng.permutation(np.arange(40) % 2 == 0), 3), np.repeat(np.arange(40), 3)
    if design == "twins":
        return np.tile([True, False], 40), np.repeat(np.arange(40), 2)
    groups = np.repeat(np.arange(60), rng.integers(1, 4, 60))
    return rng.random(len(groups)) < 0.5, groups


@pytest.mark.parametrize("design", ["rows", "constant in group", "twins", "uneven"])
def test_shuffles_respect_groups_and_folds(design):
    positive, groups = grouped_labels(design, np.random.default_rng(0))
    test = grouped_folds(positive.astype(int), groups, folds=4)
    shuffled = group_permutations(positive, groups, test, permutations=50, seed=0)
    assert (shuffled != positive).any(axis=1).all()
    for rows in test:
        assert (shuffled[:, rows].sum(axis=1) == positive[rows].sum()).all()
        sizes = np.bincount(groups[rows])
        for size in np.unique(sizes[sizes > 0]):
            members = [np.flatnonzero(groups == g) for g in np.flatnonzero(sizes == size)]
            held = np.sort([shuffled[:, m].sum(axis=1) for m in members], axis=0)
            assert (held == np.sort([positive[m].sum() for m in members])[:, None]).all()
    if design == "constant in group":
        assert (shuffled.reshape(50, 40, 3) == shuffled.reshape(50, 40, 3)[..., :1]).all()
    if design == "twins":
        assert (shuffled.reshape(50, 40, 2).sum(axis=2) == 1).all()


def test_texts_of_all_lengths_exchange_the_label_that_each_has():
    # tokens of texts: 24 lengths, each once, one label per text
    groups = np.repeat(np.arange(24), np.arange(24) + 5)
    positive = (np.arange(24) % 2 == 0)[groups]
    test = groups % 3 == np.arange(3)[:, None]
    shuffled = group_permutations(positive, groups, test, permutations=400, seed=0)
    first = np.unique(groups, return_index=True)[1]
    assert (shuffled == shuffled[:, first][:, groups]).all()
    by_group = shuffled[:, first]
    for fold in range(3):
        assert (by_group[:, fold::3].sum(axis=1) == 4).all()
    assert (by_group != positive[first]).any(axis=0).all()
    # where a label stays in half of the shuffles, the shuffle owes nothing to the real one
    assert np.abs((by_group == positive[first]).mean(axis=0) - 0.5).max() < 0.15


def test_a_rare_size_exchanges_and_a_frequent_one_keeps_to_itself():
    sizes = np.repeat([3, 4, 9], [12, 2, 1])
    groups = np.repeat(np.arange(15), sizes)
    positive = (np.arange(15) % 2 == 0)[groups]
    test = np.ones((1, len(groups)), dtype=bool)
    shuffled = group_permutations(positive, groups, test, permutations=200, seed=0)
    by_group = shuffled[:, np.unique(groups, return_index=True)[1]]
    assert (by_group[:, :12].sum(axis=1) == 6).all()
    assert (by_group[:, 12:].sum(axis=1) == 2).all()
    assert by_group[:, 14].mean() == pytest.approx(2 / 3, abs=0.1)


def test_a_few_rows_of_rare_sizes_keep_to_themselves():
    groups = np.repeat(np.arange(102), np.repeat([1, 3, 4], [100, 1, 1]))
    positive = (np.arange(102) % 2 == 0)[groups]
    shuffled = group_permutations(positive, groups, np.ones((1, len(groups)), dtype=bool), permutations=50, seed=0)
    assert (shuffled[:, 100:] == positive[100:]).all()
    assert (shuffled[:, :100].sum(axis=1) == 50).all()


def test_every_arrangement_is_equally_likely():
    # 6 rows of one fold, 3 positive: 20 arrangements
    positive, groups, test = np.arange(6) < 3, np.arange(6), np.ones((1, 6), dtype=bool)
    shuffled = group_permutations(positive, groups, test, permutations=20_000, seed=1)
    counts = np.unique(shuffled, axis=0, return_counts=True)[1]
    assert len(counts) == 20
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001


def random_sites(n, sites, width, *, seed=0, dtype=torch.float32):
    return torch.randn(sites, n, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def labellings(positive, groups, test, permutations, seed=0):
    shuffled = group_permutations(positive, groups, test, permutations=permutations, seed=seed)
    return torch.from_numpy(np.concatenate([positive[None], shuffled]))


@pytest.mark.parametrize("width", [3, 40, 130], ids=["thin", "square", "wide"])
def test_agreement_with_scikit_learn(width):
    rng = np.random.default_rng(1)
    positive, groups = rng.random(90) < 0.4, np.arange(90)
    test = grouped_folds(positive.astype(int), groups, folds=3)
    features = random_sites(90, 4, width) * 5 + 20
    labels = labellings(positive, groups, test, 6)
    ours = ridge_auroc(features, labels, torch.from_numpy(test))
    for site, x in enumerate(features.double().numpy()):
        for row, y in enumerate(labels.numpy()):
            folds, pairs = [], []
            for rows in test:
                scaler = StandardScaler().fit(x[~rows])
                fit = Ridge(alpha=RIDGE * (~rows).sum()).fit(scaler.transform(x[~rows]), y[~rows])
                folds.append(roc_auc_score(y[rows], fit.predict(scaler.transform(x[rows]))))
                pairs.append(y[rows].sum() * (~y[rows]).sum())
            assert ours[site, row].item() == pytest.approx(np.average(folds, weights=pairs), abs=1e-9)


def test_sites_are_independent_of_their_neighbours_and_of_constant_shifts():
    rng = np.random.default_rng(2)
    positive, groups = rng.random(60) < 0.5, np.arange(60)
    test = grouped_folds(positive.astype(int), groups, folds=3)
    features, labels = random_sites(60, 5, 8), labellings(positive, groups, test, 10)
    together = ridge_auroc(features, labels, torch.from_numpy(test))
    alone = torch.cat([ridge_auroc(x[None], labels, torch.from_numpy(test)) for x in features])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-9)
    scaled = ridge_auroc(features * 1000 - 7, labels, torch.from_numpy(test))
    torch.testing.assert_close(scaled, together, rtol=0, atol=2e-3)


def test_tied_scores_count_half():
    positive, groups = np.arange(60) % 2 == 0, np.arange(60)
    test = grouped_folds(positive.astype(int), groups, folds=3)
    labels = labellings(positive, groups, test, 10)
    constant = ridge_auroc(torch.ones(1, 60, 4), labels, torch.from_numpy(test))
    assert torch.equal(constant, torch.full((1, 11), 0.5, dtype=torch.float64))
    # one binary feature that equals the label on all but 12 rows: two score values only
    feature = torch.from_numpy(positive ^ (np.arange(60) < 12)).float()[None, :, None]
    real = ridge_auroc(feature, labels, torch.from_numpy(test))[0, 0].item()
    folds = [roc_auc_score(positive[rows], feature[0, rows, 0].numpy()) for rows in test]
    assert real == pytest.approx(np.mean(folds), abs=1e-12)


def test_planted_site_is_found_and_its_neighbours_are_not():
    rng = np.random.default_rng(3)
    positive, groups = rng.permutation(np.arange(300) % 2 == 0), np.arange(300)
    test = grouped_folds(positive.astype(int), groups, folds=5)
    features = random_sites(300, 30, 16)
    features[17, :, 3] += torch.from_numpy(positive) * 1.0
    null = best_site_null(ridge_auroc(features, labellings(positive, groups, test, 199), torch.from_numpy(test)))
    assert null.statistic.argmax().item() == 17
    assert null.p_value[17].item() == pytest.approx(1 / 200)
    assert (null.p_value < 0.05).sum().item() == 1
    assert null.statistic[17] > null.line > 0.5
    assert (null.maximum > null.line).double().mean().item() <= 0.05


@pytest.mark.parametrize("design", ["rows", "twins"])
def test_family_wise_error_on_noise(design):
    # 300 runs at 5 %: at most 27 rejections in 99.9 % of worlds where the level holds
    runs, rejections = 300, 0
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        positive, groups = grouped_labels(design, rng)
        test = grouped_folds(positive.astype(int), groups, folds=4, seed=seed)
        labels = labellings(positive, groups, test, 39, seed=seed)
        features = random_sites(len(positive), 6, 5, seed=seed)
        rejections += int(best_site_null(ridge_auroc(features, labels, torch.from_numpy(test))).p_value.min() <= 0.05)
    assert rejections <= 27


def test_p_value_by_hand():
    null = best_site_null(torch.tensor([[0.9, 0.5, 0.6, 0.4], [0.6, 0.5, 0.5, 0.7], [0.5, 0.4, 0.4, 0.4]]).double())
    assert null.maximum.tolist() == pytest.approx([0.5, 0.6, 0.7])
    assert null.p_value.tolist() == pytest.approx([1 / 4, 3 / 4, 4 / 4])
    assert null.line == pytest.approx(0.7)


def test_labels_that_cannot_move_are_refused():
    groups = np.repeat(np.arange(4), [1, 2, 3, 4])
    positive = np.array([False, True, False, True])[groups]
    each_alone = groups == np.arange(4)[:, None]
    with pytest.raises(ValueError, match=r"Only 1 arrangement\(s\) of the labels respect the groups"):
        group_permutations(positive, groups, each_alone, permutations=9, seed=0)
    positive, groups = np.arange(4) < 2, np.arange(4)
    with pytest.raises(ValueError, match=r"Only 6 arrangement.*no p-value below 0\.17"):
        group_permutations(positive, groups, np.ones((1, 4), dtype=bool), permutations=9, seed=0)


def test_null_without_shuffles_is_refused():
    with pytest.raises(ValueError, match="at least one shuffle"):
        best_site_null(torch.tensor([[0.5], [0.6]], dtype=torch.float64))
    with pytest.raises(ValueError, match="no fold with both classes"):
        ridge_auroc(torch.randn(1, 6, 2), torch.ones(1, 6).bool(), torch.arange(6)[None] < 3)

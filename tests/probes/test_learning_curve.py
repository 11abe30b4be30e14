import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from microtome.probes.folds import grouped_folds
from microtome.probes.learning_curve import _sizes, _subsets, curve_scores, learning_curve

STRENGTHS = (0.01, 0.1, 1.0)


@pytest.fixture
def case():
    """A hundred groups of two rows; 20 features, of which site 0 has four weak ones and site 1 a strong one."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(100), 2)
    positive = (rng.permutation(100) % 2 == 0)[groups]
    features = rng.normal(size=(2, 200, 20))
    features[0, :, :4] += 0.7 * positive[:, None]
    features[1, :, 5] += 4.0 * positive
    return torch.from_numpy(features), positive, groups


def test_more_groups_help_where_there_is_something_to_learn(case):
    features, positive, groups = case
    sites = {"resid_post.0": features[0], "resid_post.1": features[1]}
    curve = learning_curve(sites, positive, groups=groups, repeats=3, bootstraps=200)
    table = curve.table
    assert table["groups"].tolist() == [10, 20, 40, 80] * 2
    assert table["rows"].tolist() == [20, 40, 80, 160] * 2
    best = table.loc[table["auroc"].argmax()]
    assert repr(curve).startswith("LearningCurve(2 sites, 10 to 80 training groups; best ")
    assert f"best {best['site']} AUROC {best['auroc']:.3f} [{best['auroc_low']:.3f}, " in repr(curve)
    assert "<th>auroc_spread</th>" in curve._repr_html_()
    weak, strong = table["auroc"].to_numpy().reshape(2, 4)
    assert weak[-1] > weak[0] + 0.08
    assert strong.min() > 0.85
    assert ((table["auroc_low"] < table["auroc"]) & (table["auroc"] <= table["auroc_high"])).all()
    # all rows in every order: only the chosen strength may differ
    assert (table["auroc_spread"][table["groups"] == 80] < 0.005).all()
    assert (table["auroc_spread"][table["groups"] == 10] > 0.01).all()
    assert [trace.name for trace in curve.plot().data] == ["resid_post.0", "resid_post.1"]


def test_agreement_with_a_loop_over_scikit_learn(case):
    features, positive, groups = case
    test = grouped_folds(positive.astype(np.int64), groups, folds=4)
    subsets = np.stack([_subsets(positive, groups, ~rows, [12, 30, 75], 2, n) for n, rows in enumerate(test)])
    scores, chosen = curve_scores(
        features[:1], torch.from_numpy(positive), torch.from_numpy(test), torch.from_numpy(subsets), STRENGTHS
    )
    x = features[0].numpy()

    def fitted(mask, strength):
        mean, scale = x[mask].mean(axis=0), x[mask].std(axis=0)
        model = LogisticRegression(C=strength, solver="newton-cholesky", tol=1e-12)
        model.fit((x[mask] - mean) / scale, positive[mask])
        return model.decision_function((x - mean) / scale)

    for fold, rows in enumerate(test):
        loss = dict.fromkeys(STRENGTHS, 0.0)
        for size in range(3):
            before, until = subsets[fold, 1, size], subsets[fold, 1, size + 1]
            new = until & ~before
            for strength in STRENGTHS:
                loss[strength] += np.logaddexp(0, np.where(positive, -1, 1) * fitted(before, strength))[new].sum()
            best = min(loss, key=loss.get)
            assert chosen[0, size, 1, fold].item() == best
            np.testing.assert_allclose(scores[0, size, 1, rows], fitted(until, best)[rows], atol=1e-3)


def test_subsets_are_nested_whole_groups_of_both_classes(case):
    _, positive, groups = case
    train = groups % 5 != 0
    subsets = _subsets(positive, groups, train, [8, 20, 80], 6, 0)
    assert subsets.shape == (6, 4, 200)
    assert (subsets[:, 1:] >= subsets[:, :-1]).all()
    assert not (subsets & ~train).any()
    assert (subsets[:, -1] == train).all()
    assert (subsets.sum(axis=-1) == [8, 16, 40, 160]).all()
    assert np.isin(subsets.reshape(6, 4, 100, 2).sum(axis=-1), [0, 2]).all()
    n_positive = (subsets & positive).sum(axis=-1)
    assert ((n_positive > 0) & (n_positive < subsets.sum(axis=-1))).all()
    assert (subsets[0] != subsets[1]).any()


def test_no_bit_of_a_fold_depends_on_its_test_rows(case):
    features, positive, groups = case
    test = grouped_folds(positive.astype(np.int64), groups, folds=3)
    subsets = torch.from_numpy(
        np.stack([_subsets(positive, groups, ~rows, [12, 66], 2, n) for n, rows in enumerate(test)])
    )
    arguments = torch.from_numpy(positive), torch.from_numpy(test), subsets, STRENGTHS
    spoiled = features.clone()
    row = int(np.flatnonzero(test[1])[0])
    spoiled[:, row] = 1e9
    clean, dirty = curve_scores(features, *arguments), curve_scores(spoiled, *arguments)
    others = test[1].copy()
    others[row] = False
    assert torch.equal(clean[0][..., others], dirty[0][..., others])
    assert torch.equal(clean[1][..., 1], dirty[1][..., 1])
    assert not torch.equal(clean[0], dirty[0])


def test_sizes_halve_down_to_eight():
    assert _sizes(None, 80) == [10, 20, 40, 80]
    assert _sizes(None, 9) == [9]
    assert _sizes([4, 30], 80) == [4, 30, 80]
    assert _sizes([4, 80], 80) == [4, 80]


def test_bad_input_is_explained(case):
    features, positive, groups = case
    sites = {"a": features[0]}
    with pytest.raises(ValueError, match="labels are classes"):
        learning_curve(sites, [str(g % 3) for g in groups], groups=groups)
    with pytest.raises(ValueError, match=r"sizes=\[10, 5\].*from 2 to 80"):
        learning_curve(sites, positive, groups=groups, sizes=[10, 5])
    with pytest.raises(ValueError, match=r"sizes=\[90\]"):
        learning_curve(sites, positive, groups=groups, sizes=[90])
    with pytest.raises(ValueError, match="repeats=0"):
        learning_curve(sites, positive, groups=groups, repeats=0)
    rare = groups < 6
    with pytest.raises(ValueError, match="Give larger sizes"):
        learning_curve(sites, rare, groups=groups, sizes=[2], folds=3)

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from microtome.capture.sites import Site
from microtome.probes.measures import Resampling
from microtome.probes.nested_fit import NestedFit
from microtome.probes.permutation import best_site_null
from microtome.probes.sweep_table import selected_site, sweep_table

PROBES = (Site("z", 3, 1), Site("resid_post", 0, stack="encoder"), Site("pooled"))


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    labellings = torch.rand(2, 60, generator=generator) < 0.4
    test = torch.arange(60) % 2 == torch.arange(2)[:, None]
    fits = [
        NestedFit(
            scores=torch.randn(2, 60, generator=generator, dtype=torch.float64) + number * labellings,
            inner_loss=torch.tensor([[0.9, 0.2 + 0.1 * number], [0.1, 0.1]], dtype=torch.float64),
            fold_strengths=torch.ones(2, 2, dtype=torch.float64),
            strength=0.1 * (number + 1),
            coefficients=torch.zeros(4, dtype=torch.float64),
            intercept=torch.zeros((), dtype=torch.float64),
        )
        for number in range(3)
    ]
    fits[2].inner_loss[0, 0] = 0.5
    return fits, labellings, torch.arange(60) // 2 * 2 + torch.arange(60) % 2, test


def test_columns_are_what_they_say(case):
    fits, labellings, groups, test = case
    null = best_site_null(torch.tensor([[0.6, 0.55], [0.5, 0.5], [0.7, 0.65]], dtype=torch.float64))
    table = sweep_table(PROBES, fits, labellings, "binary", Resampling(groups, test, 50, 0), null)
    assert table["site"].tolist() == ["z.3.1", "encoder.resid_post.0", "pooled"]
    assert table["kind"].tolist() == ["z", "encoder.resid_post", "pooled"]
    assert table["layer"].tolist()[:2] == [3, 0]
    assert table["layer"].isna().tolist() == [False, False, True]
    assert table["head"].isna().tolist() == [False, True, True]
    assert table["p_best_site"].tolist() == [1.0, 1.0, 0.5]
    assert table["strength"].tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert table["width"].tolist() == [4, 4, 4]
    for number, fit in enumerate(fits):
        for prefix, labels, scores in (
            ("", labellings[0], fit.scores[0]),
            ("control_", labellings[1], fit.scores[1]),
        ):
            row = table.iloc[number]
            y, s = labels.numpy(), scores.numpy()
            folds = [roc_auc_score(y[rows], s[rows]) for rows in test.numpy()]
            pairs = [y[rows].sum() * (~y[rows]).sum() for rows in test.numpy()]
            assert row[f"{prefix}auroc"] == pytest.approx(np.average(folds, weights=pairs))
            assert row[f"{prefix}accuracy"] == pytest.approx(((s > 0) == y).mean())
            for name in ("auroc", "accuracy"):
                assert row[f"{prefix}{name}_low"] < row[f"{prefix}{name}"] < row[f"{prefix}{name}_high"]
        assert table["selectivity"][number] == pytest.approx(table["auroc"][number] - table["control_auroc"][number])
        y, s = labellings[0].numpy(), fit.scores[0].numpy()
        assert table["balanced_accuracy"][number] == pytest.approx(balanced_accuracy_score(y, s > 0))
    share = labellings[0].double().mean().item()
    assert table["majority_rate"][0] == pytest.approx(max(share, 1 - share))


def test_without_a_null_there_is_no_p(case):
    fits, labellings, groups, test = case
    table = sweep_table(PROBES, fits, labellings, "binary", Resampling(groups, test, 20, 0), None)
    assert table["p_best_site"].isna().all()
    assert table["ridge_auroc"].isna().all()


def test_selection_takes_the_lowest_inner_loss_of_each_fold(case):
    fits, labellings, groups, test = case
    selected = selected_site(PROBES, fits, labellings[0], "binary", Resampling(groups, test, 50, 0))
    found = selected.measures
    assert selected.sites == ("pooled", "z.3.1")
    expected = torch.where(test[0], fits[2].scores[0], fits[0].scores[0])
    y = labellings[0].numpy()
    folds = [roc_auc_score(y[rows], expected.numpy()[rows]) for rows in test.numpy()]
    pairs = [y[rows].sum() * (~y[rows]).sum() for rows in test.numpy()]
    assert found["auroc"] == pytest.approx(np.average(folds, weights=pairs))
    assert found["accuracy"] == pytest.approx(((expected > 0) == labellings[0]).double().mean().item())
    assert found["auroc_low"] < found["auroc"] < found["auroc_high"]


def test_intervals_are_stretched_for_cross_validation():
    test = torch.arange(10) % 5 == torch.arange(5)[:, None]
    assert Resampling(torch.arange(10), test, 10, 0).stretch == pytest.approx(1.5)

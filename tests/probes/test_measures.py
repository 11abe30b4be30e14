"""Measures of classes and of numbers, against scikit-learn and scipy."""

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.metrics import (
    balanced_accuracy_score,
    f1_score,
    log_loss,
    mean_squared_error,
    r2_score,
    roc_auc_score,
)

from microtome.probes.measures import Resampling, baseline_rate, intervals_of, others_of, squared_errors


@pytest.fixture
def folds():
    test = torch.arange(120) % 4 == torch.arange(4)[:, None]
    return Resampling(torch.arange(120) // 2, test, draws=400, seed=0)


def test_classes_against_scikit_learn(folds) -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 3, 120)
    scores = rng.normal(size=(2, 120, 3)) + np.eye(3)[truth]
    found = intervals_of(torch.tensor(scores), torch.tensor(truth), "classes", folds)
    others = others_of(torch.tensor(scores), torch.tensor(truth), "classes", folds.test)
    for probe, logits in enumerate(scores):
        by_class = []
        for code in range(3):
            parts = [(truth[rows] == code, logits[rows, code]) for rows in folds.test.numpy()]
            pairs = [is_it.sum() * (~is_it).sum() for is_it, _ in parts]
            by_class.append(np.average([roc_auc_score(*part) for part in parts], weights=pairs))
        assert found["auroc"].estimate[probe].item() == pytest.approx(np.mean(by_class))
        assert found["auroc"].low[probe] < np.mean(by_class) < found["auroc"].high[probe] < 1
        answers = logits.argmax(1)
        assert found["accuracy"].estimate[probe].item() == pytest.approx((answers == truth).mean())
        assert others["balanced_accuracy"][probe].item() == pytest.approx(balanced_accuracy_score(truth, answers))
        assert others["macro_f1"][probe].item() == pytest.approx(f1_score(truth, answers, average="macro"))
        softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        assert others["bits"][probe].item() == pytest.approx(log_loss(truth, softmax) / np.log(2))
        assert found["auroc"].low[probe] < found["auroc"].estimate[probe] < found["auroc"].high[probe]
    assert baseline_rate(torch.tensor(truth), "classes") == pytest.approx(np.bincount(truth).max() / 120)


def test_numbers_against_scikit_learn_and_scipy(folds) -> None:
    rng = np.random.default_rng(1)
    truth = rng.normal(size=120) * 3 + 5
    scores = truth + rng.normal(size=(2, 120)) * [[0.5], [4.0]]
    found = intervals_of(torch.tensor(scores), torch.tensor(truth), "numbers", folds)["r2"]
    others = others_of(torch.tensor(scores), torch.tensor(truth), "numbers", folds.test)
    null = np.empty(120)
    for rows in folds.test.numpy():
        null[rows] = truth[~rows].mean()
    for probe, predicted in enumerate(scores):
        expected = 1 - ((truth - predicted) ** 2).sum() / ((truth - null) ** 2).sum()
        assert found.estimate[probe].item() == pytest.approx(expected)
        assert abs(expected - r2_score(truth, predicted)) < 0.02 * (
            1 + abs(expected)
        )  # scikit-learn takes the mean of the test rows
        assert others["spearman"][probe].item() == pytest.approx(spearmanr(truth, predicted).statistic)
        assert others["rmse"][probe].item() == pytest.approx(mean_squared_error(truth, predicted) ** 0.5)
        assert found.low[probe] < found.estimate[probe] < found.high[probe]
    assert np.isnan(baseline_rate(torch.tensor(truth), "numbers"))


def test_the_training_mean_scores_zero_and_a_constant_has_no_rank_correlation(folds) -> None:
    truth = torch.randn(120, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    means = torch.stack([truth[~rows].mean() for rows in folds.test])[folds.test.long().argmax(0)]
    errors, null = squared_errors(means[None], truth, folds.test)
    assert torch.equal(errors[0], null)
    found = intervals_of(means[None], truth, "numbers", folds)["r2"]
    assert (found.low.item(), found.estimate.item(), found.high.item()) == (0, 0, 0)
    constant = torch.full((1, 120), 3.0, dtype=torch.float64)
    assert others_of(constant, truth, "numbers", folds.test)["spearman"].item() == 0


def test_intervals_of_numbers_cover_the_mean_of_their_draws() -> None:
    # rows in pairs that err alike: groups, not rows, are drawn
    generator = torch.Generator().manual_seed(0)
    test = torch.arange(400) % 4 == torch.arange(4)[:, None]
    truth = torch.randn(400, dtype=torch.float64, generator=generator)
    wrong = torch.randn(40, dtype=torch.float64, generator=generator).repeat_interleave(10)
    by_group = Resampling(torch.arange(400) // 10, test, 1000, 0)
    by_row = Resampling(torch.arange(400), test, 1000, 0)
    width = [
        (found.high - found.low).item()
        for found in (intervals_of((truth + wrong)[None], truth, "numbers", rows)["r2"] for rows in (by_group, by_row))
    ]
    assert width[0] > 1.7 * width[1]


def test_scores_that_are_no_numbers_are_refused(folds) -> None:
    scores = torch.zeros(1, 120, dtype=torch.float64)
    scores[0, 3] = torch.nan
    for kind, truth in (("numbers", torch.randn(120, dtype=torch.float64)), ("binary", torch.arange(120) % 2 == 0)):
        with pytest.raises(ValueError, match="NaN"):
            intervals_of(scores, truth, kind, folds)

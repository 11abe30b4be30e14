import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, balanced_accuracy_score, log_loss, roc_auc_score

from microtome.probes.metrics import (
    accuracy,
    auroc,
    average_ranks,
    balanced_accuracy,
    fold_auroc,
    log_loss_bits,
    logit_loss_bits,
    majority_rate,
)


@pytest.fixture(params=["continuous", "tied"])
def case(request):
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(7, 60, generator=generator, dtype=torch.float64)
    positive = torch.rand(60, generator=generator) < 0.4
    scores = scores + positive * torch.arange(7)[:, None] / 3
    return (scores if request.param == "continuous" else (2 * scores).round()), positive


def test_swapped_labels_give_exactly_one_minus(case):
    scores, positive = case
    assert torch.equal(auroc(scores, ~positive), 1 - auroc(scores, positive))


def test_swapped_labels_give_exactly_one_minus_at_every_size():
    # sizes where U / (n+ n-) and 1 - it round differently unless care is taken
    generator = torch.Generator().manual_seed(0)
    for n in range(2, 120):
        scores, positive = torch.randn(n, generator=generator), torch.arange(n) < max(1, n // 3)
        assert auroc(scores, ~positive) == 1 - auroc(scores, positive)


def test_negated_scores_mirror_and_monotone_maps_change_nothing(case):
    scores, positive = case
    assert torch.equal(auroc(-scores, positive), 1 - auroc(scores, positive))
    assert torch.equal(auroc(scores.exp(), positive), auroc(scores, positive))


def test_constant_is_half_and_perfect_is_one():
    positive = torch.tensor([True, False, True, False, False])
    assert auroc(torch.zeros(2, 5), positive).tolist() == [0.5, 0.5]
    assert auroc(positive.float(), positive).item() == 1.0
    assert balanced_accuracy(torch.ones(5), positive).item() == 0.5
    assert log_loss_bits(torch.zeros(5), positive).item() == pytest.approx(1.0, abs=1e-15)


def test_ranks_average_ties():
    assert average_ranks(torch.tensor([3.0, 1.0, 3.0, 2.0, 3.0])).tolist() == [4.0, 1.0, 4.0, 2.0, 4.0]


def test_agreement_with_scikit_learn(case):
    scores, positive = case
    y = positive.numpy()
    for row, s in enumerate(scores.numpy()):
        assert auroc(scores, positive)[row].item() == pytest.approx(roc_auc_score(y, s), abs=1e-14)
        assert accuracy(scores, positive)[row].item() == pytest.approx(accuracy_score(y, s > 0), abs=1e-14)
        expected = balanced_accuracy_score(y, s > 0)
        assert balanced_accuracy(scores, positive)[row].item() == pytest.approx(expected, abs=1e-14)
        bits = log_loss(y, 1 / (1 + np.exp(-s))) / np.log(2)
        assert log_loss_bits(scores, positive)[row].item() == pytest.approx(bits, rel=1e-12)


def test_labels_per_probe(case):
    scores, positive = case
    each = torch.stack([positive.roll(shift) for shift in range(len(scores))])
    alone = torch.stack([auroc(s, p) for s, p in zip(scores, each, strict=True)])
    assert torch.equal(auroc(scores, each), alone)


def test_fold_auroc_compares_only_rows_of_one_fold(case):
    scores, positive = case
    test = torch.arange(60) % 3 == torch.arange(3)[:, None]
    shifted = scores + (torch.arange(60) % 3) * 1000.0
    assert torch.equal(fold_auroc(shifted, positive, test), fold_auroc(scores, positive, test))
    folds = torch.stack([auroc(scores[:, rows], positive[rows]) for rows in test])
    pairs = torch.tensor([int(positive[rows].sum() * (~positive[rows]).sum()) for rows in test], dtype=torch.float64)
    torch.testing.assert_close(fold_auroc(scores, positive, test), pairs @ folds / pairs.sum())


def test_log_loss_of_extreme_logits_is_finite_and_right():
    losses = logit_loss_bits(torch.tensor([-2000.0, 2000.0, 0.0]), torch.tensor([True, True, False]))
    assert losses[0].item() == pytest.approx(2000 / np.log(2))
    assert losses[1].item() == 0.0
    assert losses[2].item() == pytest.approx(1.0)


def test_majority_rate():
    assert majority_rate(torch.tensor([True, True, True, False])) == 0.75
    assert majority_rate(torch.tensor([False, False, True])) == pytest.approx(2 / 3)


def test_nan_scores_are_refused():
    with pytest.raises(ValueError, match=r"1 of the scores are NaN \(first at index \(1,\)\)"):
        auroc(torch.tensor([0.0, float("nan")]), torch.tensor([True, False]))


@pytest.mark.parametrize("metric", [auroc, balanced_accuracy])
def test_one_class_is_refused(metric):
    with pytest.raises(ValueError, match="2 of 2 labels are positive"):
        metric(torch.tensor([0.0, 1.0]), torch.tensor([True, True]))

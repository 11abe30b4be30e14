import math

import numpy as np
import pytest
import torch

from microtome.probes.bootstrap import (
    bootstrap_accuracy,
    bootstrap_auroc,
    cross_validation_stretch,
    group_counts,
    paired_difference,
    percentile_intervals,
)
from microtome.probes.metrics import accuracy, fold_auroc


def random_case(n, *, folds=5, probes=4, separation=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    positive = torch.rand(n, generator=generator) < 0.45
    scores = torch.randn(probes, n, generator=generator, dtype=torch.float64) + separation * positive
    test = torch.arange(n) % folds == torch.arange(folds)[:, None]
    return scores, positive, torch.arange(n), test


def width(intervals):
    return intervals.high - intervals.low


def auroc_intervals(scores, positive, groups, test, **options):
    draws = bootstrap_auroc(scores, positive, groups, test, seed=3)
    return percentile_intervals(fold_auroc(scores, positive, test), draws, **options)


def test_ten_copies_of_every_row_in_its_group_change_no_width():
    scores, positive, groups, test = random_case(200)
    copies = [x.repeat_interleave(10, dim=-1) for x in (scores, positive, groups, test)]
    alone, copied = auroc_intervals(scores, positive, groups, test), auroc_intervals(*copies)
    torch.testing.assert_close(width(copied), width(alone), rtol=1e-4, atol=0)
    # the wrong answer: copies taken for independent rows shrink the interval by sqrt(10)
    rows = auroc_intervals(copies[0], copies[1], torch.arange(2000), copies[3])
    torch.testing.assert_close(width(rows) * math.sqrt(10), width(alone), rtol=0.1, atol=0)
    right, right_copied = (scores > 0) == positive, (copies[0] > 0) == copies[1]
    torch.testing.assert_close(
        bootstrap_accuracy(right_copied, copies[2], seed=1), bootstrap_accuracy(right, groups, seed=1)
    )


def test_swapped_labels_mirror_every_draw():
    scores, positive, groups, test = random_case(120)
    draws = bootstrap_auroc(scores, positive, groups, test, draws=50)
    torch.testing.assert_close(bootstrap_auroc(scores, ~positive, groups, test, draws=50), 1 - draws)


def test_perfect_and_constant_scores_do_not_vary():
    _, positive, groups, test = random_case(100)
    scores = torch.stack([positive.double(), torch.zeros(100, dtype=torch.float64)])
    draws = bootstrap_auroc(scores, positive, groups, test, draws=100)
    torch.testing.assert_close(draws, torch.tensor([[1.0], [0.5]]).expand(2, 100))


@pytest.mark.parametrize(("n", "tied"), [(100, False), (600, False), (600, True)])
def test_first_order_form_agrees_with_resampling_rows(n, tied):
    scores, positive, groups, test = random_case(n)
    groups = groups // 2 * 5 % 1000 if n == 600 else groups
    groups = torch.from_numpy(np.unique(groups.numpy(), return_inverse=True)[1])
    scores = (2 * scores).round() if tied else scores
    fold_of_group = torch.zeros(int(groups.max()) + 1, dtype=torch.int64).index_copy_(0, groups, torch.arange(n) % 5)
    test = fold_of_group[groups] == torch.arange(5)[:, None]
    counts = torch.cat(list(group_counts(positive, groups, test, draws=300, seed=3)), dim=1)
    resampled = torch.empty(len(scores), 300)
    for draw in range(300):
        rows = torch.arange(n).repeat_interleave(counts[groups, draw].long())
        resampled[:, draw] = fold_auroc(scores[:, rows], positive[rows], test[:, rows])
    draws = bootstrap_auroc(scores, positive, groups, test, draws=300, seed=3)
    # left out: a term of order 1/n, seen here as the loss of spread it causes
    torch.testing.assert_close(draws.std(dim=1), resampled.std(dim=1), rtol=0.05 if n == 100 else 0.015, atol=0)
    assert ((draws - resampled).mean(dim=1).abs() < 0.05 * resampled.std(dim=1)).all()


def test_accuracy_draws_are_resampled_accuracies():
    scores, positive, groups, _ = random_case(60)
    groups = groups // 3
    draws = bootstrap_accuracy((scores > 0) == positive, groups, draws=40, seed=5)
    counts = torch.zeros(20, 40)
    drawn = torch.randint(20, (20, 40), generator=torch.Generator().manual_seed(5))
    counts.scatter_add_(0, drawn, torch.ones(20, 40))
    for draw in range(40):
        rows = torch.arange(60).repeat_interleave(counts[groups, draw].long())
        torch.testing.assert_close(
            draws[:, draw].double(), accuracy(scores[:, rows], positive[rows]), rtol=1e-6, atol=0
        )


def test_interval_covers_the_truth_of_a_fixed_probe():
    # scores of a probe that was never trained on these rows: AUROC is Phi(d / sqrt 2), the interval covers it
    truth = 0.5 * (1 + math.erf(1.0 / 2))
    covered = 0
    for seed in range(200):
        scores, positive, groups, test = random_case(150, probes=1, folds=1, separation=1.0, seed=seed)
        draws = bootstrap_auroc(scores, positive, groups, test, draws=400, seed=seed)
        interval = percentile_intervals(fold_auroc(scores, positive, test), draws)
        covered += int(interval.low <= truth <= interval.high)
    assert 0.91 <= covered / 200 <= 0.985


def test_paired_difference_is_narrower_than_two_intervals():
    scores, positive, groups, test = random_case(300, probes=1)
    noise = torch.randn(300, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    scores = torch.cat([scores, scores + 0.1 * noise])
    draws, estimate = bootstrap_auroc(scores, positive, groups, test), fold_auroc(scores, positive, test)
    gap = paired_difference(estimate, draws, 0, 1)
    assert gap.estimate.item() == pytest.approx((estimate[0] - estimate[1]).item())
    assert gap.low.item() < gap.estimate.item() < gap.high.item()
    assert width(gap).item() < 0.3 * width(percentile_intervals(estimate, draws)).min().item()
    assert width(paired_difference(estimate, draws, 1, 1)).item() == 0


def test_stretch_widens_both_arms_and_stops_at_the_bounds():
    draws = torch.linspace(0.8, 0.96, 1001)[None]
    plain = percentile_intervals(torch.tensor([0.9], dtype=torch.float64), draws)
    wide = percentile_intervals(torch.tensor([0.9], dtype=torch.float64), draws, stretch=2.0)
    assert 0.9 - wide.low.item() == pytest.approx(2 * (0.9 - plain.low.item()))
    assert wide.high.item() == 1.0
    assert cross_validation_stretch(5) == 1.5


def test_same_seed_same_draws():
    case = random_case(80)
    assert torch.equal(bootstrap_auroc(*case, draws=20, seed=1), bootstrap_auroc(*case, draws=20, seed=1))
    assert not torch.equal(bootstrap_auroc(*case, draws=20, seed=1), bootstrap_auroc(*case, draws=20, seed=2))


def test_draws_without_a_pair_are_drawn_again():
    # two groups of one class each: half of all draws hold one class only
    positive, groups = torch.tensor([True, True, False, False]), torch.tensor([0, 0, 1, 1])
    draws = bootstrap_auroc(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), positive, groups, torch.ones(1, 4).bool(), draws=200)
    torch.testing.assert_close(draws, torch.full((1, 200), 0.75))


def test_errors_name_the_cause():
    scores, positive, groups, test = random_case(40)
    with pytest.raises(ValueError, match="1 of the scores are NaN"):
        bootstrap_auroc(torch.where(torch.arange(40) == 3, math.nan, scores[:1]), positive, groups, test)
    with pytest.raises(ValueError, match="No fold holds a positive and a negative row"):
        bootstrap_auroc(scores, torch.ones(40).bool(), groups, test)
    estimate, draws = torch.tensor([0.5], dtype=torch.float64), torch.rand(1, 10)
    with pytest.raises(ValueError, match=r"level=1\.5"):
        percentile_intervals(estimate, draws, level=1.5)
    with pytest.raises(ValueError, match=r"stretch=0\.5 would narrow"):
        percentile_intervals(estimate, draws, stretch=0.5)

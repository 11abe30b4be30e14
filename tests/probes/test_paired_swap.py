"""paired_swap: linear in the signs, equal to exchanging scores and ranking again, and honest about luck."""

import pytest
import torch
from torch import Tensor

from microtome.probes.metrics import average_ranks, fold_auroc
from microtome.probes.paired_swap import paired_swap, swap_contributions


def case(n_sites: int = 3, n_rows: int = 60, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    positive = torch.rand(n_rows, generator=generator) > 0.5
    first = torch.randn(n_sites, n_rows, generator=generator, dtype=torch.float64) + 0.5 * positive
    second = torch.randn(n_sites, n_rows, generator=generator, dtype=torch.float64).round(decimals=1)
    groups = torch.arange(n_rows) // 2
    test = (groups % 3) == torch.arange(3)[:, None]
    return first, second, positive, groups, test


def test_contributions_sum_to_the_difference() -> None:
    first, second, positive, _, test = case()
    expected = fold_auroc(first, positive, test) - fold_auroc(second, positive, test)
    torch.testing.assert_close(swap_contributions(first, second, positive, test).sum(1), expected)


def test_signs_give_what_exchanging_the_ranks_gives() -> None:
    first, second, positive, groups, test = case()
    contributions = swap_contributions(first, second, positive, test)
    ranks = torch.stack([first, second])
    for rows in test:
        ranks[:, :, rows] = average_ranks(ranks[:, :, rows])
    for seed in range(5):
        exchanged = (torch.rand(30, generator=torch.Generator().manual_seed(seed)) > 0.5)[groups]
        one, other = torch.where(exchanged, ranks[1], ranks[0]), torch.where(exchanged, ranks[0], ranks[1])
        expected = fold_auroc(one, positive, test) - fold_auroc(other, positive, test)
        torch.testing.assert_close((contributions * torch.where(exchanged, -1.0, 1.0)).sum(1), expected)


def test_the_better_probe_is_found_and_only_there() -> None:
    first, second, positive, groups, test = case(n_rows=300)
    first[0] += positive
    first[1:] = torch.randn(2, 300, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    null = paired_swap(first, second, positive, groups, test)
    assert null.p_best_site[0] == pytest.approx(1 / 1000)
    assert (null.p_best_site[1:] > 0.05).all()
    assert (null.p_best_site >= null.p_value).all()


def test_stretch_widens_the_null() -> None:
    first, second, positive, groups, test = case()
    plain = paired_swap(first, second, positive, groups, test)
    wide = paired_swap(first, second, positive, groups, test, stretch=2.0)
    torch.testing.assert_close(wide.maximum, 2 * plain.maximum)
    assert (wide.p_value >= plain.p_value).all()
    assert wide.p_best_site[0] > plain.p_best_site[0]


def test_a_probe_against_itself_is_never_better() -> None:
    first, _, positive, groups, test = case()
    null = paired_swap(first, first, positive, groups, test)
    assert (null.difference == 0).all()
    assert (null.p_value == 1).all()


def test_the_best_of_many_useless_sites_is_rarely_called() -> None:
    called = 0
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        first, second = torch.randn(2, 20, 80, generator=generator, dtype=torch.float64)
        positive, groups = torch.arange(80) % 2 == 0, torch.arange(80)
        test = (groups // 2 % 4) == torch.arange(4)[:, None]
        null = paired_swap(first, second, positive, groups, test, permutations=99, seed=seed)
        called += bool(null.p_best_site.min() <= 0.05)
    assert called <= 11  # 5 % of 100, and three standard errors


def test_bad_input_says_what_to_do() -> None:
    first, second, positive, groups, test = case()
    with pytest.raises(ValueError, match="give at least 20"):
        paired_swap(first, second, positive, groups, test, permutations=5)
    with pytest.raises(ValueError, match="would narrow the null"):
        paired_swap(first, second, positive, groups, test, stretch=0.5)
    with pytest.raises(ValueError, match="no pair to rank"):
        paired_swap(first, second, torch.ones_like(positive), groups, test)
    with pytest.raises(ValueError, match="NaN"):
        paired_swap(first * torch.nan, second, positive, groups, test)

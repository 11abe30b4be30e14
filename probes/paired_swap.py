"""Is one probe better than another at any of many sites? Their scores are exchanged, group by group, at random.

If the two probes of a site are equally good, it does not matter which of two scores of a row came from which. For every
exchange b of whole groups (sign -1: exchanged), the same at every site, the difference D_sb of the two `fold_auroc` is
taken anew; with T_b = max_s D_sb,

    p_s = (1 + #{b : T_b >= D_s}) / (B + 1)

is the chance that the best of all sites gains as much by luck (single-step max-T, as in `permutation`). Scores of two
probes have no common unit, so they are exchanged as ranks within the fold, which no AUROC notices.

The difference is linear in the signs: with M_ab(i, j) = 1 where probe a ranks positive i above where probe b ranks
negative j (ties half), the products of signs cancel between the two AUROC, and over the P pairs of the folds

    D = Σ_g sign_g Σ_{rows r of g} c_r,   c_i = Σ_j [M_11 - M_22 + M_12 - M_21](i, j) / 2P  for a positive i,
                                          c_j = Σ_i [M_11 - M_22 - M_12 + M_21](i, j) / 2P  for a negative j,

so that one product serves all exchanges exactly, without ranking anything again.

Beware: `stretch`. Under cross-validation the rows of one fold train the probes of the others, so differences of useless
probes scatter more than exchanging their scores shows, as with intervals (`bootstrap`). Without stretch the test at 5 %
called the best of 12 sites of pure noise in 7 of 30 runs (160 rows, 8 features, 5 folds, logistic against network);
with the exchanged differences stretched by `cross_validation_stretch`, in 4 of 150, and in none of 50 where every site
carried a linear signal.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from microtome.probes.metrics import average_ranks, refuse_nan


@dataclass(frozen=True, eq=False)
class SwapNull:
    """fold_auroc of the first probe minus that of the second, against exchanged scores."""

    difference: Float64[Tensor, " site"]
    p_value: Float64[Tensor, " site"]  # of this site alone, that the first is better; from 1 / (B + 1)
    p_best_site: Float64[Tensor, " site"]  # of the best of all sites
    maximum: Float64[Tensor, " permutation"]  # largest difference of any site in each exchange


def paired_swap(
    first: Float64[Tensor, "site example"],
    second: Float64[Tensor, "site example"],
    positive: Bool[Tensor, " example"],
    groups: Int64[Tensor, " example"],
    test: Bool[Tensor, "fold example"],
    *,
    permutations: int = 999,
    seed: int = 0,
    stretch: int | float = 1.0,
) -> SwapNull:
    """Test the first probe of every site against the second on the same held-out rows.

    `stretch` widens the exchanged differences: `cross_validation_stretch(folds)` for scores of cross-validation. Raises
    ValueError for a NaN score, fewer than 20 permutations, a stretch below 1, and if no fold holds both classes.
    """
    if permutations < 20:
        raise ValueError(f"permutations={permutations}: p is at least 1 / (permutations + 1); give at least 20.")
    if stretch < 1:
        raise ValueError(f"stretch={stretch} would narrow the null; it is 1 or more.")
    for scores in (first, second):
        refuse_nan(scores)
    contributions = swap_contributions(first, second, positive, test)
    by_group = torch.zeros(int(groups.max()) + 1, len(first), dtype=torch.float64)
    by_group.index_add_(0, groups, contributions.T.contiguous())
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (permutations, len(by_group)), generator=generator).double() * 2 - 1
    exchanged = stretch * (signs @ by_group)
    maximum = exchanged.amax(1)
    difference = by_group.sum(0)
    # sums in another order must still tie with themselves
    reached = difference - 1e-12
    return SwapNull(
        difference=difference,
        p_value=(1 + (exchanged >= reached).sum(0)).double() / (permutations + 1),
        p_best_site=(1 + (maximum[:, None] >= reached).sum(0)).double() / (permutations + 1),
        maximum=maximum,
    )


def swap_contributions(
    first: Float64[Tensor, "site example"],
    second: Float64[Tensor, "site example"],
    positive: Bool[Tensor, " example"],
    test: Bool[Tensor, "fold example"],
) -> Float64[Tensor, "site example"]:
    """c_r of every row: they sum to the difference of the two fold_auroc, and change sign when the row is exchanged."""
    contributions = torch.zeros(first.shape, dtype=torch.float64)
    pairs = 0
    for rows in test:
        is_positive, is_negative = positive[rows], ~positive[rows]
        pairs += int(is_positive.sum()) * int(is_negative.sum())
        if not bool(is_positive.any() and is_negative.any()):
            continue
        ranks = [average_ranks(scores[:, rows]) for scores in (first, second)]
        above = [rank[:, is_positive].contiguous() for rank in ranks]
        below = [rank[:, is_negative].contiguous() for rank in ranks]
        won = [[_below(a, b) for b in below] for a in above]
        lost = [[a.shape[1] - _below(b, a) for b in below] for a in above]
        of_fold = torch.empty(len(first), int(rows.sum()), dtype=torch.float64)
        of_fold[:, is_positive] = (won[0][0] - won[1][1] + won[0][1] - won[1][0]) / 2
        of_fold[:, is_negative] = (lost[0][0] - lost[1][1] - lost[0][1] + lost[1][0]) / 2
        contributions[:, rows] = of_fold
    if pairs == 0:
        raise ValueError("No fold holds a positive and a negative row: there is no pair to rank.")
    return contributions / pairs


def _below(values: Tensor, others: Tensor) -> Float64[Tensor, "site value"]:
    """How many of the others lie below each value, ties half."""
    ordered = others.sort(-1).values
    return (torch.searchsorted(ordered, values) + torch.searchsorted(ordered, values, right=True)).double() / 2

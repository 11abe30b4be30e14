"""Is one probe better than another on the same rows, and would the ranking of many come out alike again?

The difference of two scores on the same rows is far less uncertain than each alone. Beside it:

    interval   of metric(first) - metric(second) over draws of whole groups, the same draws for both (`bootstrap`),
               widened for cross-validation
    p_value    two-sided, from exchanging the two probes' scores group by group at random: if both are equally good it
               does not matter which score came from which. p = (1 + #{b: |D_b| >= |D|}) / (B + 1)
    p_any      the same against the largest |D_b| of all pairs given: for "some pair differs"

AUROC's exchange is that of `paired_swap`; accuracy and bits are means over rows, whose differences change sign. A
positive difference says that the first is better for AUROC and accuracy, that it needs more bits for bits.

Beware: probes are taken as they are fitted. Both numbers are about these probes on rows like these.
"""

from typing import Literal, get_args

import pandas as pd
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from microtome.probes.bootstrap import bootstrap_auroc, cross_validation_stretch, percentile_intervals
from microtome.probes.metrics import fold_auroc, logit_loss_bits, refuse_nan
from microtome.probes.paired_swap import swap_contributions
from microtome.probes.sweep_result import Sweep

Metric = Literal["auroc", "accuracy", "bits"]
_FEWEST_DRAWS = 100


def compare_scores(
    first: Float64[Tensor, "pair example"],
    second: Float64[Tensor, "pair example"],
    positive: Bool[Tensor, " example"],
    groups: Int64[Tensor, " example"],
    test: Bool[Tensor, "fold example"],
    *,
    metric: Metric = "auroc",
    draws: int = 2000,
    permutations: int = 1999,
    seed: int = 0,
) -> pd.DataFrame:
    """One row per pair of out-of-fold logits: first, second (the metric), difference, low, high, p_value, p_any.

    Raises ValueError for a NaN score, labels of several classes or numbers, another metric, fewer than 100 draws or
    permutations, and as `bootstrap_auroc`.
    """
    if min(draws, permutations) < _FEWEST_DRAWS:
        raise ValueError(f"draws={draws}, permutations={permutations}; give at least {_FEWEST_DRAWS} of each.")
    if metric not in get_args(Metric):
        raise ValueError(f"metric={metric!r}; give one of {', '.join(get_args(Metric))}.")
    if first.dim() != 2 or first.shape != second.shape or positive.dtype != torch.bool or len(first) == 0:
        raise ValueError(
            f"Scores are {list(first.shape)} and {list(second.shape)}, labels {positive.dtype}; a comparison takes "
            "[pair, example] logits of two classes on both sides, at least one pair. Make classes or numbers two: "
            "labels == VALUE."
        )
    n_rows = first.shape[1]
    if (len(positive), len(groups), test.dim(), test.shape[-1]) != (n_rows, n_rows, 2, n_rows):
        raise ValueError(
            f"{len(positive)} labels, {len(groups)} groups and folds {list(test.shape)} for scores of {n_rows} rows; "
            "give one label and group per row, and folds [fold, example]."
        )
    refuse_nan(first), refuse_nan(second)
    if metric == "auroc":
        both = torch.cat([first, second])
        of_first, of_second = fold_auroc(both, positive, test).split(len(first))
        drawn = bootstrap_auroc(both, positive, groups, test, draws=draws, seed=seed).double()
        drawn = drawn[: len(first)] - drawn[len(first) :]
        contributions = swap_contributions(first, second, positive, test)
    else:
        rowwise = [_row_values(scores, positive, metric) for scores in (first, second)]
        of_first, of_second = (values.mean(dim=-1) for values in rowwise)
        contributions = (rowwise[0] - rowwise[1]) / len(positive)
        drawn = _drawn_means(rowwise[0] - rowwise[1], groups, draws=draws, seed=seed)
    difference = of_first - of_second
    bounds = (-float("inf"), float("inf")) if metric == "bits" else (-1.0, 1.0)
    interval = percentile_intervals(difference, drawn, stretch=cross_validation_stretch(len(test)), bounds=bounds)
    by_group = torch.zeros(int(groups.max()) + 1, len(first), dtype=torch.float64)
    by_group.index_add_(0, groups, contributions.T.contiguous())
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (permutations, len(by_group)), generator=generator).double() * 2 - 1
    exchanged = (signs @ by_group).abs()
    # sums in another order must still tie with themselves
    reached = difference.abs() - 1e-12
    columns = {
        "first": of_first,
        "second": of_second,
        "difference": difference,
        "low": interval.low,
        "high": interval.high,
        "p_value": (1 + (exchanged >= reached).sum(dim=0)).double() / (permutations + 1),
        "p_any": (1 + (exchanged.amax(dim=1, keepdim=True) >= reached).sum(dim=0)).double() / (permutations + 1),
    }
    return pd.DataFrame({name: column.double().numpy() for name, column in columns.items()})


def compare_sites(
    sweep: Sweep,
    pairs: list[tuple[str, str]],
    *,
    metric: Metric = "auroc",
    draws: int = 2000,
    permutations: int = 1999,
    seed: int = 0,
) -> pd.DataFrame:
    """`compare_scores` of pairs of sites of one sweep, with their names as columns first_site and second_site.

    Raises KeyError for a site that was not probed.
    """
    at = _rows_of(sweep, [site for pair in pairs for site in pair])
    first, second = (sweep.scores[[at[pair[side]] for pair in pairs]] for side in (0, 1))
    table = compare_scores(
        first,
        second,
        sweep.truth,
        sweep.groups,
        sweep.test,
        metric=metric,
        draws=draws,
        permutations=permutations,
        seed=seed,
    )
    names = {f"{name}_site": [pair[side] for pair in pairs] for side, name in ((0, "first"), (1, "second"))}
    return pd.concat([pd.DataFrame(names), table], axis=1)


def compare_sweeps(
    first: Sweep,
    second: Sweep,
    *,
    metric: Metric = "auroc",
    draws: int = 2000,
    permutations: int = 1999,
    seed: int = 0,
) -> pd.DataFrame:
    """`compare_scores` of two sweeps of the same rows (another probe, another model) at every site that both have.

    Raises ValueError for other labels, groups or folds, and if they share no site.
    """
    same = all(torch.equal(getattr(first, name), getattr(second, name)) for name in ("truth", "groups", "test"))
    if not same:
        raise ValueError(
            "The sweeps have other labels, groups or folds, so their scores are not of the same rows. Sweep the same "
            "rows in the same order with the same seed and number of folds."
        )
    known = set(second.table["site"])
    sites = [site for site in first.table["site"] if site in known]
    if not sites:
        raise ValueError("The sweeps share no site. Compare two sites with compare_scores(first.scores[...], ...).")
    table = compare_scores(
        first.scores[list(_rows_of(first, sites).values())],
        second.scores[list(_rows_of(second, sites).values())],
        first.truth,
        first.groups,
        first.test,
        metric=metric,
        draws=draws,
        permutations=permutations,
        seed=seed,
    )
    return pd.concat([pd.DataFrame({"site": sites}), table], axis=1)


def _rows_of(sweep: Sweep, sites: list[str]) -> dict[str, int]:
    names = sweep.table["site"].tolist()
    if unknown := [site for site in sites if site not in names]:
        raise KeyError(f"{unknown[0]} was not probed. Probed were {', '.join(names[:8])}.")
    return {site: names.index(site) for site in sites}


def _row_values(scores: Float[Tensor, "pair example"], positive: Bool[Tensor, " example"], metric: Metric) -> Tensor:
    if metric == "accuracy":
        return ((scores > 0) == positive).double()
    return logit_loss_bits(scores, positive)


def _drawn_means(
    values: Float64[Tensor, "pair example"], groups: Int64[Tensor, " example"], *, draws: int, seed: int
) -> Float64[Tensor, "pair draw"]:
    """Means over the rows of each draw of groups."""
    n_groups = int(groups.max()) + 1
    drawn = torch.randint(n_groups, (n_groups, draws), generator=torch.Generator().manual_seed(seed))
    counts = torch.zeros(n_groups, draws, dtype=torch.float64)
    counts.scatter_add_(0, drawn, torch.ones_like(drawn, dtype=torch.float64))
    total = torch.zeros(n_groups, len(values), dtype=torch.float64).index_add_(0, groups, values.T.contiguous())
    size = torch.bincount(groups, minlength=n_groups).double()
    return (total.T @ counts) / (size @ counts)

"""Is one probe better than another on the same rows, or better than what the words alone tell?

The difference of two scores on the same rows is far less uncertain than each alone. Beside it:

    interval   of metric(first) - metric(second) over draws of whole groups, the same draws for both (`bootstrap`),
               its arms widened for cross-validation (by 1.5 with 5 folds)
    p_value    two-sided, from exchanging the two probes' scores group by group at random: if both are equally good it
               does not matter which score came from which. p = (1 + #{b: s |D_b| >= |D|}) / (B + 1), the exchanged
               differences widened by the same s as the interval's arms (`paired_swap` measured why)
    p_any      the same against the largest |D_b| / d of all pairs given: for "some pair differs". d is the deviation
               of the pair's own D_b, so that a pair whose scores scatter much does not hide the others

Every D_b is linear in the signs of the groups, D_b = sum_g sign_g c_g, so d^2 = sum_g c_g^2. AUROC's c are those of
`paired_swap`, of several classes their mean over the classes against the rest (a row's scores for all classes are
exchanged together); accuracy and bits are means over rows, and R2 differs by sum (e_second - e_first) / sum (y - mean
of the fold's training rows)^2 with squared errors e: their c change sign. A positive difference says that the first is
better for AUROC, accuracy and R2, that it needs more bits for bits.

Interval and p may disagree at the border, as they answer different questions: the interval says how large the
difference would be on other rows, p whether these two lists of scores can be told apart. With several pairs look at
p_any, which alone minds how many were tried, and say "better" only where the interval agrees.

Beware: probes are taken as they are fitted. Both numbers are about these probes on rows like these.
"""

import math
from typing import Literal

import pandas as pd
import torch
from jaxtyping import Bool, Float64, Int64, Shaped
from torch import Tensor

from microtome.probes.bootstrap import percentile_intervals
from microtome.probes.measures import Resampling, against_rest, main_measure, right, squared_errors
from microtome.probes.metrics import class_loss_bits, logit_loss_bits, refuse_nan
from microtome.probes.paired_swap import swap_contributions
from microtome.probes.sweep_result import Sweep
from microtome.probes.target import MAIN, Kind

Metric = Literal["auroc", "accuracy", "bits", "r2"]
_FEWEST_DRAWS = 100
_BOUNDS = {"auroc": (-1.0, 1.0), "accuracy": (-1.0, 1.0)}
_ROUNDING = 1e-12  # sums in another order must still tie with themselves


def compare_scores(
    first: Float64[Tensor, "pair example *output"],
    second: Float64[Tensor, "pair example *output"],
    truth: Shaped[Tensor, " example"],
    groups: Int64[Tensor, " example"],
    test: Bool[Tensor, "fold example"],
    *,
    metric: Metric | None = None,
    draws: int = 2000,
    permutations: int = 1999,
    stretch: int | float | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """One row per pair of out-of-fold scores: first, second (the metric), difference, low, high, p_value, p_any.

    Args:
        first, second: logits; with an axis of classes where there are several; predicted numbers.
        truth: bool, class numbers (int64), or numbers (float64).
        metric: "auroc" (of several classes the mean of each against the rest), "accuracy" or "bits"; of numbers "r2".
            If None, AUROC or R2.
        stretch: of intervals and exchanged differences; that of the folds if None, 1 for probes fitted on other rows.

    Raises ValueError for a metric or scores of another kind of truth, a NaN score, fewer than 100 draws or
    permutations, and as `bootstrap_auroc`.
    """
    if min(draws, permutations) < _FEWEST_DRAWS:
        raise ValueError(f"draws={draws}, permutations={permutations}; give at least {_FEWEST_DRAWS} of each.")
    kind = _kind(first, truth)
    metric = metric or MAIN[kind]
    allowed = ("r2",) if kind == "numbers" else ("auroc", "accuracy", "bits")
    if metric not in allowed:
        raise ValueError(f"metric={metric!r} for a target of {kind}; give {' or '.join(map(repr, allowed))}.")
    n_rows = first.shape[1]
    if first.shape != second.shape or len(first) == 0:
        raise ValueError(
            f"Scores are {list(first.shape)} and {list(second.shape)}; give at least one pair, both alike."
        )
    if (len(truth), len(groups), test.dim(), test.shape[-1]) != (n_rows, n_rows, 2, n_rows):
        raise ValueError(
            f"{len(truth)} labels, {len(groups)} groups and folds {list(test.shape)} for scores of {n_rows} rows; "
            "give one label and group per row, and folds [fold, example]."
        )
    refuse_nan(first), refuse_nan(second)
    rows = Resampling(groups, test, draws=draws, seed=seed)
    stretch = rows.stretch if stretch is None else float(stretch)
    both = torch.cat([first, second])
    if metric == MAIN[kind]:
        values, of_draws = main_measure(both, truth, kind, rows)
        of_first, of_second = values.split(len(first))
        drawn = of_draws.double()[: len(first)] - of_draws.double()[len(first) :]
        contributions = _main_contributions(first, second, truth, kind, test)
    else:
        of_rows = _row_values(both, truth, kind, metric)
        of_first, of_second = of_rows.mean(dim=-1).split(len(first))
        by_row = of_rows[: len(first)] - of_rows[len(first) :]
        contributions = by_row / len(truth)
        drawn = _drawn_means(by_row, groups, draws=draws, seed=seed)
    difference = of_first - of_second
    bounds = _BOUNDS.get(metric, (-math.inf, math.inf))
    interval = percentile_intervals(difference, drawn, stretch=stretch, bounds=bounds)
    options = {"stretch": stretch, "permutations": permutations, "seed": seed}
    p_value, p_any = _exchanged(difference, contributions, groups, **options)
    columns = {
        "first": of_first,
        "second": of_second,
        "difference": difference,
        "low": interval.low,
        "high": interval.high,
        "p_value": p_value,
        "p_any": p_any,
    }
    return pd.DataFrame({name: column.double().numpy() for name, column in columns.items()})


def compare_sites(
    sweep: Sweep,
    pairs: list[tuple[str, str]],
    *,
    metric: Metric | None = None,
    draws: int = 2000,
    permutations: int = 1999,
    seed: int = 0,
) -> pd.DataFrame:
    """`compare_scores` of pairs of sites of one sweep, with their names as columns first_site and second_site.

    A name may also be a baseline of the sweep: compare_sites(result, [("resid_post.14", "bag")]) asks whether the site
    tells more than the words do. (A site of that name comes first.)

    Raises KeyError for a name that is neither.
    """
    at = _rows_of(sweep, [name for pair in pairs for name in pair])
    scores = sweep.scores if not len(sweep.baseline_scores) else torch.cat([sweep.scores, sweep.baseline_scores])
    first, second = (scores[[at[pair[side]] for pair in pairs]] for side in (0, 1))
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
    metric: Metric | None = None,
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


def _rows_of(sweep: Sweep, wanted: list[str]) -> dict[str, int]:
    """Where each name is among the sites and, after them, the baselines whose scores were kept."""
    sites = sweep.table["site"].tolist()
    words = sweep.baselines["baseline"].tolist() if len(sweep.baseline_scores) else []
    names = sites + words
    if unknown := [name for name in wanted if name not in names]:
        baselines = f"; baselines are {', '.join(words)}" if words else ", and this sweep keeps no baselines"
        raise KeyError(f"{unknown[0]} was not probed. Probed were {', '.join(sites[:8])}{baselines}.")
    return {name: names.index(name) for name in wanted}


def _kind(scores: Tensor, truth: Tensor) -> Kind:
    kinds: dict[torch.dtype, Kind] = {torch.bool: "binary", torch.int64: "classes", torch.float64: "numbers"}
    if truth.dtype not in kinds:
        raise ValueError(f"truth is {truth.dtype}; give bool, class numbers as int64 or numbers as float64.")
    kind = kinds[truth.dtype]
    if scores.ndim != (3 if kind == "classes" else 2):
        axes = "[pair, example, class]" if kind == "classes" else "[pair, example]"
        raise ValueError(f"scores have shape {tuple(scores.shape)}; for a target of {kind} they are {axes}.")
    return kind


def _row_values(scores: Tensor, truth: Tensor, kind: Kind, metric: Metric) -> Float64[Tensor, "pair example"]:
    if metric == "accuracy":
        return right(scores, truth, kind).double()
    return logit_loss_bits(scores, truth) if kind == "binary" else class_loss_bits(scores, truth)


def _main_contributions(
    first: Tensor, second: Tensor, truth: Tensor, kind: Kind, test: Bool[Tensor, "fold example"]
) -> Float64[Tensor, "pair example"]:
    """What each row adds to the difference of the AUROC or R2; the sign turns when the row's scores are exchanged."""
    if kind == "numbers":
        (errors, null), (others, _) = (squared_errors(scores, truth, test) for scores in (first, second))
        return (others - errors) / null.sum()
    of_classes = zip(against_rest(first, truth), against_rest(second, truth), strict=True)
    return torch.stack([swap_contributions(one, other, is_it, test) for (one, is_it), (other, _) in of_classes]).mean(0)


def _exchanged(
    difference: Float64[Tensor, " pair"],
    contributions: Float64[Tensor, "pair example"],
    groups: Int64[Tensor, " example"],
    *,
    stretch: float,
    permutations: int,
    seed: int,
) -> tuple[Float64[Tensor, " pair"], Float64[Tensor, " pair"]]:
    """p of each pair, and against the largest of all pairs in units of their own deviation."""
    by_group = torch.zeros(int(groups.max()) + 1, len(difference), dtype=torch.float64)
    by_group.index_add_(0, groups, contributions.T.contiguous())
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (permutations, len(by_group)), generator=generator).double() * 2 - 1
    exchanged = stretch * (signs @ by_group).abs()
    reached = difference.abs() - _ROUNDING
    deviation = by_group.square().sum(dim=0).sqrt()
    deviation = torch.where(deviation > _ROUNDING, deviation, torch.inf)  # two probes of one score say nothing
    largest = (exchanged / deviation).amax(dim=1, keepdim=True)
    p_value = (1 + (exchanged >= reached).sum(dim=0)).double() / (permutations + 1)
    p_any = (1 + (largest >= reached / deviation).sum(dim=0)).double() / (permutations + 1)
    return p_value, p_any


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

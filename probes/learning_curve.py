"""Score by the number of training groups: would more data help, and does a site need fewer rows than another?

In every outer fold the training groups are put in a random order, `repeats` times; the first m of them train a probe,
for m growing from small to all, and the same test rows score them all. All subsets of a fold are masks of one batched
fit. A size's strength is what did best on the rows that each smaller size had not seen yet:

    C_m = argmin_C  sum_{m' < m}  loss of the probes on the first m' groups, over the rows of the next size,

so it rests on the first m groups alone, as it would for someone who has no more (a strength tuned on rows that the
small sizes are said not to have makes them look better: Perez, Kiela & Cho 2021). Half of the smallest size is fitted
for that choice only.

Beware: the interval is about test rows, widened for cross-validation (`bootstrap`); the spread over orders of the
training groups is a column of its own. At the smallest sizes it is the larger.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from microtome.capture.activations import Activations
from microtome.figures.growth_curve import growth_curve
from microtome.probes.bootstrap import bootstrap_auroc, cross_validation_stretch, percentile_intervals
from microtome.probes.folds import grouped_folds
from microtome.probes.labelled_rows import labelled_rows
from microtome.probes.logistic_solver import WIDE, default_strengths, fit_logistic
from microtome.probes.metrics import fold_auroc, logit_loss_bits
from microtome.probes.table_html import table_html

_SMALLEST = 8  # groups, half of which are fitted to choose the strength
_TOLERANCE = 1e-5
_ORDERS_TRIED = 200
_FEWEST_BOOTSTRAPS = 100


@dataclass(frozen=True, eq=False)
class LearningCurve:
    """table: one row per site and size: groups and rows (training ones, mean over folds), auroc (mean over orders of
    the training groups) with its 95 % interval auroc_low and auroc_high, auroc_spread (standard deviation over orders;
    of the largest size, the same rows in any order, only by the chosen strength), strength (median of the chosen C).
    """

    table: pd.DataFrame

    def __repr__(self) -> str:
        best = self.table.loc[self.table["auroc"].idxmax()]
        first, last = self.table["groups"].min(), self.table["groups"].max()
        return (
            f"LearningCurve({self.table['site'].nunique()} sites, {first:.0f} to {last:.0f} training groups; best "
            f"{best['site']} AUROC {best['auroc']:.3f} [{best['auroc_low']:.3f}, {best['auroc_high']:.3f}] with "
            f"{best['groups']:.0f})"
        )

    def _repr_html_(self) -> str:
        return table_html(repr(self), self.table)

    def plot(self, sites: Sequence[str] | None = None) -> go.Figure:
        """Figure of the named sites (up to four; the first ones if None)."""
        return growth_curve(self.table, sites=sites)


def learning_curve(
    activations: Activations | Mapping,
    labels: str | Sequence | np.ndarray | pd.Series | Tensor,
    *,
    groups: str | Sequence | np.ndarray | pd.Series | Tensor,
    sites: Iterable | None = None,
    sizes: Sequence[int] | None = None,
    repeats: int = 5,
    folds: int = 5,
    strengths: Sequence[float] | None = None,
    bootstraps: int = 1000,
    seed: int = 0,
) -> LearningCurve:
    """AUROC of every site for a growing number of training groups.

    Args:
        activations, labels, groups, sites: as for `sweep`; labels of two classes.
        sizes: training groups, ascending, 2 or more; None halves the largest down to 8. Sizes past the training groups
            of a fold are an error; the largest is always the whole training part.
        repeats: orders of the training groups.
        strengths: values of C to choose from, ascending; `default_strengths` of the width if None.
        bootstraps: draws for the intervals, at least 100.

    Raises ValueError for labels of another kind, sizes that do not fit, classes so rare that no order of the groups
    puts both into the smallest subset; and as `sweep` for its arguments.
    """
    given = labelled_rows(activations, labels, groups=groups, sites=sites)
    if given.target.kind != "binary":
        raise ValueError(
            f"labels are {given.target.kind}; a learning curve tells two classes apart. Make them two: labels == VALUE."
        )
    if repeats < 1 or bootstraps < _FEWEST_BOOTSTRAPS:
        raise ValueError(
            f"repeats={repeats}, bootstraps={bootstraps}; give at least 1 order and {_FEWEST_BOOTSTRAPS} draws."
        )
    positive = given.target.values
    test = grouped_folds(given.target.codes, given.groups, folds=folds, seed=seed)
    n_training = min(len(np.unique(given.groups[~rows])) for rows in test)
    sizes = _sizes(sizes, n_training)
    subsets = torch.from_numpy(
        np.stack(
            [
                _subsets(positive.numpy(), given.groups, ~rows, sizes, repeats, seed + fold)
                for fold, rows in enumerate(test)
            ]
        )
    )
    test = torch.from_numpy(test)
    rows_of_size = subsets.sum(dim=-1).double().mean(dim=(0, 1))[1:].tolist()
    shown = [*sizes[:-1], float(np.mean([len(np.unique(given.groups[~rows])) for rows in test.numpy()]))]
    table, probes = [], iter(given.probes)
    for features in given.chunks():
        scores, chosen = curve_scores(features, positive, test, subsets, strengths)
        for of_site, of_strengths in zip(scores, chosen, strict=True):
            site = str(next(probes))
            for number, (groups_used, rows_used) in enumerate(zip(shown, rows_of_size, strict=True)):
                of_size = of_site[number]
                estimates = fold_auroc(of_size, positive, test)
                draws = bootstrap_auroc(
                    of_size, positive, torch.from_numpy(given.groups), test, draws=bootstraps, seed=seed
                )
                interval = percentile_intervals(
                    estimates.mean()[None], draws.mean(dim=0)[None], stretch=cross_validation_stretch(folds)
                )
                table.append(
                    {
                        "site": site,
                        "groups": groups_used,
                        "rows": rows_used,
                        "auroc": interval.estimate.item(),
                        "auroc_low": interval.low.item(),
                        "auroc_high": interval.high.item(),
                        "auroc_spread": estimates.std(unbiased=False).item(),
                        "strength": of_strengths[number].median().item(),
                    }
                )
    return LearningCurve(pd.DataFrame(table))


def curve_scores(
    features: Float[Tensor, "site example feature"],
    positive: Bool[Tensor, " example"],
    test: Bool[Tensor, "fold example"],
    subsets: Bool[Tensor, "fold repeat size example"],
    strengths: Sequence[float] | None = None,
) -> tuple[Float64[Tensor, "site later repeat example"], Float64[Tensor, "site later repeat fold"]]:
    """Logits of the rows of each fold from every subset but the first (which serves the choice), and the C chosen."""
    values = torch.as_tensor(strengths or default_strengths(features.shape[2]), dtype=torch.float64)
    _, repeats, n_sizes, n_rows = subsets.shape
    scores = torch.empty(len(features), n_sizes - 1, repeats, n_rows, dtype=torch.float64)
    chosen = torch.empty(len(features), n_sizes - 1, repeats, len(test), dtype=torch.float64)
    for fold, rows in enumerate(test):
        # rows outside the fold's masks are not read by the solver: the test rows of this fold among them
        logits = _logits(features, positive, subsets[fold].flatten(0, 1), values).unflatten(1, (repeats, n_sizes))
        for repeat in range(repeats):
            loss = torch.zeros(len(features), len(values), dtype=torch.float64)
            for size, (seen, following) in enumerate(pairwise(subsets[fold, repeat])):
                new = following & ~seen
                loss = loss + logit_loss_bits(logits[:, repeat, size][..., new], positive[new]).sum(dim=-1)
                best = loss.argmin(dim=-1)
                chosen[:, size, repeat, fold] = values[best]
                at_best = logits[torch.arange(len(features)), repeat, size + 1, best]
                scores[:, size, repeat, rows] = at_best[:, rows]
    return scores, chosen


def _logits(
    features: Tensor, positive: Tensor, masks: Tensor, strengths: Tensor
) -> Float64[Tensor, "site mask strength example"]:
    # masks of few rows want the solver's rotated path; one of them would send all there
    distinct, place = masks.unique(dim=0, return_inverse=True)
    narrow = distinct.sum(dim=1) * WIDE < features.shape[2]
    logits = torch.empty(len(features), len(distinct), len(strengths), masks.shape[1], dtype=torch.float64)
    for some in (narrow, ~narrow):
        if some.any():
            fits = fit_logistic(features, positive[None], distinct[some], strengths, tolerance=_TOLERANCE)
            logits[:, some] = fits.decision(features)[:, 0]
    return logits[:, place]


def _sizes(sizes: Sequence[int] | None, n_training: int) -> list[int]:
    if sizes is None:
        sizes = [n_training]
        while sizes[0] // 2 >= _SMALLEST:
            sizes.insert(0, sizes[0] // 2)
        return sizes
    sizes = [int(size) for size in sizes]
    if not sizes or sizes[0] < 2 or any(b <= a for a, b in pairwise(sizes)) or sizes[-1] > n_training:
        raise ValueError(
            f"sizes={sizes}; give numbers of training groups in ascending order, from 2 to {n_training}, the groups "
            "that the smallest training part holds."
        )
    return sizes if sizes[-1] == n_training else [*sizes, n_training]


def _subsets(
    positive: Bool[np.ndarray, " example"],
    groups: Int64[np.ndarray, " example"],
    train: Bool[np.ndarray, " example"],
    sizes: list[int],
    repeats: int,
    seed: int,
) -> Bool[np.ndarray, "repeat size example"]:
    """Nested subsets of the training rows by whole groups: half the smallest size, the sizes, all training rows last.

    Every one holds both classes, every next one has rows that the one before lacks.
    """
    members = np.unique(groups[train])
    ends = np.array([max(1, sizes[0] // 2), *sizes[:-1], len(members)])
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(_ORDERS_TRIED * repeats):
        place = np.full(groups.max() + 1, len(groups))
        place[rng.permutation(members)] = np.arange(len(members))
        rows = place[groups] < ends[:, None]
        if rows[0].sum() > 1 and 0 < positive[rows[0]].sum() < rows[0].sum():
            found.append(rows)
            if len(found) == repeats:
                return np.stack(found)
    raise ValueError(
        f"Hardly any order of the training groups puts both classes into the first {ends[0]} of them. Give larger "
        f"sizes (now {sizes}): half of the first must hold both."
    )

"""Nested cross-validation of many sites' closed-form probes from one set of moments per outer fold.

One pass over the rows gathers the moments of every outer fold (`moments`). The training set of outer fold f is the
other folds, joined; its inner folds are those same others, so that the K (K+1)/2 unions without f and g hold all
training sets of both levels. A second pass scores each row of fold g by the probes of every strength trained without f
and g, and without g alone; with the inner scores of f each strength is calibrated (`logit_fits`) and the one of lowest
log-loss in bits chosen (numbers: of lowest squared error). A third pass scores fold f by the probe chosen for it. Rows
are asked for a chunk at a time: a store larger than memory is probed in bounded memory.

Ridge, mass-mean: logits are the calibrated scores. LDA's scores are log-odds by themselves and stay as they are. Scores
of several classes are kept as log-probabilities, so that one class's score means something without the others. The
probe that is kept is refitted on all rows at the strength of lowest outer loss and calibrated on the outer scores.

Strengths are penalties per training row on standardised features (`moment_probes`), by default nine from 1e-4 (next to
least squares, where rows outnumber features tenfold) to 100 (next to a difference of means): a penalty of 1 weighs as
much as one standardised feature's data does. Mass-mean has none; its strength reads 0.

Beware: with more than 50,000 rows, strengths are chosen and calibrated on that many, evenly spaced within each fold and
class and weighted back; scores and moments are of all rows. d² numbers per site and fold, and time d³ per site, fold
pair and strength: sites of 4,096 features want `logistic`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from microtome.probes.logit_fits import fit_logits
from microtome.probes.moment_probes import LinearPath, Method, linear_path
from microtome.probes.moment_targets import SELECTION_ROWS, Labellings, MomentTargets
from microtome.probes.moments import Moments
from microtome.probes.nested_fit import NestedFit
from microtome.probes.site_threads import side_by_side

DEFAULT_STRENGTHS = tuple(10 ** (-4 + 0.75 * step) for step in range(9))
MOST_BYTES = 2**32  # of the moments of one site
_SITES_BYTES = 2**27  # moments and scores of the sites fitted together
_SCORED_BYTES = 2**26  # float64 rows scored at a time

Chunks = Callable[[], Iterator[Float[Tensor, "site some feature"]]]


def moment_fits(
    features: Float[Tensor, "site example feature"],
    labellings: Labellings,
    test: Bool[Tensor, "fold example"],
    nested: Bool[Tensor, "fold inner example"] | None = None,
    strengths: Sequence[float] | None = None,
    *,
    method: str = "ridge",
) -> list[NestedFit]:
    """Fit all labellings of each site over outer folds `test` and strengths.

    Args:
        features: rows of each site, in memory.
        labellings: real labels first, then controls; bool, class numbers from 0, or numbers in float64.
        test: each row in exactly one fold; three folds or more.
        nested: not used; the inner folds of an outer fold are the other outer ones.
        strengths: penalties per training row; `DEFAULT_STRENGTHS` if None.
        method: "ridge" (classes and numbers), "lda", "mass_mean", "mass_mean_corrected" (classes).

    Raises ValueError for fewer than three folds, rows in none or several, a class without a row in a training set, a
    strength below 0 or 0 where it has no unique solution, numbers with another method than ridge, NaN or infinity.
    """
    n_rows, width = features.shape[1:]
    _refuse_too_wide(width, len(test))
    columns = MomentTargets.of(labellings, test, method)
    n_strengths = len(_strengths(strengths, method))
    n_scores = min(n_rows, SELECTION_ROWS) * len(test) * n_strengths * columns.values.shape[1]
    per_site = 8 * (2 * len(test) * width**2 + n_scores)
    at_once = max(1, min(_SITES_BYTES // per_site, -(-len(features) // torch.get_num_threads())))

    def of_some(some: Tensor) -> list[NestedFit]:
        return moment_fits_of_chunks(lambda: iter((some,)), labellings, test, strengths, method=method)

    return [fit for fits in side_by_side(of_some, features.split(at_once)) for fit in fits]


def moment_fits_of_chunks(
    chunks: Chunks,
    labellings: Labellings,
    test: Bool[Tensor, "fold example"],
    strengths: Sequence[float] | None = None,
    *,
    method: str = "ridge",
) -> list[NestedFit]:
    """`moment_fits` of rows that come in chunks: `chunks()` starts anew, three times, each the same rows in order.

    Raises ValueError as `moment_fits`, and where the chunks hold other than the labellings' rows.
    """
    targets, values = MomentTargets.of(labellings, test, method), _strengths(strengths, method)
    cells = _fold_moments(chunks, targets)
    paths = _Paths.of(cells, values, targets, method)
    selected = _Selection.of(chunks, paths, targets, method)
    scores = _outer_scores(chunks, paths, targets, selected)
    every = _path(cells.of(range(len(test))), values, targets, method)
    fits = []
    for site in range(len(scores)):
        level = int(selected.wanted[site])
        first = slice(targets.classes)  # columns of the first labelling
        slope, offset = selected.refit_slope[site], selected.refit_intercept[site]
        weights = every.weights[site, level, first] * slope
        intercept = every.intercepts[site, level, first] * slope + offset
        is_single = targets.classes == 1
        fits.append(
            NestedFit(
                scores=scores[site],
                inner_loss=selected.inner_loss[site],
                fold_strengths=values[selected.chosen[site]],
                strength=values[level].item(),
                coefficients=weights[0] if is_single else weights,
                intercept=intercept[0] if is_single else intercept,
            )
        )
    return fits


def _refuse_too_wide(width: int, folds: int) -> None:
    if 8 * folds * width**2 > MOST_BYTES:
        raise ValueError(
            f"{width:,} features: the moments of {folds} folds take {8 * folds * width**2 / 1e9:.0f} GB, and more time "
            'still. Probe heads or layers apart, take fewer features, or probe="logistic", which works in the span of '
            "the rows."
        )


def _strengths(strengths: Sequence[float] | None, method: str) -> Float64[Tensor, " strength"]:
    if method in ("mass_mean", "mass_mean_corrected"):
        return torch.zeros(1, dtype=torch.float64)
    values = torch.as_tensor(DEFAULT_STRENGTHS if strengths is None else list(strengths), dtype=torch.float64)
    if len(values) == 0 or not (values.isfinite() & (values >= 0)).all():
        raise ValueError(f"strengths={strengths}; give finite penalties per training row, 0 or more.")
    return values


def _pieces(chunks: Chunks, n_rows: int) -> Iterator[tuple[slice, Tensor]]:
    """Pieces of the chunks and which rows they are."""
    first = 0
    for chunk in chunks():
        for piece in chunk.split(max(1, _SCORED_BYTES // (8 * chunk.shape[0] * chunk.shape[2])), dim=1):
            rows = slice(first, first + piece.shape[1])
            first = rows.stop
            if first <= n_rows:
                yield rows, piece
    if first != n_rows:
        raise ValueError(f"The chunks hold {first} rows, the labels {n_rows}. Give one label per row.")


def _fold_moments(chunks: Chunks, targets: MomentTargets) -> Moments:
    moments = None
    for rows, piece in _pieces(chunks, len(targets.cell)):
        if moments is None:
            n_sites, _, width = piece.shape
            moments = Moments.empty(n_sites, width, targets.values.shape[1], cells=targets.folds)
        moments.update(piece, targets.values[rows], targets.cell[rows])
    return moments


def _path(train: Moments, strengths: Tensor, targets: MomentTargets, method: Method) -> LinearPath:
    # plain mass-mean is calibrated, and a constant beside scores of small features would cost their digits
    return linear_path(train, strengths, method=method, classes=targets.classes, priors=method != "mass_mean")


@dataclass(frozen=True)
class _Paths:
    """Probes of every training set: fold f's without fold g at [f, g], fold f's own at [f, f]."""

    weights: Float64[Tensor, "fold other site strength column feature"]
    intercepts: Float64[Tensor, "fold other site strength column"]

    @classmethod
    def of(cls, cells: Moments, strengths: Tensor, targets: MomentTargets, method: Method) -> "_Paths":
        folds = targets.folds
        paths: dict[tuple[int, int], LinearPath] = {}
        for f, g in combinations_with_replacement(range(folds), 2):
            train = cells.of([cell for cell in range(folds) if cell not in (f, g)])
            paths[f, g] = paths[g, f] = _path(train, strengths, targets, method)

        def stacked(name: str) -> Tensor:
            return torch.stack([torch.stack([getattr(paths[f, g], name) for g in range(folds)]) for f in range(folds)])

        return cls(stacked("weights"), stacked("intercepts"))


@dataclass(frozen=True)
class _Selection:
    """Strengths chosen from scores of other folds, and from scores to logits."""

    chosen: Int64[Tensor, "site labelling fold"]
    inner_loss: Float64[Tensor, "site labelling fold"]
    slope: Float64[Tensor, "site labelling fold"]
    intercept: Float64[Tensor, "site labelling fold class"]
    wanted: Int64[Tensor, " site"]  # the strength of the refit
    refit_slope: Float64[Tensor, " site"]
    refit_intercept: Float64[Tensor, "site class"]

    @classmethod
    def of(cls, chunks: Chunks, paths: _Paths, targets: MomentTargets, method: Method) -> "_Selection":
        scores = _selection_scores(chunks, paths, targets)
        n_folds, n_sites, n_strengths, n_labellings = scores.shape[:4]
        labels, weight = targets.labels[:, targets.selection], targets.selection_weight
        cell = targets.cell[targets.selection]
        at_best = torch.empty(n_sites, n_labellings, n_folds, dtype=torch.int64)
        loss = torch.empty(n_sites, n_labellings, n_folds, dtype=torch.float64)
        slope, intercept = torch.empty_like(loss), loss.new_empty(*loss.shape, targets.classes)
        outer = torch.zeros(n_sites, n_strengths, dtype=torch.float64)
        for fold in range(n_folds):
            inner = cell != fold
            a, b, inner_loss = _calibrated(
                scores[fold][..., inner, :], labels[:, inner], weight[inner], targets, method
            )
            best = inner_loss.argmin(dim=1)  # [site, labelling]
            at_best[..., fold], loss[..., fold] = best, inner_loss.gather(1, best[:, None])[:, 0]
            slope[..., fold] = a.gather(1, best[:, None])[:, 0]
            intercept[..., fold, :] = b.gather(1, best[:, None, :, None].expand(-1, -1, -1, b.shape[-1]))[:, 0]
            held = scores[fold][:, :, 0][..., ~inner, :] * a[:, :, 0, None, None] + b[:, :, 0, None]
            outer += _loss(held, labels[0, ~inner], targets) @ weight[~inner]
        wanted = outer.argmin(dim=1)
        own = scores[cell, :, :, 0, torch.arange(len(cell))]  # [kept, site, strength, class]
        own = own[:, torch.arange(n_sites), wanted].movedim(0, 1)[:, None, None]
        a, b, _ = _calibrated(own, labels[:1], weight, targets, method)
        return cls(at_best, loss, slope, intercept, wanted, a[:, 0, 0], b[:, 0, 0])


def _selection_scores(
    chunks: Chunks, paths: _Paths, targets: MomentTargets
) -> Float64[Tensor, "fold site strength labelling kept class"]:
    """Scores of the selection's rows by the probes that were trained without fold f and without their own."""
    n_folds, _, n_sites, n_strengths, n_columns = paths.intercepts.shape
    kept = targets.selection
    scores = torch.empty(n_folds, n_sites, n_strengths, n_columns, len(kept), dtype=torch.float64)
    for rows, piece in _pieces(chunks, len(targets.cell)):
        first, stop = torch.searchsorted(kept, torch.tensor([rows.start, rows.stop])).tolist()
        if first == stop:
            continue
        mine = kept[first:stop] - rows.start
        for cell in range(n_folds):
            at = (targets.cell[kept[first:stop]] == cell).nonzero()[:, 0]
            x = piece[:, mine[at]].double().mT
            weights = paths.weights[:, cell].movedim(0, 1).flatten(1, 3)  # [site, fold strength column, feature]
            product = (weights @ x).unflatten(1, (n_folds, n_strengths, n_columns)).movedim(1, 0)
            scores[..., first + at] = product + paths.intercepts[:, cell, ..., None]
    return scores.unflatten(3, (-1, targets.classes)).movedim(4, 5)


def _outer_scores(
    chunks: Chunks, paths: _Paths, targets: MomentTargets, selected: _Selection
) -> Float64[Tensor, "site labelling example *class"]:
    """Logits of every row by the chosen probe of its fold."""
    n_sites, n_labellings, n_folds = selected.chosen.shape
    scores = torch.empty(n_sites, n_labellings, targets.classes, len(targets.cell), dtype=torch.float64)
    own = torch.arange(n_folds)
    site, labelling = torch.arange(n_sites)[:, None, None], torch.arange(n_labellings)[:, None]
    by_labelling = paths.weights[own, own].unflatten(3, (n_labellings, -1))
    weights = by_labelling[own, site, selected.chosen, labelling]  # [site, labelling, fold, class, feature]
    intercepts = paths.intercepts[own, own].unflatten(3, (n_labellings, -1))[own, site, selected.chosen, labelling]
    weights = weights * selected.slope[..., None, None]
    intercepts = intercepts * selected.slope[..., None] + selected.intercept
    for rows, piece in _pieces(chunks, len(targets.cell)):
        cells = targets.cell[rows]
        for cell in range(n_folds):
            at = (cells == cell).nonzero()[:, 0]
            product = weights[:, :, cell].flatten(1, 2) @ piece[:, at].double().mT
            logits = product.unflatten(1, (n_labellings, targets.classes)) + intercepts[:, :, cell, :, None]
            scores[..., rows.start + at] = logits
    return scores[:, :, 0] if targets.classes == 1 else scores.mT.log_softmax(dim=-1)


def _calibrated(
    scores: Float64[Tensor, "site strength labelling kept class"],
    labels: Tensor,
    weight: Float64[Tensor, " kept"],
    targets: MomentTargets,
    method: Method,
) -> tuple[Tensor, Tensor, Tensor]:
    """Slope, intercept by class and mean loss: `[site, strength, labelling]`, `[.., class]`, `[..]`."""
    grid = scores.shape[:3]
    if targets.is_number or method == "lda":
        loss = _loss(scores, labels, targets) @ weight / weight.sum()
        return torch.ones(grid, dtype=torch.float64), loss.new_zeros(*grid, targets.classes), loss
    flat = scores.flatten(0, 2)
    fitted = fit_logits(flat[..., 0] if targets.classes == 1 else flat, labels.expand(*grid, -1).flatten(0, 2), weight)
    intercept = fitted.intercept.reshape(*grid, targets.classes)
    return fitted.slope.reshape(grid), intercept, fitted.loss_bits.reshape(grid)


def _loss(
    scores: Float64[Tensor, "*fit kept class"], labels: Tensor, targets: MomentTargets
) -> Float64[Tensor, "*fit kept"]:
    """Bits, or squared error, of every row."""
    if targets.is_number:
        return (scores[..., 0] - labels).square()
    if targets.classes == 1:
        signed = torch.where(labels == 1, -scores[..., 0], scores[..., 0])
        return torch.nn.functional.softplus(signed, threshold=40) / math.log(2)
    # not `gather`, whose index would have to be expanded
    hot = torch.nn.functional.one_hot(labels, targets.classes)
    return -(scores.log_softmax(dim=-1) * hot).sum(dim=-1) / math.log(2)

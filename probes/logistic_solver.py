"""All L2-penalised binary logistic regressions of a sweep at once: sites x label sets x folds x strengths.

Per fit, on features standardised with the training rows of its fold (scikit-learn's meaning of C):

    J(w, b) = ½‖w‖² + C Σ_i s_i [softplus(z_i) - y_i z_i],  z_i = w·x̂_i + b, no penalty on b.

A fit is converged when no entry of ∇J exceeds `tolerance` C Σs. J is 1-strongly convex in w, so ‖w - w*‖ ≤ ‖∇J‖.
All fits of a site share their products with its rows, and sites go side by side (`fold_basis`, `newton_cg`,
`site_threads`): float32 products find the answer, float64 gradients finish and judge it. With more than twice as many
features as training rows a fold is first rotated, exactly, into the span of its standardised training rows (the
penalty does not see rotations).

Which strengths: with standardised features the prior variance of the log odds is C d (`default_strengths`).

Beware: rows in no training mask are never read, so weights fitted on one fold are independent of its test rows to the
bit. Folds fitted together share their preconditioner: a row that is test in one fold and training in another moves
that one's weights by less than the tolerance, and its mean and deviation not at all.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from microtome.probes.fold_basis import fold_basis, fold_moments, fold_moments_about_zero
from microtome.probes.logistic_fits import LogisticFits
from microtome.probes.newton_cg import APPROACH, Tasks, approach, refine
from microtome.probes.preconditioner import principal_axes
from microtome.probes.problem_checks import check_problem
from microtome.probes.site_threads import fit_in_blocks

WIDE = 2.0  # features per training row from which folds are rotated first


class ConvergenceWarning(UserWarning):
    """Some fits stopped above the tolerance; the message names the worst and what to do."""


def default_strengths(width: int, count: int = 9) -> list[float]:
    """C from 10^-2.5 to 10^1.5, evenly in the logarithm, divided by the number of features.

    C is a weight's prior variance, so the log odds of standardised features have prior variance C d: at the lower end
    every probability is held near one half, at the upper end next to nothing is. On SmolLM2-135M, sentiment, 600 and
    2000 rows, inner log-loss chose C d from 0.03 (a head that knows nothing) to 10, mostly 1 to 3, at 14 heads of width
    64 and 6 layers of width 576 alike.
    """
    return [float(value) / width for value in np.logspace(-2.5, 1.5, count)]


@dataclass(frozen=True)
class _Request:
    """What is the same for every site."""

    target: Bool[Tensor, "label_set example"]
    train: Bool[Tensor, "fold example"]
    weight: Float[Tensor, "label_set fold example"]
    strengths: Float[Tensor, " strength"]
    standardize: bool
    intercept: bool
    tolerance: float
    max_steps: int
    memory_bytes: int


def fit_logistic(
    features: Float[Tensor, "site example d_model"] | Float[Tensor, "example d_model"],
    labels: Bool[Tensor, "*label_set _"] | Int[Tensor, "*label_set _"],
    train: Bool[Tensor, "*fold _"],
    strengths: Sequence[float] | Float[Tensor, " strength"],
    *,
    standardize: bool = True,
    intercept: bool = True,
    sample_weight: Float[Tensor, "*weighting _"] | None = None,
    class_weight: Literal["balanced"] | None = None,
    tolerance: float = 1e-8,
    max_steps: int = 100,
    memory_bytes: int = 2**24,
) -> LogisticFits:
    """Fit every site x label set x fold x strength; the module says what is minimised.

    Args:
        features: activations of some sites, in any float dtype; the work is done on their device.
        labels: 0 or 1, one row per label set (the task, shuffled controls, ...).
        train: the rows each fold trains on; outer folds, inner folds and the whole set are all just masks.
        strengths: C on the sum of losses, as in scikit-learn, in any order.
        standardize: False leaves the penalty on the weights of the raw features.
        intercept: False fits z = w·x/σ with σ² the mean square about 0; one class is then enough.
        sample_weight: s_i >= 0, for all label sets or one row for each.
        class_weight: "balanced" multiplies s_i by Σs / (2 Σ_class s), per fold and label set.
        tolerance: on the largest gradient entry, as a share of C Σs.
        max_steps: float64 Newton steps a fit may take.
        memory_bytes: of the fits that are worked on side by side, beside their rows. Sixteen megabytes keep most of the
            block in a processor's cache; more is not faster.

    Raises:
        ValueError: NaN or infinite features, labels other than 0 and 1, strengths that are not finite and positive, a
            fold with fewer than two rows or (by weight) one class, sizes that do not match.

    Warns `ConvergenceWarning` when a fit stops above the tolerance.
    """
    features = features.detach()
    features = features[None] if features.ndim == 2 else features
    labels = labels[None] if labels.ndim == 1 else labels
    train = train[None] if train.ndim == 1 else train
    strengths = torch.as_tensor(strengths, dtype=torch.float64, device=features.device)
    if sample_weight is not None:
        sample_weight = (sample_weight[None] if sample_weight.ndim == 1 else sample_weight).double()
    check_problem(features, labels, train, strengths, sample_weight)
    _check_binary(labels, train, sample_weight, needs_both=intercept)

    used = train.any(0)
    train, target = train[:, used], labels[:, used] > 0
    weight = _row_weights(train, target, None if sample_weight is None else sample_weight[:, used], class_weight)
    request = _Request(
        target=target,
        train=train,
        weight=weight,
        strengths=strengths,
        standardize=standardize,
        intercept=intercept,
        tolerance=tolerance,
        max_steps=max_steps,
        memory_bytes=memory_bytes,
    )
    bytes_per_row = 4 * features.shape[2] + 20 * weight[..., 0].numel() * len(strengths)
    fit = partial(_fit_sites, request=request)
    weights, intercepts, mean, scale, gradient, margin, passes = fit_in_blocks(
        fit, features, used, bytes_per_row=bytes_per_row, memory_bytes=memory_bytes
    )
    fits = LogisticFits(
        weights=weights,
        intercepts=intercepts,
        mean=mean,
        scale=scale,
        strengths=strengths,
        gradient=gradient,
        converged=gradient <= tolerance,
        separated=margin > 0,
        passes=passes,
    )
    _warn_unconverged(fits)
    return fits


def _fit_sites(features: Float[Tensor, "site example d_model"], request: _Request) -> tuple[Tensor, ...]:
    """Weights, intercepts, mean, scale, gradient, margin and passes of some sites."""
    width = features.shape[2]
    if width > WIDE * request.train.sum(1).min():
        return _fit_rotated(features, request)
    counts = (request.weight > 0).any(0)
    weighted = None if torch.equal(counts, request.train) else counts
    basis = fold_basis(
        features, request.train, standardize=request.standardize, intercept=request.intercept, weighted=weighted
    )
    axes = principal_axes(basis, n_fits=request.weight[..., 0].numel() * len(request.strengths))
    scale = basis.deviation if request.standardize else torch.ones_like(basis.deviation)
    order = request.strengths.argsort()
    n_labels, n_folds, n_rows = request.weight.shape
    label = torch.arange(n_labels, device=features.device).repeat_interleave(n_folds)
    fold = torch.arange(n_folds, device=features.device).repeat(n_labels)
    bytes_per_task = 20 * n_rows * len(features) * len(order)
    parts = []
    for some in torch.arange(len(fold), device=features.device).split(max(1, request.memory_bytes // bytes_per_task)):
        weight, at = request.weight[label[some], fold[some]], fold[some]
        tasks = Tasks(
            weight=weight,
            target=weight * request.target[label[some]],
            ridge=basis.ridge[:, None, at],
            strength=request.strengths[order, None, None],
        )
        # the products each stage may spend cost about as much as factoring the Hessians instead
        start, passes = approach(
            basis.single, axes, tasks, tolerance=max(APPROACH, request.tolerance / 2), max_passes=max(100, width)
        )
        solution = refine(
            basis,
            axes,
            tasks,
            start,
            passes,
            tolerance=request.tolerance,
            max_steps=request.max_steps,
            max_passes=max(64, width),
        )
        raw = solution.point[..., :width] / basis.unit[:, None, None]
        raw = torch.where(basis.deviation[:, None, at] > 0, raw, 0.0)
        shift = (raw * (basis.mean[:, at] - basis.centre[:, None])[:, None]).sum(-1)
        intercept = solution.point[..., width] + shift
        parts.append((raw * scale[:, None, at], intercept, solution.gradient, solution.margin, solution.passes))

    def arranged(part: tuple[Tensor, ...]) -> Tensor:
        """[site, strength, task, ...] in ascending strengths to [site, label_set, fold, strength, ...] as asked for."""
        return torch.cat(part, 2)[:, order.argsort()].unflatten(2, (n_labels, n_folds)).movedim(1, 3)

    weights, intercepts, gradient, margin, passes = map(arranged, zip(*parts, strict=True))
    return weights, intercepts, basis.mean, scale, gradient, margin, passes


def _fit_rotated(features: Float[Tensor, "site example d_model"], request: _Request) -> tuple[Tensor, ...]:
    """As `_fit_sites`, fold by fold on x̂ Q, where the columns of Q span the fold's standardised training rows."""
    moments = fold_moments if request.intercept else fold_moments_about_zero
    mean, deviation = moments(features.mT.double(), request.train)
    scale = deviation if request.standardize else torch.ones_like(deviation)
    parts = []
    for fold, rows in enumerate(request.train):
        divisor = torch.where(deviation[:, fold] > 0, scale[:, fold], torch.inf)[:, None]
        span, rotated = torch.linalg.qr(((features[:, rows].double() - mean[:, fold, None]) / divisor).mT)
        inside = replace(
            request,
            target=request.target[:, rows],
            train=rows[None, rows],
            weight=request.weight[:, fold, None, rows],
            standardize=False,
        )
        weights, intercepts, _, _, gradient, margin, passes = _fit_sites(rotated.mT, inside)
        parts.append((weights @ span[:, None, None].mT, intercepts, gradient, margin, passes))
    weights, intercepts, gradient, margin, passes = (torch.cat(part, 2) for part in zip(*parts, strict=True))
    return weights, intercepts, mean, scale, gradient, margin, passes


def _row_weights(train, target, sample_weight, class_weight) -> Float[Tensor, "label_set fold example"]:
    """s_i of every label set and fold: 0 outside the fold."""
    weight = train.double() if sample_weight is None else sample_weight[:, None] * train
    weight = weight.expand(len(target), *train.shape)
    if class_weight == "balanced":
        positive = (weight * target[:, None]).sum(-1, keepdim=True)
        total = weight.sum(-1, keepdim=True)
        weight = weight * total / 2 / torch.where(target[:, None], positive, total - positive)
    return weight


def _check_binary(labels, train, sample_weight, *, needs_both: bool) -> None:
    """Raise ValueError for labels of other than two classes."""
    if labels.dtype != torch.bool and not bool(((labels == 0) | (labels == 1)).all()):
        raise ValueError(
            f"labels must be 0 or 1, got {labels.unique()[:5].tolist()}; with more classes call fit_multinomial."
        )
    if not needs_both:
        return
    # float32 counts rows exactly
    masks = train.T.to(torch.float32 if sample_weight is None else torch.float64)
    ones = torch.ones_like(labels[:1], dtype=masks.dtype) if sample_weight is None else sample_weight
    positive, total = (ones * labels) @ masks, ones @ masks
    has_one_class = (positive == 0) | (positive == total)
    if bool(has_one_class.any()):
        label_set, fold = has_one_class.nonzero()[0].tolist()
        raise ValueError(
            f"fold {fold} trains label set {label_set} on rows of one class only "
            f"({int(positive[label_set, fold] > 0)}); use stratified folds, or more rows of the rare class."
        )


def _warn_unconverged(fits: LogisticFits) -> None:
    """One warning for the whole call, naming the worst fit."""
    if bool(fits.converged.all()):
        return
    worst = np.unravel_index(int(fits.gradient.argmax()), fits.gradient.shape)
    site, label_set, fold, strength = (int(axis) for axis in worst)
    warnings.warn(
        f"{int((~fits.converged).sum())} of {fits.converged.numel()} logistic fits stopped above the tolerance. Worst: "
        f"site {site}, label set {label_set}, fold {fold}, C={float(fits.strengths[strength]):g}, largest gradient "
        f"entry {float(fits.gradient.max()):.1e} C Σs. Raise max_steps or tolerance, or leave out the largest "
        "strengths.",
        ConvergenceWarning,
        stacklevel=3,
    )

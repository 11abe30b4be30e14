"""All L2-penalised multinomial logistic regressions of a sweep at once: sites x label sets x folds x strengths.

Per fit of K classes, on features standardised with the training rows of its fold (scikit-learn's meaning of C):

    J(W, b) = ½‖W‖² + C Σ_i s_i [logsumexp(z_i) - z_i,y_i],  z_ik = w_k·x̂_i + b_k, no penalty on b.

The loss does not change when one number is added to all b_k, so b is given with sum zero; the sum of the w_k is zero at
the minimum. A fit is converged when no entry of ∇J exceeds `tolerance` C Σs. Folds, standardisation, wide features and
the sharing of products are those of `logistic_solver`; how the minimum is found, `multinomial_newton` says.

Beware, two classes: with w = w_1 - w_0 the penalty is ½‖W‖² = ¼‖w‖², so the fit at C is that of `fit_logistic` at 2 C.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from microtome.probes.fold_basis import fold_basis, fold_moments
from microtome.probes.logistic_fits import MultinomialFits
from microtome.probes.logistic_solver import WIDE, ConvergenceWarning
from microtome.probes.multinomial_newton import ClassTasks, minimise
from microtome.probes.preconditioner import principal_axes
from microtome.probes.problem_checks import check_problem
from microtome.probes.site_threads import fit_in_blocks


@dataclass(frozen=True)
class _Request:
    """What is the same for every site."""

    codes: Int64[Tensor, "label_set example"]
    n_classes: int
    train: Bool[Tensor, "fold example"]
    weight: Float[Tensor, "label_set fold example"]
    strengths: Float[Tensor, " strength"]
    standardize: bool
    tolerance: float
    max_steps: int
    memory_bytes: int


def fit_multinomial(
    features: Float[Tensor, "site example d_model"] | Float[Tensor, "example d_model"],
    codes: Int64[Tensor, "*label_set _"],
    train: Bool[Tensor, "*fold _"],
    strengths: Sequence[float] | Float[Tensor, " strength"],
    *,
    n_classes: int | None = None,
    standardize: bool = True,
    sample_weight: Float[Tensor, "*weighting _"] | None = None,
    class_weight: Literal["balanced"] | None = None,
    tolerance: float = 1e-8,
    max_steps: int = 100,
    memory_bytes: int = 2**24,
) -> MultinomialFits:
    """Fit every site x label set x fold x strength; the module says what is minimised.

    Args:
        features: activations of some sites, in any float dtype; the work is done on their device.
        codes: class numbers 0..K-1, one row per label set (the task, shuffled controls, ...).
        train: the rows each fold trains on; outer folds, inner folds and the whole set are all just masks.
        strengths: C on the sum of losses, as in scikit-learn, in any order.
        n_classes: K; the largest code and one more if None.
        standardize: False leaves the penalty on the weights of the raw features.
        sample_weight: s_i >= 0, for all label sets or one row for each.
        class_weight: "balanced" multiplies s_i by Σs / (K Σ_class s), per fold and label set.
        tolerance: on the largest gradient entry, as a share of C Σs.
        max_steps: Newton steps a fit may take.
        memory_bytes: of the fits that are worked on side by side, beside their rows.

    Raises:
        ValueError: NaN or infinite features, codes outside 0..K-1, strengths that are not finite and positive, a fold
            that trains (by weight) on fewer than two rows or without a class, sizes that do not match.

    Warns `ConvergenceWarning` when a fit stops above the tolerance.
    """
    features = features.detach()
    features = features[None] if features.ndim == 2 else features
    codes = codes[None] if codes.ndim == 1 else codes
    train = train[None] if train.ndim == 1 else train
    strengths = torch.as_tensor(strengths, dtype=torch.float64, device=features.device)
    if sample_weight is not None:
        sample_weight = (sample_weight[None] if sample_weight.ndim == 1 else sample_weight).double()
    n_classes = int(codes.max()) + 1 if n_classes is None else n_classes
    check_problem(features, codes, train, strengths, sample_weight)
    _check_codes(codes, n_classes)

    used = train.any(0)
    train, codes = train[:, used], codes[:, used]
    weight = train.double() if sample_weight is None else sample_weight[:, None, used] * train
    weight = weight.expand(len(codes), *train.shape)
    class_sums = _class_sums(weight, codes, n_classes)
    if class_weight == "balanced":
        factor = weight.sum(-1, keepdim=True) / (n_classes * class_sums)
        weight = weight * factor.gather(2, codes[:, None].expand(weight.shape))
    request = _Request(
        codes=codes,
        n_classes=n_classes,
        train=train,
        weight=weight,
        strengths=strengths,
        standardize=standardize,
        tolerance=tolerance,
        max_steps=max_steps,
        memory_bytes=memory_bytes,
    )
    bytes_per_row = 4 * features.shape[2] + 40 * n_classes * weight[..., 0].numel() * len(strengths)
    fit = partial(_fit_sites, request=request)
    weights, intercepts, mean, scale, gradient, margin, passes = fit_in_blocks(
        fit, features, used, bytes_per_row=bytes_per_row, memory_bytes=memory_bytes
    )
    fits = MultinomialFits(
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
    basis = fold_basis(features, request.train, standardize=request.standardize, weighted=weighted)
    n_fits = request.n_classes * request.weight[..., 0].numel() * len(request.strengths)
    axes = principal_axes(basis, n_fits=n_fits)
    scale = basis.deviation if request.standardize else torch.ones_like(basis.deviation)
    order = request.strengths.argsort()
    n_labels, n_folds, n_rows = request.weight.shape
    label = torch.arange(n_labels, device=features.device).repeat_interleave(n_folds)
    fold = torch.arange(n_folds, device=features.device).repeat(n_labels)
    is_of_class = torch.nn.functional.one_hot(request.codes, request.n_classes).mT.double()
    bytes_per_task = 40 * request.n_classes * n_rows * len(features) * len(order)
    parts = []
    for some in torch.arange(len(fold), device=features.device).split(max(1, request.memory_bytes // bytes_per_task)):
        weight, at = request.weight[label[some], fold[some], None], fold[some]
        tasks = ClassTasks(
            weight=weight,
            target=weight * is_of_class[label[some]],
            ridge=basis.ridge[:, None, at, None],
            strength=request.strengths[order, None, None, None],
        )
        solution = minimise(
            basis,
            axes,
            tasks,
            tolerance=request.tolerance,
            max_steps=request.max_steps,
            max_passes=max(100, width),
        )
        raw = solution.point[..., :width] / basis.unit[:, None, None, None]
        raw = torch.where(basis.deviation[:, None, at, None] > 0, raw, 0.0)
        shift = (raw * (basis.mean[:, at] - basis.centre[:, None])[:, None, :, None]).sum(-1)
        intercept = solution.point[..., width] + shift
        parts.append((raw * scale[:, None, at, None], intercept, solution.gradient, solution.margin, solution.passes))

    def arranged(part: tuple[Tensor, ...]) -> Tensor:
        """[site, strength, task, ...] in ascending strengths to [site, label_set, fold, strength, ...] as asked for."""
        return torch.cat(part, 2)[:, order.argsort()].unflatten(2, (n_labels, n_folds)).movedim(1, 3)

    weights, intercepts, gradient, margin, passes = map(arranged, zip(*parts, strict=True))
    return weights, intercepts, basis.mean, scale, gradient, margin, passes


def _fit_rotated(features: Float[Tensor, "site example d_model"], request: _Request) -> tuple[Tensor, ...]:
    """As `_fit_sites`, fold by fold on x̂ Q, where the columns of Q span the fold's standardised training rows."""
    mean, deviation = fold_moments(features.mT.double(), request.train)
    scale = deviation if request.standardize else torch.ones_like(deviation)
    parts = []
    for fold, rows in enumerate(request.train):
        divisor = torch.where(deviation[:, fold] > 0, scale[:, fold], torch.inf)[:, None]
        span, rotated = torch.linalg.qr(((features[:, rows].double() - mean[:, fold, None]) / divisor).mT)
        inside = replace(
            request,
            codes=request.codes[:, rows],
            train=rows[None, rows],
            weight=request.weight[:, fold, None, rows],
            standardize=False,
        )
        weights, intercepts, _, _, gradient, margin, passes = _fit_sites(rotated.mT, inside)
        parts.append((weights @ span[:, None, None, None].mT, intercepts, gradient, margin, passes))
    weights, intercepts, gradient, margin, passes = (torch.cat(part, 2) for part in zip(*parts, strict=True))
    return weights, intercepts, mean, scale, gradient, margin, passes


def _class_sums(
    weight: Float[Tensor, "label_set fold example"], codes: Int64[Tensor, "label_set example"], n_classes: int
) -> Float[Tensor, "label_set fold class"]:
    """Σs of every class; raises ValueError where a fold has none of one."""
    sums = weight @ torch.nn.functional.one_hot(codes, n_classes).double()
    if bool((sums == 0).any()):
        label_set, fold, missing = (sums == 0).nonzero()[0].tolist()
        raise ValueError(
            f"fold {fold} trains label set {label_set} without a row of class {missing} ({n_classes} classes); use "
            "stratified folds, more rows of that class, or fewer classes."
        )
    return sums


def _check_codes(codes: Tensor, n_classes: int) -> None:
    if n_classes < 2:
        raise ValueError(f"codes hold {n_classes} class; a fit needs rows of at least 2.")
    if int(codes.min()) < 0 or int(codes.max()) >= n_classes:
        outside = codes[(codes < 0) | (codes >= n_classes)].unique()[:5].tolist()
        raise ValueError(f"codes must be class numbers 0 to {n_classes - 1}, got {outside}; number the classes anew.")


def _warn_unconverged(fits: MultinomialFits) -> None:
    """One warning for the whole call, naming the worst fit."""
    if bool(fits.converged.all()):
        return
    worst = np.unravel_index(int(fits.gradient.argmax()), fits.gradient.shape)
    site, label_set, fold, strength = (int(axis) for axis in worst)
    warnings.warn(
        f"{int((~fits.converged).sum())} of {fits.converged.numel()} multinomial fits stopped above the tolerance. "
        f"Worst: site {site}, label set {label_set}, fold {fold}, C={float(fits.strengths[strength]):g}, largest "
        f"gradient entry {float(fits.gradient.max()):.1e} C Σs. Raise max_steps or tolerance, or leave out the largest "
        "strengths.",
        ConvergenceWarning,
        stacklevel=3,
    )

"""Scores of many probes to logits: one slope for all classes and one intercept per class, by logistic regression.

logit_k = a t_k + b_k, with t the scores less those of the first class (two classes: the score itself, and 0), centred
and divided by their root mean square; b of the first class is 0. Minimises Σ_i w_i -log p(y_i) + a²/2, the slope's
penalty being scikit-learn's C = 1 on a standardised score: without weight among hundreds of rows, it keeps the slope
finite where scores separate the classes (Platt 1999 smooths the labels to that end). All probes take damped Newton
steps together; one that has converged is left alone.

Beware: a slope that comes out below 0.01 per deviation is set to 0.01 and the intercepts to the classes' shares: scores
that tell nothing, or point the wrong way by chance, become the base rates without a change of their order.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

_LEAST_SLOPE = 0.01
_MOST_STEPS = 60
_TOLERANCE = 1e-9  # of the gradient, per row
_CHUNK_BYTES = 2**26

# objective, gradient, Hessian of some probes: (z, labels, weights, theta) -> [probe], [probe, k], [probe, k, k]
Derivatives = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class LogitMap:
    """From scores to logits, `slope * score + intercept`; loss in bits per row, on the rows it was fitted to."""

    slope: Float64[Tensor, " probe"]
    intercept: Float64[Tensor, " probe"] | Float64[Tensor, "probe class"]
    loss_bits: Float64[Tensor, " probe"]


def fit_logits(
    scores: Float64[Tensor, "probe example"] | Float64[Tensor, "probe example class"],
    labels: Int64[Tensor, "probe example"],
    weights: Float64[Tensor, " example"],
) -> LogitMap:
    """Slope and intercepts of each probe for its own labels.

    Args:
        scores: one per row (two classes), or one per class.
        labels: class numbers from 0.
        weights: of the rows.

    Raises ValueError where a class that has a score has no row.
    """
    is_binary = scores.dim() == 2
    at_once = max(1, _CHUNK_BYTES // (8 * 6 * scores[0].numel()))
    fit = _fit_two if is_binary else _fit_several
    parts = [fit(a, b, weights) for a, b in zip(scores.split(at_once), labels.split(at_once), strict=True)]
    return LogitMap(*(torch.cat(some) for some in zip(*parts, strict=True)))


def _fit_two(scores: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    positive = labels.double()
    total = weights.sum()
    held = positive @ weights
    _refuse_missing(torch.stack([total - held, held], dim=1))
    centre = scores @ weights / total
    z = scores - centre[:, None]
    unit = _root_mean_square(z[..., None], weights)
    z /= unit[:, None]
    theta, objective = _newton(z, positive, weights, (held / (total - held)).log()[:, None], _two_derivatives)
    slope = theta[:, 0] / unit
    loss = (objective - 0.5 * theta[:, 0].square()) / total / math.log(2)
    return slope, theta[:, 1] - slope * centre, loss


def _fit_several(scores: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n_classes = scores.shape[2]
    hot = torch.nn.functional.one_hot(labels, n_classes).double()
    total = weights.sum()
    held = weights @ hot
    _refuse_missing(held)
    z = scores - scores[..., :1]
    centre = (weights @ z / total)[:, None]
    z = z - centre
    unit = _root_mean_square(z, weights) / math.sqrt(n_classes - 1)
    z /= unit[:, None, None]
    theta, objective = _newton(z, hot, weights, (held[:, 1:] / held[:, :1]).log(), _several_derivatives)
    slope = theta[:, 0] / unit
    loss = (objective - 0.5 * theta[:, 0].square()) / total / math.log(2)
    return slope, _with_first(theta) - slope[:, None] * centre[:, 0], loss


def _root_mean_square(
    z: Float64[Tensor, "probe example class"], weights: Float64[Tensor, " example"]
) -> Float64[Tensor, " probe"]:
    """Of the rows' lengths, by parts of the largest entry so that no square overflows or vanishes; 1 for zeros."""
    largest = z.abs().amax(dim=(1, 2))
    largest = torch.where(largest > 0, largest, 1.0)
    square = (z / largest[:, None, None]).square().sum(dim=2) @ weights / weights.sum()
    return torch.where(square > 0, square.sqrt() * largest, 1.0)


def _newton(
    z: Tensor, labels: Tensor, weights: Tensor, prior: Float64[Tensor, "probe intercept"], derivatives: Derivatives
) -> tuple[Float64[Tensor, "probe parameter"], Float64[Tensor, " probe"]]:
    """Slope and intercepts `theta` of the lowest objective, and that."""
    theta = torch.cat([torch.ones_like(prior[:, :1]), prior], dim=1)
    active, all_z, all_labels = torch.arange(len(theta)), z, labels
    objective, gradient, hessian = derivatives(z, labels, weights, theta)
    step, length = torch.linalg.solve(hessian, gradient), torch.ones_like(objective)
    for _ in range(_MOST_STEPS):
        going = gradient.abs().amax(dim=1) > _TOLERANCE * weights.sum()
        if not going.all():
            active, z, labels = active[going], z[going], labels[going]
            gradient, step, length = gradient[going], step[going], length[going]
        if len(active) == 0:
            break
        candidate = theta[active] - length[:, None] * step
        value, slopes, curvature = derivatives(z, labels, weights, candidate)
        better = value <= objective[active] + 1e-12 * objective[active].abs()
        theta[active[better]], objective[active[better]] = candidate[better], value[better]
        gradient = torch.where(better[:, None], slopes, gradient)
        step = torch.where(better[:, None], torch.linalg.solve(curvature, slopes), step)
        length = torch.where(better, 1.0, length / 2)
    useless = (theta[:, 0] < _LEAST_SLOPE).nonzero()[:, 0]
    if len(useless):
        theta[useless] = torch.cat([torch.full_like(prior[useless, :1], _LEAST_SLOPE), prior[useless]], dim=1)
        objective[useless] = derivatives(all_z[useless], all_labels[useless], weights, theta[useless])[0]
    return theta, objective


def _two_derivatives(z: Tensor, labels: Tensor, weights: Tensor, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = theta[:, :1] * z + theta[:, 1:]
    objective = (torch.nn.functional.softplus(logits, threshold=40) - labels * logits) @ weights
    p = logits.sigmoid_()
    curved = p * (1 - p) * weights
    wrong = p.sub_(labels).mul_(weights)
    gradient = torch.stack([(wrong * z).sum(dim=1) + theta[:, 0], wrong.sum(dim=1)], dim=1)
    crossed = curved * z
    rows = [(crossed * z).sum(dim=1) + 1, crossed.sum(dim=1), curved.sum(dim=1) + _floor(weights)]
    hessian = torch.stack([rows[0], rows[1], rows[1], rows[2]], dim=1).unflatten(1, (2, 2))
    return objective + 0.5 * theta[:, 0].square(), gradient, hessian


def _several_derivatives(z: Tensor, hot: Tensor, weights: Tensor, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    log_p = (theta[:, :1, None] * z + _with_first(theta)[:, None]).log_softmax(dim=2)
    objective = -(log_p * hot).sum(dim=2) @ weights
    p, w = log_p.exp(), weights[:, None]
    wrong = (p - hot) * w
    gradient = torch.cat([(wrong * z).sum(dim=(1, 2))[:, None] + theta[:, :1], wrong.sum(dim=1)[:, 1:]], dim=1)
    away = p * (z - (p * z).sum(dim=2, keepdim=True)) * w
    by_class = away.sum(dim=1)[:, 1:]
    classes = torch.diag_embed((p * w).sum(dim=1)) - (p * w).mT @ p
    classes.diagonal(dim1=1, dim2=2).add_(_floor(weights))
    above = torch.cat([(away * z).sum(dim=(1, 2))[:, None] + 1, by_class], dim=1)
    below = torch.cat([by_class[..., None], classes[:, 1:, 1:]], dim=2)
    return objective + 0.5 * theta[:, 0].square(), gradient, torch.cat([above[:, None], below], dim=1)


def _floor(weights: Tensor) -> Tensor:
    """Curvature added to intercepts, which saturated rows leave without any."""
    return 1e-12 * weights.sum()


def _with_first(theta: Tensor) -> Tensor:
    """Intercepts of all classes, the first's being 0."""
    return torch.cat([torch.zeros_like(theta[:, :1]), theta[:, 1:]], dim=1)


def _refuse_missing(held: Float64[Tensor, "probe class"]) -> None:
    if (held == 0).any():
        probe, number = (held == 0).nonzero()[0].tolist()
        raise ValueError(
            f"Class {number} has no row to calibrate scores by (probe {probe}). Ask for fewer folds, or leave it out."
        )

"""Closed-form linear probes from the moments of a training set: ridge and LDA along a path of strengths, mass-mean.

With features standardised by the training set's own mean and deviation (divisor n), T = S/n their covariance,
M_k = m_k - m the class means, π_k the class shares, ρ the strength (penalty per training row):

    ridge:  w = (T + ρI)⁻¹ c,  c = Σ (x-m)(y-ȳ)/n;  minimises Σ (y - w·x - b)²/n + ρ|w|², b free
    LDA:    w_k = (W + ρI)⁻¹ M_k,  W = T - Σ π_k M_k M_kᵀ the pooled within covariance; score of class k:
            w_k·(x-m) - w_k·M_k/2 + log π_k, a log-probability up to what all classes share
    mass-mean: w_k = M_k in the features' own units, no standardisation; corrected: w_k = W⁺ M_k

(Marks & Tegmark 2024, "The Geometry of Truth", for the last: binary θ = m₁ - m₀, score θ·x, corrected θᵀ W⁺ x.) Two
classes are one score, that of the second less that of the first. LDA solves with T + ρI, which all labellings share,
and puts the between part back by (A - M Π Mᵀ)⁻¹ M = A⁻¹M (I - Π MᵀA⁻¹M)⁻¹.

W⁺ leaves out directions whose within variance is below 1e-3, an average standardised feature having 1 (the paper's code
cuts at 1e-3 in activation units). A constant feature has weight 0. Beware: mass-mean scores are no log-odds; and the
corrected form does not see what tells the training rows apart without any variance within classes (a feature that is
the label, or most of what separates fewer rows than features): take LDA there, whose penalty keeps such directions.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from microtome.probes.moments import Moments

Method = Literal["ridge", "lda", "mass_mean", "mass_mean_corrected"]
METHODS = ("ridge", "lda", "mass_mean", "mass_mean_corrected")
TOLERANCE = 1e-3


@dataclass(frozen=True)
class LinearPath:
    """Probes of one training set. Axis output: labelling by labelling, one column each, or one per class."""

    weights: Float64[Tensor, "site strength output feature"]  # per unit of the raw features
    intercepts: Float64[Tensor, "site strength output"]


def linear_path(
    train: Moments,
    strengths: Float64[Tensor, " strength"],
    *,
    method: Method,
    classes: int = 1,
    standardize: bool = True,
    tolerance: float = TOLERANCE,
    priors: bool = True,
) -> LinearPath:
    """The method's probes at every strength (mass-mean has none: the answer's strength axis is 1 long).

    Args:
        train: moments of one cell. Target columns: per labelling one (0/1 for two classes, or numbers), or `classes`
            columns of 0/1 where there are three classes or more.
        classes: columns per labelling.
        standardize: False leaves the penalty, and the tolerance, in units of the raw features.
        tolerance: within variance up to which corrected mass-mean leaves a direction out.
        priors: False leaves log π_k out. Plain mass-mean scores are in squared units of the features, so that beside
            scores of small features log π_k is all that is left of the digits; calibrated scores have no use for it.

    Raises ValueError for a class without a training row, and where no strength keeps the covariance invertible.
    """
    n = train.count[0]
    scale = deviation(train) if standardize else torch.ones_like(train.mean[:, 0])
    scale = torch.where(scale > 0, scale, 1.0)
    covariance = train.scatter[:, 0] / n / scale[:, :, None] / scale[:, None]
    if method == "ridge":
        factors = _factors(covariance, strengths)
        cross = train.cross[:, 0] / n / scale[..., None]
        weights = torch.stack([torch.cholesky_solve(cross, factor) for factor in factors], dim=1)
        offsets = train.target_mean[0].expand(len(weights), len(strengths), -1)
    else:
        shares, means = _class_means(train, classes)
        if method == "mass_mean":
            class_weights = means[:, None]
        else:
            means = means / scale[:, None, :, None]
            if method == "lda":
                class_weights = _within_solved(_factors(covariance, strengths), shares, means)
            else:
                class_weights = _pseudo_solved(covariance, shares, means, tolerance)[:, None]
        offsets = -0.5 * torch.einsum("scldk,sldk->sclk", class_weights, means)
        if priors:
            offsets = offsets + shares.log()
        if classes == 1:  # of two classes, the second less the first
            class_weights, offsets = class_weights.diff(dim=-1), offsets.diff(dim=-1)
        weights = class_weights.movedim(-2, -1).flatten(2, 3).mT
        offsets = offsets.flatten(2)
        if method == "mass_mean":
            scale = torch.ones_like(scale)
    weights = (weights / scale[:, None, :, None]).mT
    return LinearPath(weights, offsets - torch.einsum("scod,sd->sco", weights, train.mean[:, 0]))


def deviation(train: Moments) -> Float64[Tensor, "site feature"]:
    """Standard deviation (divisor n) of one cell's features; 0 where it is rounding noise of the mean."""
    n = train.count[0]
    value = (train.scatter[:, 0].diagonal(dim1=-2, dim2=-1) / n).sqrt()
    noise = torch.finfo(torch.float64).eps * n * train.mean[:, 0].abs()
    return torch.where(value > noise, value, 0.0)


def _factors(covariance: Float64[Tensor, "site feature feature"], strengths: Tensor) -> list[Tensor]:
    factors = []
    for strength in strengths:
        penalised = covariance.clone()
        penalised.diagonal(dim1=-2, dim2=-1).add_(strength)
        factor, info = torch.linalg.cholesky_ex(penalised)
        if info.any():
            raise ValueError(
                f"Strength {strength.item():g} leaves site {int(info.nonzero()[0, 0])} without a unique solution: "
                "features are constant, repeat each other, or outnumber the training rows. Give strengths above 0."
            )
        factors.append(factor)
    return factors


def _class_means(
    train: Moments, classes: int
) -> tuple[Float64[Tensor, "labelling class"], Float64[Tensor, "site labelling feature class"]]:
    """Share of every class and its mean less that of all rows, raw units; two classes where there is one column."""
    shares, cross = train.target_mean[0].unflatten(0, (-1, classes)), train.cross[:, 0].unflatten(2, (-1, classes))
    if classes == 1:
        shares, cross = torch.cat([1 - shares, shares], dim=1), torch.cat([-cross, cross], dim=3)
    if (missing := shares * train.count[0] < 0.5 * min(1.0, train.count[0].item())).any():
        labelling, number = missing.nonzero()[0].tolist()
        raise ValueError(
            f"Class {number} of labelling {labelling} has no row in a training set. Ask for fewer folds, give a finer "
            "group key if rows of a group are independent, or leave the class out."
        )
    means = cross.movedim(2, 1) / (shares * train.count[0])[:, None]
    return shares, means


def _within_solved(factors: list[Tensor], shares: Tensor, means: Tensor) -> Tensor:
    """(W + ρI)⁻¹ M: `[site, strength, labelling, feature, class]`."""
    solutions = []
    columns = means.movedim(1, 2).flatten(2)
    eye = torch.eye(shares.shape[1], dtype=torch.float64)
    for factor in factors:
        total = torch.cholesky_solve(columns, factor).unflatten(2, means.shape[1::2]).movedim(2, 1)
        back = eye - shares[..., None] * (means.mT @ total)
        solutions.append(torch.linalg.solve(back, total, left=False))
    return torch.stack(solutions, dim=1)


def _pseudo_solved(covariance: Tensor, shares: Tensor, means: Tensor, tolerance: float) -> Tensor:
    """W⁺ M, labelling by labelling: `[site, labelling, feature, class]`."""
    solutions = []
    for share, mean in zip(shares, means.unbind(1), strict=True):
        values, vectors = torch.linalg.eigh(covariance - (mean * share) @ mean.mT)
        inverse = torch.where(values > tolerance, 1 / values, 0.0)
        solutions.append(vectors @ (inverse[..., None] * (vectors.mT @ mean)))
    return torch.stack(solutions, dim=1)

"""The ridge map of one pair of sites, from moments alone: 25 strengths from one eigendecomposition, the best one kept.

    W = argmin sum |y - x W - c|^2 + λ |W|^2,   c = mean_y - mean_x W,   λ = ρ tr(S_xx)/d;      c is never penalised

See `source_basis` for the algebra, `strength_path` for the choice, `ridge_pairs` for all pairs of many sites at once.
Rows of least squares (ρ = 0) may be fewer than channels: directions without variance get weight 0 (minimum norm).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from microtome.lenses.linear_map import LinearMap
from microtome.lenses.pair_moments import PairMoments, is_measured
from microtome.lenses.source_basis import SourceBasis, source_basis
from microtome.lenses.strength_path import StrengthPath, checked_strengths, squared_errors, strength_path


@dataclass(frozen=True, eq=False)
class RidgeFit:
    """A map and the path it was taken from."""

    map: LinearMap
    path: StrengthPath


def ridge_map(
    fit: PairMoments,
    validation: PairMoments | None = None,
    *,
    strengths: Sequence[int | float] | None = None,
    penalty: str = "isotropic",
    select: str | None = None,
    refit: bool = False,
    basis: SourceBasis | None = None,
) -> RidgeFit:
    """Fit a ridge map, its strength chosen on validation moments, or by generalised cross-validation without them.

    Args:
        fit, validation: each about its own means.
        strengths: ρ to choose from; 25 from 1e-9 to 10 if None. A single one is taken as it is.
        penalty: "isotropic", or "diag" (channels are penalised by their variance, as if standardised).
        select: "validation" or "gcv".
        refit: fit the strength ρ that was chosen once more, on fit and validation rows together. Scores of this map
            are against the joint mean: `map_scores(map, test, fit + validation)`.
        basis: of this source and penalty, where it is there already.

    Raises:
        ValueError: strengths that are negative or none, fewer than two rows, an unknown penalty or `select`,
            validation moments of other sites or without rows.
    """
    values = checked_strengths(strengths).to(fit.xy.device)
    basis = source_basis(fit, penalty) if basis is None else basis
    loadings = basis.rotated(fit.xy)
    errors, total = None, 0.0
    if validation is not None:
        if not validation.count:
            raise ValueError("the validation moments have no rows. Pass None to choose the strength by gcv.")
        if validation.xy.shape != fit.xy.shape:
            raise ValueError(f"validation is {tuple(validation.xy.shape)}, fit {tuple(fit.xy.shape)}: other sites.")
        held = validation.about(fit.mean_x, fit.mean_y)
        total = float(held.yy.trace())
        errors = squared_errors(
            basis.damping(values * basis.unit),
            loadings,
            loadings @ loadings.T,
            basis.gram(held.xx),
            basis.transform.T @ held.xy,
            total,
        )
    path = strength_path(basis, fit, loadings, errors, total, values, select)
    if refit and validation is not None:
        fit = fit + validation
        basis = source_basis(fit, penalty)
        loadings = basis.rotated(fit.xy)
    return RidgeFit(map_at(basis, loadings, fit, path.strength, path.strength * basis.unit), path)


def map_at(
    basis: SourceBasis, loadings: torch.Tensor, fit: PairMoments, strength: int | float, penalty: int | float
) -> LinearMap:
    """W = T diag(1/(w+λ)) C of one strength ρ, whose λ is `penalty`."""
    damping = basis.damping_of(penalty)
    weight = basis.transform @ (damping[:, None] * loadings)
    facts = {"count": fit.count, "penalty": basis.penalty, "alpha": float(penalty)}
    return LinearMap(
        weight,
        fit.mean_y - fit.mean_x @ weight,
        "ridge" if strength else "least squares",
        strength=float(strength),
        facts=facts,
    )


def least_squares_map(fit: PairMoments) -> LinearMap:
    """Ordinary least squares with intercept; of minimum norm where rows are fewer than channels."""
    return ridge_map(fit, strengths=[0]).map


def uncentred_least_squares_map(fit: PairMoments) -> LinearMap:
    """Least squares without intercept, as Yom Din et al. 2023 (arXiv 2303.09435) fit their `mat` shortcuts.

    A published baseline: the mean of the stream, which is large, has to be carried by the weight.
    """
    raw = fit.about(torch.zeros_like(fit.mean_x), torch.zeros_like(fit.mean_y))
    variances, axes = torch.linalg.eigh(raw.xx)
    floor = torch.finfo(torch.float64).eps * len(variances) * variances[-1].clamp_min(0)
    is_kept = is_measured(variances, axes, raw.noise_x, floor)
    inverse = torch.where(is_kept, 1 / torch.where(is_kept, variances, 1.0), 0.0)
    weight = axes @ (inverse[:, None] * (axes.T @ raw.xy))
    return LinearMap(
        weight, torch.zeros_like(fit.mean_y), "least squares without intercept", facts={"count": fit.count}
    )

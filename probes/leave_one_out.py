"""Approximate leave-one-out logits of a logistic probe, from one fit.

With H = D + C Σ_i p_i(1-p_i) x_i x_iᵀ the Hessian at the fit (x with a 1 for the intercept, D the penalty) and
a_i = x_iᵀ H⁻¹ x_i, one Newton step from the fit without row i gives

    z_i without row i  ≈  z_i - C a_i (y_i - p_i) / (1 - C a_i p_i(1-p_i))

(Pregibon 1981; the same step is exact for least squares). On 400 rows of 40 features it was within 0.05 of refitted
logits that had moved by more than 0.3 (tests/probes/test_leave_one_out.py).

Beware: rows that share a group must leave together, which this does not do: for groups use folds, or ridge's exact
leave-one-group-out. The standardisation is that of all rows.
"""

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from microtome.probes.logistic_solver import fit_logistic


def loo_logits(
    features: Float[Tensor, "site example feature"],
    positive: Bool[Tensor, " example"],
    strength: float,
    *,
    standardize: bool = True,
) -> Float64[Tensor, "site example"]:
    """Log odds of every row from about the fit at C = `strength` that never saw it, for every site.

    Raises what `fit_logistic` raises: NaN, one class, a strength that is not positive.
    """
    every = torch.ones_like(positive)
    fits = fit_logistic(features, positive, every, [strength], standardize=standardize)
    logits = fits.decision(features)[:, 0, 0, 0]
    share = torch.sigmoid(logits)
    scale = torch.where(fits.scale[:, 0] > 0, fits.scale[:, 0], torch.inf)
    rows = (features.double() - fits.mean[:, :1]) / scale[:, None]
    rows = torch.cat([rows, torch.ones_like(rows[..., :1])], -1)
    curvature = strength * share * (1 - share)
    hessian = (rows * curvature[..., None]).mT @ rows
    hessian.diagonal(dim1=1, dim2=2)[:, :-1].add_(1.0)
    hessian.diagonal(dim1=1, dim2=2).add_(1e-12)  # all rows far from the boundary: no curvature for the intercept
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(hessian), rows.mT, upper=False)
    leverage = half.square().sum(1)
    return logits - strength * leverage * (positive.double() - share) / (1 - curvature * leverage)

"""Maps that every fitted one has to beat: mean, identity, identity plus shift, scale per channel, Procrustes.

    mean        y = mean_y                                identity    y = x
    shift       y = x + (mean_y - mean_x)                 scale       y_j = a_j x_j + c_j,  a_j = S_xy,jj / S_xx,jj
    Procrustes  y = s x R + c,  R R^T = 1,  S_xy = U S V^T,  R = U V^T,  s = tr S / tr S_xx  (Schoenemann 1966)

Two depths of one stream are much alike before anything is learned, so a high R2 of a fitted map says nothing until the
identity's stands beside it.
"""

import torch
from jaxtyping import Float64
from torch import Tensor

from microtome.lenses.linear_map import LinearMap, identity_map
from microtome.lenses.pair_moments import PairMoments


def mean_map(fit: PairMoments) -> LinearMap:
    """y = mean_y whatever x is: R2 is 0 by definition."""
    return LinearMap(torch.zeros_like(fit.xy), fit.mean_y, "mean", facts={"count": fit.count})


def shift_map(fit: PairMoments) -> LinearMap:
    """y = x + (mean_y - mean_x).

    Raises:
        ValueError: x and y are of different width.
    """
    _same_width(fit, "identity plus shift")
    eye = identity_map(fit.d_in).weight.to(fit.xy)
    return LinearMap(eye, fit.mean_y - fit.mean_x, "identity plus shift", facts={"count": fit.count})


def scale_map(fit: PairMoments) -> LinearMap:
    """y_j = a_j x_j + c_j, least squares per channel; a_j = 0 where x_j is constant.

    Raises:
        ValueError: x and y are of different width.
    """
    factors = channel_factors(fit)
    return LinearMap(
        torch.diag(factors), fit.mean_y - fit.mean_x * factors, "scale per channel", facts={"count": fit.count}
    )


def channel_factors(fit: PairMoments) -> Float64[Tensor, " d_in"]:
    """a_j of `scale_map`."""
    _same_width(fit, "scale per channel")
    squares, eps = fit.xx.diagonal(), torch.finfo(torch.float64).eps
    is_alive = squares > fit.count * (eps * fit.mean_x) ** 2 * 4
    return torch.where(is_alive, fit.xy.diagonal() / torch.where(is_alive, squares, 1.0), 0.0)


def procrustes_map(fit: PairMoments, *, is_scaled: bool = True) -> LinearMap:
    """A rotation (or reflection) with one scale and an intercept: the nearest map that keeps all angles.

    is_scaled: whether the scale is fitted; 1 otherwise. Into a wider target R has orthonormal rows.
    Raises:
        ValueError: the target is narrower than the source, where no map keeps angles.
    """
    if fit.d_in > fit.d_out:
        raise ValueError(
            f"Procrustes from {fit.d_in} to {fit.d_out} channels: a map into fewer channels keeps no angles. Exchange "
            "source and target (`reversed`)."
        )
    left, values, right = torch.linalg.svd(fit.xy, full_matrices=False)
    total = float(fit.xx.trace())
    scale = float(values.sum()) / total if is_scaled and total > 0 else 1.0
    weight = scale * (left @ right)
    facts = {"count": fit.count, "scale": scale}
    return LinearMap(weight, fit.mean_y - fit.mean_x @ weight, "Procrustes", facts=facts)


def _same_width(fit: PairMoments, name: str) -> None:
    if fit.d_in != fit.d_out:
        raise ValueError(f"{name} needs x and y of the same width, got {fit.d_in} and {fit.d_out} channels.")

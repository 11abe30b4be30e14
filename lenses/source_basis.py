"""What ridge maps from one source to all of its targets share: one eigendecomposition, one rotation per shard.

    S_xx = Q diag(w) Q^T,   C = Q^T S_xy,   W(λ) = Q diag(1/(w+λ)) C,   λ = ρ tr(S_xx)/d                 (isotropic)

A diagonal penalty, λ diag(S_xx), is the same thing for x divided by its deviations, and scales back: W = T diag(..) T^T
S_xy with T = diag(S_xx)^(-1/2) Q. Directions whose variance is rounding error (below d eps of the largest) are left
out: dead channels, copies, fewer rows than channels. So are those that float32 products cannot tell from rounding.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from microtome.lenses.pair_moments import PairMoments, is_measured

PENALTIES = ("isotropic", "diag")


@dataclass(frozen=True, eq=False)
class SourceBasis:
    """Principal axes of a source.

    Attributes:
        transform: T: columns are the axes, divided by the deviations for a diagonal penalty.
        variances: w, sums of squares along them, ascending; 0 where left out.
        unit: what a strength of 1 adds to w: tr(S_xx)/d, or 1 for a diagonal penalty.
        mean: of x in the fit shard.
        count: rows of the fit shard.
    """

    transform: Float64[Tensor, "d_in d_in"]
    variances: Float64[Tensor, " d_in"]
    unit: float
    mean: Float64[Tensor, " d_in"]
    count: int
    penalty: str

    @property
    def is_kept(self) -> Bool[Tensor, " d_in"]:
        """Axes with variance."""
        return self.variances > 0

    @property
    def kept_rank(self) -> int:
        """Number of axes with variance."""
        return int(self.is_kept.sum())

    @property
    def condition(self) -> float:
        """Largest variance over the smallest that is kept; infinity where none is."""
        kept = self.variances[self.is_kept]
        return float(kept.max() / kept.min()) if len(kept) else torch.inf

    def rotated(self, products: Float64[Tensor, "d_in columns"]) -> Float64[Tensor, "d_in columns"]:
        """T^T S_xy: cross-products in these axes, 0 for axes that are left out."""
        return torch.where(self.is_kept[:, None], self.transform.T @ products, 0.0)

    def gram(self, products: Float64[Tensor, "d_in d_in"]) -> Float64[Tensor, "d_in d_in"]:
        """T^T S_xx T of another shard."""
        return self.transform.T @ products @ self.transform

    def damping(self, penalties: Float64[Tensor, " strength"]) -> Float64[Tensor, "strength d_in"]:
        """1/(w+λ), 0 for axes that are left out."""
        damped = self.variances + penalties[:, None]
        return torch.where(self.is_kept, 1 / torch.where(self.is_kept, damped, 1.0), 0.0)

    def damping_of(self, penalty: int | float) -> Float64[Tensor, " d_in"]:
        """The same for one penalty λ."""
        return self.damping(torch.tensor([penalty], dtype=torch.float64, device=self.variances.device))[0]


def source_basis(fit: PairMoments, penalty: str = "isotropic") -> SourceBasis:
    """Decompose the source of these moments; their target is not looked at.

    Raises:
        ValueError: another penalty, or fewer than two rows.
    """
    if penalty not in PENALTIES:
        raise ValueError(f"penalty is {penalty!r}; there are {PENALTIES}.")
    if fit.count < 2:
        raise ValueError(f"{fit.count} rows cannot be fitted to. Give two or more, best 20 per channel.")
    products, scale, noise = fit.xx, None, fit.noise_x
    if penalty == "diag":
        squares = fit.xx.diagonal()
        scale = torch.where(squares > _noise(fit), squares, torch.inf).rsqrt()
        products = products * scale[:, None] * scale
        noise = None if noise is None else noise * scale.square()
    variances, axes = torch.linalg.eigh(products)
    width = len(variances)
    floor = torch.finfo(torch.float64).eps * max(width, 2) * variances[-1].clamp_min(0)
    floor = floor if scale is not None else torch.maximum(floor, _noise(fit).max())
    variances = torch.where(is_measured(variances, axes, noise, floor), variances, 0.0)
    unit = 1.0 if scale is not None else float(fit.xx.trace()) / width
    transform = axes if scale is None else scale[:, None] * axes
    return SourceBasis(transform, variances, unit, fit.mean_x, fit.count, penalty)


def _noise(fit: PairMoments) -> Float64[Tensor, " d_in"]:
    """What rounding of a constant channel of this mean adds up to."""
    return fit.count * (torch.finfo(torch.float64).eps * fit.mean_x) ** 2 * 4

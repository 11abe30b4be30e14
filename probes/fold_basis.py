"""Rows of some sites as the solver wants them: standardised inside each training fold, in a basis all folds share.

Fold f standardises with the mean and deviation of its own training rows, x̂ = (x - μ_f)/σ_f. All folds of a site
share one matrix of rows y = (x - c)/u all the same: with v = ŵ u/σ_f the score is y·v + β (the free intercept absorbs
the shift), and the penalty ½‖ŵ‖² becomes ½ Σ_j (σ_fj/u_j)² v_j². So all folds, strengths and label sets of a site
share their products. c and u come, per feature, from the fold with the smallest deviation: an outlier among another
fold's rows cannot wash out the float32 copy that the fold without it works on.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

BLOCK = 64  # features worked on at a time: float64 rows of more fall out of the cache
FAR = 1e12  # deviations: float32 squares must not overflow; what another fold's outlier leaves there is below rounding
PAD = 8  # columns in whole vectors: products of width 65 run at half the speed of width 72


@dataclass(frozen=True)
class FoldBasis:
    """Some sites' rows and what each fold's standardisation means for them. Width: features, then 1, then zeros."""

    double: Float[Tensor, "site width example"]  # float64: (x - centre)/unit, then ones, then zero padding
    single: Float[Tensor, "site width example"]  # the same in float32, within ±1e12
    mean: Float[Tensor, "site fold d_model"]  # of the training rows, activation units
    deviation: Float[Tensor, "site fold d_model"]  # of the training rows, activation units; 0 for a constant feature
    centre: Float[Tensor, "site d_model"]  # activation units
    unit: Float[Tensor, "site d_model"]  # activation units, > 0
    ridge: Float[Tensor, "site fold width"]  # penalty on v², 0 for the intercept

    def of(self, sites: Int[Tensor, " kept"]) -> "FoldBasis":
        """Only these sites, ascending."""
        if len(sites) == len(self.single):
            return self
        return FoldBasis(*(getattr(self, name)[sites] for name in self.__dataclass_fields__))


def fold_moments(
    columns: Float[Tensor, "site d_model example"], train: Bool[Tensor, "fold example"]
) -> tuple[Float[Tensor, "site fold d_model"], Float[Tensor, "site fold d_model"]]:
    """Mean and deviation (divisor n) of each fold's training rows, from those rows only; float64 features in columns.

    A feature whose deviation is rounding noise of its mean counts as constant: its deviation is 0.
    """
    masks = train.double()
    n_train = masks.sum(1)
    mean = columns.new_empty(len(columns), columns.shape[1], len(train))
    square = torch.empty_like(mean)
    # sums about the first training row lose no digits to a large mean; folds that share that row share the products.
    # A product with 0 adds nothing at all, so rows outside a fold leave its sums as they are, to the bit
    pivots = train.long().argmax(1)
    for some in torch.arange(columns.shape[1]).split(BLOCK):
        block = columns[:, some[0] : some[-1] + 1]
        for pivot in pivots.unique():
            shared = (pivots == pivot).nonzero()[:, 0]
            at, folds = (slice(None), some[:, None], shared), masks[shared].T
            shifted = block - block[..., pivot, None]
            offset = shifted @ folds / n_train[shared]
            mean[at] = block[..., pivot, None] + offset
            square[at] = shifted.square_() @ folds / n_train[shared] - offset.square()
    deviation = square.clamp(min=0).sqrt()
    noise = torch.finfo(torch.float64).eps * n_train * mean.abs()
    return mean.mT, torch.where(deviation > noise, deviation, 0.0).mT


def fold_moments_about_zero(
    columns: Float[Tensor, "site d_model example"], train: Bool[Tensor, "fold example"]
) -> tuple[Float[Tensor, "site fold d_model"], Float[Tensor, "site fold d_model"]]:
    """Zeros, and each fold's root mean square: what standardises a fit without an intercept."""
    mean, deviation = fold_moments(columns, train)
    return torch.zeros_like(mean), torch.hypot(mean, deviation)


def fold_basis(
    features: Float[Tensor, "site example d_model"],
    train: Bool[Tensor, "fold example"],
    *,
    standardize: bool = True,
    intercept: bool = True,
    weighted: Bool[Tensor, "fold example"] | None = None,
) -> FoldBasis:
    """Shared rows and per-fold penalties.

    Args:
        features: activation units.
        train: the rows whose mean and deviation standardise a fold.
        standardize: False leaves the penalty on the weights of the raw features.
        intercept: False keeps the origin: mean 0, deviation about 0, and zeros where the ones were.
        weighted: the training rows that count in the loss; only they say where float32 needs its digits.
    """
    n_sites, n_rows, width = features.shape
    padded = -(-(width + 1) // PAD) * PAD
    double = features.new_empty(n_sites, padded, n_rows, dtype=torch.float64)
    columns = double[:, :width]
    columns.copy_(features.mT)
    moments = fold_moments if intercept else fold_moments_about_zero
    mean, deviation = moments(columns, train)
    scale = deviation if standardize else torch.ones_like(deviation)
    middle, spread = (mean, deviation) if weighted is None else moments(columns, weighted)
    narrowest = spread.masked_fill(spread == 0, torch.inf).argmin(1, keepdim=True)
    centre = middle.gather(1, narrowest)[:, 0]
    unit = (spread if standardize else scale).gather(1, narrowest)[:, 0]
    unit = torch.where(unit > 0, unit, 1.0)

    is_alive = (deviation > 0).any(1)
    columns.sub_(centre[..., None]).mul_((is_alive / unit)[..., None])
    double[:, width] = float(intercept)
    double[:, width + 1 :] = 0.0
    single = double.float().clamp_(-FAR, FAR)

    # a feature constant in a fold only shifts the free intercept there, so any penalty brings its weight to 0
    ridge = double.new_ones(n_sites, len(train), padded)
    ridge[..., :width] = torch.where(deviation > 0, (scale / unit[:, None]).clamp(max=FAR) ** 2, 1.0)
    ridge[..., width] = float(not intercept)

    return FoldBasis(double, single, mean, deviation, centre, unit, ridge)

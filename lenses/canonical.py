"""Canonical correlations of two sites: how many directions are carried linearly, and the most any linear map explains.

    S_yy^(-1/2) S_yx S_xx^(-1/2) = U diag(r) V^T       (Hotelling 1936)

No affine map explains more than sum r^2 / d of the whitened target, none of rank k more than the first k terms.
Measured on the rows they were fitted to, correlations are too high: independent sites of d channels and N rows give
a mean r^2 of g, and r up to

    2 sqrt(g (1-g)),  g = d/N            (widths p, q: the edge of Wachter 1980, a = p/N, b = q/N,
                                          r^2 = a + b - 2ab + 2 sqrt(ab (1-a) (1-b)))

So the directions are frozen on the fit shard, every r computed again on the test shard, and only
those above the edge counted. Beware: directions of S below 1e-10 of its largest are dropped on both sides, and all
others weigh the same, however little variance they have; a held-out ceiling is that of the frozen directions, which a
map fitted to the test shard itself could pass.
"""

from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from microtome.lenses.map_scores import WHITENING_FLOOR
from microtome.lenses.pair_moments import PairMoments, is_measured
from microtome.lenses.participation import directions_reaching, participation_ratio
from microtome.lenses.short_repr import short_repr


@dataclass(frozen=True, eq=False)
class CanonicalCorrelations:
    """Of one pair of sites.

    Attributes:
        in_sample: r on the fit shard, descending; biased upwards.
        held_out: r of the same directions on the test shard; NaN without one. May be negative.
        noise_edge: largest r that independent sites would give in the fit shard; 1 where rows are too few to tell.
        null_mean: mean of r^2 per target direction that independent sites would give there.
        rank_x, rank_y: directions that whitening kept, of `width_x` and `width_y` channels.
        count: rows of the fit shard.
    """

    in_sample: Float64[Tensor, " direction"]
    held_out: Float64[Tensor, " direction"]
    noise_edge: float
    null_mean: float
    rank_x: int
    rank_y: int
    width_x: int
    width_y: int
    count: int

    __repr__ = short_repr

    @property
    def tokens_per_channel(self) -> float:
        """N/d: below about 20 in-sample numbers are mostly noise."""
        return self.count / max(self.width_x, 1)

    @property
    def count_above_edge(self) -> int:
        """Directions whose held-out correlation is above the noise edge."""
        return int((self.held_out > self.noise_edge).sum())

    @property
    def in_sample_ceiling(self) -> Float64[Tensor, " direction"]:
        """Most that a map of rank 1, 2, ... explains of the whitened fit shard. Biased: see `null_mean`."""
        return self.in_sample.square().cumsum(0) / max(self.rank_y, 1)

    @property
    def held_out_ceiling(self) -> Float64[Tensor, " direction"]:
        """The same from held-out correlations; a negative one adds nothing."""
        return self.held_out.clamp_min(0).square().cumsum(0) / max(self.rank_y, 1)

    @property
    def participation(self) -> float:
        """(sum r)^2 / sum r^2 in sample, as the code of arXiv 2508.17540 measures a subspace. A published baseline:
        independent sites of d channels give 0.72 d."""
        return participation_ratio(self.in_sample)

    def rank_reaching(self, share: float) -> int:
        """Fewest directions that hold this share of the held-out sum of r^2; 0 where there is none.

        Raises:
            ValueError: a share that is not above 0 and at most 1.
        """
        if not 0 < share <= 1:
            raise ValueError(f"share is {share}; give a number above 0 and at most 1, such as 0.95.")
        return directions_reaching(self.held_out, share)

    def to_frame(self) -> pd.DataFrame:
        """One row per direction, strongest first."""
        return pd.DataFrame(
            {
                "rank": range(1, len(self.in_sample) + 1),
                "in_sample": self.in_sample.cpu().numpy(),
                "held_out": self.held_out.cpu().numpy(),
                "above_edge": (self.held_out > self.noise_edge).cpu().numpy(),
                "in_sample_ceiling": self.in_sample_ceiling.cpu().numpy(),
                "held_out_ceiling": self.held_out_ceiling.cpu().numpy(),
            }
        )


def canonical_correlations(fit: PairMoments, test: PairMoments | None = None) -> CanonicalCorrelations:
    """Canonical correlations of a pair, again on a test shard with the directions of the fit shard.

    Raises:
        ValueError: fewer than two rows, or a test shard of other sites or without rows.
    """
    if fit.count < 2:
        raise ValueError(f"{fit.count} rows have no correlations. Give two or more, best 20 per channel.")
    if test is not None and (test.xy.shape != fit.xy.shape or test.count < 2):
        raise ValueError(f"test has {test.count} rows of {tuple(test.xy.shape)}, fit is {tuple(fit.xy.shape)}.")
    white_x, white_y = whitener(fit.xx, fit.noise_x), whitener(fit.yy, fit.noise_y)
    left, values, right = torch.linalg.svd(white_x.T @ fit.xy @ white_y, full_matrices=False)
    values = values.clamp(0, 1)
    held_out = torch.full_like(values, torch.nan)
    if test is not None:
        held_out = held_out_correlations(test, white_x @ left, white_y @ right.T)
    return CanonicalCorrelations(
        values,
        held_out,
        noise_edge(white_x.shape[1], white_y.shape[1], fit.count),
        min(1.0, white_x.shape[1] / (fit.count - 1)),
        white_x.shape[1],
        white_y.shape[1],
        fit.d_in,
        fit.d_out,
        fit.count,
    )


def whitener(
    products: Float64[Tensor, "width width"], noise: Float64[Tensor, " width"] | None = None
) -> Float64[Tensor, "width kept"]:
    """A with A^T S A = 1 on the directions above the floor of 1e-10 and the noise of the products."""
    values, axes = torch.linalg.eigh(products)
    is_kept = is_measured(values, axes, noise, WHITENING_FLOOR * values[-1].clamp_min(0))
    return axes[:, is_kept] * values[is_kept].rsqrt()


def held_out_correlations(
    test: PairMoments, of_x: Float64[Tensor, "d_in direction"], of_y: Float64[Tensor, "d_out direction"]
) -> Float64[Tensor, " direction"]:
    """Correlation of x a and y b on a shard, for each pair of columns; 0 where one of them does not vary there."""
    cross = ((test.xy.T @ of_x) * of_y).sum(0)
    return correlations_of(cross, ((test.xx @ of_x) * of_x).sum(0), ((test.yy @ of_y) * of_y).sum(0))


def correlations_of(
    cross: Float64[Tensor, " direction"], of_x: Float64[Tensor, " direction"], of_y: Float64[Tensor, " direction"]
) -> Float64[Tensor, " direction"]:
    """Cross-products over the root of both sums of squares; 0 where one of these is 0."""
    squares = of_x * of_y
    return torch.where(squares > 0, cross / squares.clamp_min(1e-300).sqrt(), 0.0).clamp(-1, 1)


def noise_edge(rank_x: int, rank_y: int, count: int) -> float:
    """Largest canonical correlation of independent sites in a sample of this many rows; 1 where ranks add up to the
    rows, and a fit is perfect by necessity."""
    a, b = rank_x / max(count - 1, 1), rank_y / max(count - 1, 1)
    if a + b >= 1:
        return 1.0
    return min(1.0, (a + b - 2 * a * b + 2 * (a * b * (1 - a) * (1 - b)) ** 0.5) ** 0.5)

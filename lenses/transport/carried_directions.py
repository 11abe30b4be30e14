"""Direction by direction: what the best map of each rank explains of rows it was not fitted on, and could at the most.

Of a fit (`reduced_rank`): u_i = (y - m_y) a_i, the i-th direction of the target, orthonormal in the metric, and its
prediction v_i = (x - m_x) b_i. On a shard, about the fit means, T = sum over the metric's directions of u^2:

    explained_i = (sum u_i^2 - sum (u_i - v_i)^2) / T = (2 sum u_i v_i - sum v_i^2) / T
    reachable_i = (sum u_i v_i)^2 / sum v_i^2 / T           the same two directions with the gain that is best there

so that explained <= reachable on any rows (Cauchy), with equality where the fitted gain is the right one. Running sums
are the R2 of the map of rank k in this metric and its ceiling: same rows, same metric. In the fit shard at strength 0
both are the canonical ceiling sum_{i<=k} r_i^2 / d (methods sheet 1.5). A correlation below 0 reaches nothing.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from microtome.lenses.canonical import correlations_of
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.reduced_rank import ReducedRank, TargetMetric
from microtome.lenses.short_repr import short_repr


@dataclass(frozen=True, eq=False)
class CarriedDirections:
    """Of one fit on one shard, strongest direction of the fit first.

    Attributes:
        explained, reachable: shares of the target's sum of squares in the metric (module docstring).
        correlations: of u_i and v_i about the shard's own means.
    """

    explained: Float64[Tensor, " direction"]
    reachable: Float64[Tensor, " direction"]
    correlations: Float64[Tensor, " direction"]

    __repr__ = short_repr


def carried_directions(
    reduced: ReducedRank, target: TargetMetric, shard: PairMoments, fit: PairMoments
) -> CarriedDirections:
    """Measure the directions of a fit on a shard.

    Args:
        reduced: of the fit shard.
        target: its metric.
        shard: moments about its own means.
        fit: only its means are used.

    Raises:
        ValueError: a shard of other sites or without rows.
    """
    if shard.xy.shape != fit.xy.shape or shard.count < 2:
        raise ValueError(f"the shard has {shard.count} rows of {tuple(shard.xy.shape)}, the fit {tuple(fit.xy.shape)}.")
    shift_x, shift_y = (shard.mean_x - fit.mean_x) @ reduced.left, (shard.mean_y - fit.mean_y) @ reduced.of_y
    cross = ((shard.xy.T @ reduced.left) * reduced.of_y).sum(0)
    squares_x = ((shard.xx @ reduced.left) * reduced.left).sum(0)
    squares_y = ((shard.yy @ reduced.of_y) * reduced.of_y).sum(0)
    both, own = cross + shard.count * shift_x * shift_y, squares_x + shard.count * shift_x.square()
    total = float(((shard.yy @ target.onto) * target.onto).sum())
    total += shard.count * float(((shard.mean_y - fit.mean_y) @ target.onto).square().sum())
    scale = 1 / total if total > 0 else torch.nan
    reachable = torch.where(own > 0, both.clamp_min(0).square() / own.clamp_min(1e-300), 0.0)
    correlations = correlations_of(cross, squares_x, squares_y)
    return CarriedDirections((2 * both - own) * scale, reachable * scale, correlations)

"""The best map of every rank from one decomposition: reduced-rank regression, in the raw or the whitened metric.

    M = C^T diag(1/(w+λ)) C = W_λ^T (S_xx + λ) W_λ                        what the full map W_λ explains
    raw:       W_k = W_λ Q_k Q_k^T,                            Q = eigenvectors of M              (Izenman 1975)
    whitened:  W_k = W_λ S^(-1/2) U_k U_k^T S^(1/2),           U = eigenvectors of S^(-1/2) M S^(-1/2),  S = S_yy

λ = 0 gives the optimum among all maps of rank k: in the whitened metric its R2 in sample is exactly sum_{i<=k} r_i^2/d,
the canonical ceiling. Truncating the singular values of W itself (`truncated_map`, what the code of arXiv 2508.17540
does) is the best in neither metric; with channels of unlike variance its R2 can be far below 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from microtome.lenses.linear_map import LinearMap
from microtome.lenses.map_scores import WHITENING_FLOOR
from microtome.lenses.pair_moments import PairMoments, is_measured
from microtome.lenses.short_repr import short_repr
from microtome.lenses.source_basis import SourceBasis, source_basis

METRICS = ("whitened", "raw")


@dataclass(frozen=True, eq=False)
class TargetMetric:
    """How errors of a target are weighed: |(y - y_hat) onto|^2.

    Attributes:
        name: "whitened" (S^(-1/2) on the directions with variance) or "raw" (the identity).
        onto: into the metric's coordinates.
        back: from them.
    """

    name: str
    onto: Float64[Tensor, "d_out kept"]
    back: Float64[Tensor, "kept d_out"]


def target_metric(fit: PairMoments, name: str = "whitened") -> TargetMetric:
    """The metric of a pair's target.

    Raises:
        ValueError: another name.
    """
    if name not in METRICS:
        raise ValueError(f"metric is {name!r}; there are {METRICS}.")
    if name == "raw":
        eye = torch.eye(fit.d_out).to(fit.yy)
        return TargetMetric(name, eye, eye)
    values, axes = torch.linalg.eigh(fit.yy)
    is_kept = is_measured(values, axes, fit.noise_y, WHITENING_FLOOR * values[-1].clamp_min(0))
    values, axes = values[is_kept], axes[:, is_kept]
    return TargetMetric(name, axes * values.rsqrt(), values.sqrt()[:, None] * axes.T)


@dataclass(frozen=True, eq=False)
class ReducedRank:
    """Maps of every rank: W_k = left[:, :k] right[:k].

    Direction i predicts (y - mean_y) of_y[:, i] by (x - mean_x) left[:, i].

    Attributes:
        of_y: the directions of y whose values are predicted: orthonormal in the metric.
        gains: what each further direction explains in the fit shard, descending: r_i^2 (whitened) or a sum of
            squares (raw), at strength 0.
        metric: "whitened" or "raw".
        strength: ρ of the full map.
    """

    left: Float64[Tensor, "d_in direction"]
    right: Float64[Tensor, "direction d_out"]
    of_y: Float64[Tensor, "d_out direction"]
    gains: Float64[Tensor, " direction"]
    mean_x: Float64[Tensor, " d_in"]
    mean_y: Float64[Tensor, " d_out"]
    metric: str
    strength: float
    count: int

    __repr__ = short_repr

    @property
    def full_rank(self) -> int:
        """Largest rank there is."""
        return len(self.gains)

    def at(self, rank: int) -> LinearMap:
        """The map of this rank; rank 0 is the mean.

        Raises:
            ValueError: a negative rank, or one above `full_rank`.
        """
        if not 0 <= rank <= self.full_rank:
            raise ValueError(f"rank {rank}; there are ranks 0 to {self.full_rank}.")
        weight = self.left[:, :rank] @ self.right[:rank]
        return LinearMap(
            weight,
            self.mean_y - self.mean_x @ weight,
            f"reduced rank, {self.metric}",
            strength=self.strength,
            rank=rank,
            facts={"count": self.count},
        )


def reduced_rank(
    fit: PairMoments,
    *,
    metric: str = "whitened",
    strength: int | float = 0.0,
    penalty: str = "isotropic",
    basis: SourceBasis | None = None,
    target: TargetMetric | None = None,
) -> ReducedRank:
    """Maps of every rank; any of them costs one product.

    strength: ρ of the ridge map that is reduced, 0 for least squares; `ridge_map(...).path.strength` is the chosen.
    basis: of this source and penalty, where it is there already.
    target: `target_metric(fit, metric)`, where it is there already.
    Raises:
        ValueError: another metric or penalty, a negative strength, fewer than two rows.
    """
    target = target_metric(fit, metric) if target is None else target
    if not 0 <= strength < torch.inf:
        raise ValueError(f"strength is {strength}; give a finite ρ of 0 or more.")
    basis = source_basis(fit, penalty) if basis is None else basis
    loadings = basis.rotated(fit.xy)
    damping = basis.damping_of(strength * basis.unit)
    roots = damping.sqrt()[:, None] * loadings  # M = roots^T roots
    onto = target.onto
    _, values, axes = torch.linalg.svd(roots @ onto, full_matrices=False)
    of_y = onto @ axes.T
    left = basis.transform @ (damping[:, None] * (loadings @ of_y))
    rank = min(basis.kept_rank, onto.shape[1])
    return ReducedRank(
        left[:, :rank],
        (axes @ target.back)[:rank],
        of_y[:, :rank],
        values[:rank].square(),
        fit.mean_x,
        fit.mean_y,
        target.name,
        float(strength),
        fit.count,
    )


def truncated_map(found: LinearMap, fit: PairMoments, rank: int) -> LinearMap:
    """The first singular directions of a map's weight, its intercept fitted again. A published baseline: see above.

    Raises:
        ValueError: a negative rank.
    """
    return truncated_maps(found, fit, [rank])[0]


def truncated_maps(found: LinearMap, fit: PairMoments, ranks: Sequence[int]) -> list[LinearMap]:
    """The same for several ranks, from one decomposition."""
    if wrong := [rank for rank in ranks if rank < 0]:
        raise ValueError(f"rank is {wrong[0]}; give 0 or more.")
    left, values, right = torch.linalg.svd(found.weight.to(fit.xy), full_matrices=False)
    kind, facts = f"{found.kind}, singular values truncated", {"count": fit.count}
    maps = []
    for rank in ranks:
        weight = (left[:, :rank] * values[:rank]) @ right[:rank]
        intercept = fit.mean_y - fit.mean_x @ weight
        maps.append(LinearMap(weight, intercept, kind, found.source, found.target, found.strength, rank, facts))
    return maps

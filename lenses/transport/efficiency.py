"""Transport efficiency: of what a linear map of this rank could carry, how much an operator does carry.

    efficiency(k) = R2 of the operator of rank k / ceiling(k),      both on the test shard, in one metric

The operator is the reduced-rank ridge map; the ceiling takes its directions with the gains that are best on the test
rows (`carried_directions`), so that efficiency is at most 1 on any rows, and 1 on a linear network. `bound` is the best
any map of this rank could do that was fitted to the test rows themselves: strict, and too high by about d/N.

Published beside it (Szablewski & Masiak 2025, arXiv 2508.17540, as their code does it): singular values of the ridge
weight cut off at k, R2 whitened by the uncentred second moment of the test rows, over the canonical ceiling of the
FIT rows. Cut-off singular values are best in no metric, so that this can be far below 0 at low rank, and the ceiling
is too high by the noise of the fit: the ratio is low everywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from microtome.lenses.canonical import canonical_correlations
from microtome.lenses.linear_map import LinearMap, identity_map
from microtome.lenses.map_scores import WHITENING_FLOOR, error_moments
from microtome.lenses.pair_moments import PairMoments, is_measured
from microtome.lenses.pair_splits import PairSplits
from microtome.lenses.reduced_rank import TargetMetric, reduced_rank, target_metric, truncated_maps
from microtome.lenses.ridge_map import ridge_map
from microtome.lenses.short_repr import short_repr
from microtome.lenses.source_basis import source_basis
from microtome.lenses.transport.carried_directions import carried_directions

RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, eq=False)
class TransportEfficiency:
    """Efficiency of every rank asked for.

    Attributes:
        table: one row per rank: rank, score, ceiling, efficiency, bound (held out), in_sample_score and
            in_sample_ceiling (of the fit rows), truncated_score and truncated_efficiency (singular values cut off, same
            rows, metric and ceiling), published_score, published_ceiling, published_efficiency.
        whole: one row per map of full rank: map, score, efficiency against the ceiling of full rank.
        metric: "whitened" or "raw".
        strength: ρ of the ridge map.
        count, test_count: rows.
    """

    table: pd.DataFrame
    whole: pd.DataFrame
    metric: str
    strength: float
    count: int
    test_count: int

    __repr__ = short_repr

    def to_frame(self) -> pd.DataFrame:
        """One row per rank."""
        return self.table


def transport_efficiency(
    splits: PairSplits,
    *,
    ranks: Sequence[int] | None = None,
    metric: str = "whitened",
    strengths: Sequence[int | float] | None = None,
    penalty: str = "isotropic",
    maps: Mapping[str, LinearMap] | None = None,
) -> TransportEfficiency:
    """Scores and ceilings by rank.

    Args:
        splits: of one pair, each shard about its own means.
        ranks: 1, 2, 4, ... and the full rank if None.
        metric: "whitened" (every direction of the target counts the same, comparable with canonical correlations) or
            "raw" (directions count by their variance).
        strengths, penalty: as of `ridge_map`; `[0]` is least squares.
        maps: further maps between these sites, by name, to be held against the full ceiling; the identity is among them
            where widths agree.

    Raises:
        ValueError: as many channels as fit rows, where anything fits without an error; a site that does not vary; a
            rank that is not there, or none; another metric; a further map of the name of one that is there.
    """
    require_rows(splits)
    require_variance(splits)
    fit, test = splits.fit, splits.test
    basis, target = source_basis(fit, penalty), target_metric(fit, metric)
    ridge = ridge_map(fit, splits.validation, strengths=strengths, penalty=penalty, basis=basis)
    reduced = reduced_rank(fit, strength=ridge.path.strength, basis=basis, target=target)
    ranks = _checked(ranks, reduced.full_rank)
    held = carried_directions(reduced, target, test, fit)
    seen = carried_directions(reduced, target, fit, fit)
    score, ceiling = held.explained.cumsum(0), held.reachable.cumsum(0)
    in_sample, in_sample_ceiling = seen.explained.cumsum(0), seen.reachable.cumsum(0)
    bound = _bound(test, fit, target)
    own, published = _total(test, fit, target.onto), _published(splits)
    rows = []
    for rank, cut in zip(ranks, truncated_maps(ridge.map, fit, ranks), strict=True):
        at = rank - 1
        errors = error_moments(cut, test)
        cut_score = _score(errors, target.onto, own)
        published_score = _score(errors, published.onto, published.total)
        published_ceiling = float(published.ceiling[min(at, len(published.ceiling) - 1)])
        rows.append(
            {
                "rank": rank,
                "score": float(score[at]),
                "ceiling": float(ceiling[at]),
                "efficiency": efficiency_of(float(score[at]), float(ceiling[at])),
                "bound": float(bound[min(at, len(bound) - 1)]),
                "in_sample_score": float(in_sample[at]),
                "in_sample_ceiling": float(in_sample_ceiling[at]),
                "truncated_score": cut_score,
                "truncated_efficiency": efficiency_of(cut_score, float(ceiling[at])),
                "published_score": published_score,
                "published_ceiling": published_ceiling,
                "published_efficiency": efficiency_of(published_score, published_ceiling),
            }
        )
    if taken := [name for name in maps or {} if name in ("identity", "ridge")]:
        raise ValueError(f"a further map cannot be called {taken[0]!r}, which is there already. Give another name.")
    same = {"identity": identity_map(fit.d_in)} if fit.d_in == fit.d_out else {}
    whole = []
    for name, found in {**same, **(maps or {}), "ridge": ridge.map}.items():
        value = _score(error_moments(found, test), target.onto, own)
        whole.append({"map": name, "score": value, "efficiency": efficiency_of(value, ceiling[-1])})
    return TransportEfficiency(
        pd.DataFrame(rows), pd.DataFrame(whole), metric, ridge.path.strength, fit.count, test.count
    )


def require_rows(splits: PairSplits) -> None:
    """Raise ValueError where fit rows are so few that any two sites seem carried without an error."""
    fit = splits.fit
    if fit.count <= fit.d_in + fit.d_out:
        raise ValueError(
            f"the fit shard has {fit.count} rows for {fit.d_in} + {fit.d_out} channels: independent sites would "
            "correlate without an error there. Give more rows than channels, best 20 per channel."
        )


def require_variance(splits: PairSplits) -> None:
    """Raise ValueError where one of the sites is the same in all fit rows, so that nothing can be carried."""
    fit = splits.fit
    for name, width in (("source", source_basis(fit).kept_rank), ("target", target_metric(fit).onto.shape[1])):
        if not width:
            raise ValueError(
                f"the {name} is the same in all {fit.count} fit rows, so that nothing is carried. Choose another site "
                "or stratum (first tokens may all be alike)."
            )


def _checked(ranks: Sequence[int] | None, full: int) -> list[int]:
    if ranks is None:
        return [*(rank for rank in RANKS if rank < full), full]
    if not len(ranks):
        raise ValueError("there are no ranks. Give one or more, or None for 1, 2, 4, ... and the full one.")
    if wrong := [rank for rank in ranks if not 1 <= rank <= full]:
        raise ValueError(f"rank {wrong[0]}; {full} directions have variance, so there are ranks 1 to {full}.")
    return sorted(set(ranks))


def _total(test: PairMoments, fit: PairMoments, onto: Tensor) -> float:
    """The target's sum of squares in a metric, about the fit mean."""
    yy = test.yy + test.count * torch.outer(test.mean_y - fit.mean_y, test.mean_y - fit.mean_y)
    return float(((yy @ onto) * onto).sum())


def _score(errors: Tensor, onto: Tensor, total: float) -> float:
    """1 - tr(onto^T E onto) / total."""
    return 1 - float(((errors @ onto) * onto).sum()) / total if total > 0 else torch.nan


def efficiency_of(score: float | Tensor, ceiling: float | Tensor) -> float:
    """score / ceiling; NaN where there is nothing to be carried."""
    return float(score) / float(ceiling) if float(ceiling) > 0 else torch.nan


def _bound(test: PairMoments, fit: PairMoments, target: TargetMetric) -> Float64[Tensor, " rank"]:
    """R2 of the best map of each rank fitted to the test rows, in the metric of the fit rows; NaN for too few rows."""
    if test.count <= fit.d_in + fit.d_out:
        return torch.full((1,), torch.nan, dtype=torch.float64)
    found = carried_directions(reduced_rank(test, target=target), target, test, test).explained.cumsum(0)
    # the mean of the test rows is one more thing such a map may fit
    return 1 - (1 - found) * _total(test, test, target.onto) / _total(test, fit, target.onto)


@dataclass(frozen=True, eq=False)
class _Published:
    onto: Tensor
    total: float
    ceiling: Tensor


def _published(splits: PairSplits) -> _Published:
    test = splits.test
    raw = test.yy + test.count * torch.outer(test.mean_y, test.mean_y)
    values, axes = torch.linalg.eigh(raw)
    is_kept = is_measured(values, axes, test.noise_y, WHITENING_FLOOR * values[-1].clamp_min(0))
    onto = axes[:, is_kept] * values[is_kept].rsqrt()
    canonical = canonical_correlations(splits.fit)
    return _Published(onto, float(((test.yy @ onto) * onto).sum()), canonical.in_sample_ceiling)

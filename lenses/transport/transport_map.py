"""Transport between all depths: R2, ceilings, efficiency and subspace sizes of every pair of sites, from moments alone.

    for each source: one eigendecomposition;  each target: one whitening;  each pair: 25 strengths, one decomposition

A pair of width 576 takes 0.3 s on one core. Columns: what `ridge_pairs` says (R2 of the ridge map and of what needs
no fit, strength, rows); in the metric whitened by the fit rows the map's `score`, `ceiling` and `efficiency` at full
rank and at chosen ranks (`score_10`, ...), and the identity's score against the same ceiling (`identity_efficiency`:
how much of what can be carried is carried as it is); sizes of the subspace of the ridge map (`subspace` has those of
least squares, with null distributions); `distance` in blocks and `depth` of the source. `shuffled=True` gives the null
of every column.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from microtome.lenses.canonical import noise_edge
from microtome.lenses.depths import deeper_pairs, depth_of
from microtome.lenses.fitted_pairs import FittedPair, Pair, fitted_pairs
from microtome.lenses.linear_map import LinearMap
from microtome.lenses.pair_matrix import pair_matrix
from microtome.lenses.pair_splits import SHARDS, MomentSource, pairs_held
from microtome.lenses.participation import directions_reaching, effective_rank, participation_ratio
from microtome.lenses.reduced_rank import TargetMetric, reduced_rank, target_metric
from microtome.lenses.ridge_pairs import baseline_scores, pair_row
from microtome.lenses.short_repr import short_repr
from microtome.lenses.strength_path import checked_strengths
from microtome.lenses.transport.carried_directions import carried_directions
from microtome.lenses.transport.efficiency import efficiency_of, require_rows

RANKS = (1, 10, 64)
_SHOWN = ("r2_vw", "r2_ua", "r2_wh", "ceiling", "efficiency", "identity_efficiency", "above_edge")
_SHARES = {"rank_90": 0.90, "rank_95": 0.95, "rank_99": 0.99}


@dataclass(frozen=True, eq=False)
class TransportMap:
    """Transport of many pairs.

    Attributes:
        table: one row per pair (module docstring).
        maps: ridge maps by the names of source and target; empty unless they were asked for.
    """

    table: pd.DataFrame
    maps: Mapping[Pair, LinearMap] = field(default_factory=dict)

    __repr__ = short_repr

    def to_frame(self) -> pd.DataFrame:
        """One row per pair."""
        return self.table

    def matrix(self, value: str = "r2_vw") -> pd.DataFrame:
        """One column as a matrix, sources down and targets across.

        Raises:
            KeyError: there is no such column.
        """
        return pair_matrix(self.table, value)

    def by_distance(
        self, values: Sequence[str] = ("r2_vw", "r2_ua", "r2_wh", "efficiency", "above_edge")
    ) -> pd.DataFrame:
        """Mean over the pairs of each distance, with their number."""
        grouped = self.table.groupby("distance")
        return grouped[list(values)].mean().assign(pairs=grouped.size()).reset_index()


def transport_map(
    moments: MomentSource,
    pairs: Sequence[tuple[Any, Any]] | None = None,
    *,
    ranks: Sequence[int] = RANKS,
    strengths: Sequence[int | float] | None = None,
    penalty: str = "isotropic",
    stratum: str = "rest",
    shards: Sequence[Any] = SHARDS,
    shuffled: bool = False,
    keep_maps: bool = False,
    map_dtype: torch.dtype = torch.float32,
    progress: bool = False,
) -> TransportMap:
    """Fit and measure every pair.

    Args:
        moments: of the sites.
        pairs: every residual depth with every deeper one that is held if None.
        ranks: at which efficiency is told besides the full one; those above a pair's full rank are left out (NaN).
        strengths, penalty, stratum, shards: as of `ridge_pairs`.
        shuffled: the same of x with y of another document: the null of the whole table.
        keep_maps, map_dtype: whether and how the ridge maps are kept.
        progress: show a bar.

    Raises:
        ValueError: no pairs, fewer rows than channels of both sites together, and what `ridge_map` raises.
    """
    values = checked_strengths(strengths)
    pairs = pairs_held(moments, deeper_pairs(moments.sites)) if pairs is None else list(pairs)
    if not pairs:
        raise ValueError("there are no pairs. Give at least one (source, target).")
    if wrong := [rank for rank in ranks if rank < 1]:
        raise ValueError(f"rank {wrong[0]}; give ranks of 1 or more.")
    metrics: dict[str, TargetMetric] = {}
    rows: dict[Pair, dict[str, Any]] = {}
    maps: dict[Pair, LinearMap] = {}
    fits = fitted_pairs(moments, pairs, values, penalty=penalty, stratum=stratum, shards=shards, shuffled=shuffled)
    for fitted in tqdm(fits, total=len(pairs), desc="transport", unit="pair", disable=not progress):
        require_rows(fitted.splits)
        name = fitted.name
        if name[1] not in metrics:
            metrics[name[1]] = target_metric(fitted.splits.fit)
        rows[name] = _places(name) | pair_row(fitted) | baseline_scores(fitted.splits, fitted.against)
        rows[name] |= _carried(fitted, metrics[name[1]], ranks)
        if keep_maps:
            maps[name] = fitted.map(stratum).to(map_dtype)
    return TransportMap(pd.DataFrame([rows[str(a), str(b)] for a, b in pairs]), maps)


def _places(name: Pair) -> dict[str, Any]:
    try:
        depths = [depth_of(site) for site in name]
    except ValueError:  # a site without a layer, or of another model
        return {"depth": float("nan"), "distance": float("nan")}
    return {"depth": depths[0], "distance": depths[1] - depths[0]}


def _carried(fitted: FittedPair, target: TargetMetric, ranks: Sequence[int]) -> dict[str, Any]:
    fit, test = fitted.splits.fit, fitted.splits.test
    reduced = reduced_rank(fit, strength=fitted.path.strength, basis=fitted.basis, target=target)
    held = carried_directions(reduced, target, test, fit)
    score, ceiling = held.explained.cumsum(0), held.reachable.cumsum(0)
    # a site that does not vary has no directions: nothing to be carried
    whole, reached = (one[-1] if len(one) else one.new_tensor(torch.nan) for one in (score, ceiling))
    found: dict[str, Any] = {
        "score": float(whole),
        "ceiling": float(reached),
        "efficiency": efficiency_of(whole, reached),
    }
    for rank in ranks:
        inside = rank <= reduced.full_rank
        found[f"score_{rank}"] = float(score[rank - 1]) if inside else float("nan")
        found[f"ceiling_{rank}"] = float(ceiling[rank - 1]) if inside else float("nan")
        found[f"efficiency_{rank}"] = efficiency_of(score[rank - 1], ceiling[rank - 1]) if inside else float("nan")
    if fit.d_in == fit.d_out:
        found["identity_score"] = _identity_score(fitted, target)
        found["identity_efficiency"] = efficiency_of(found["identity_score"], reached)
    return found | _sizes(reduced.gains, held.correlations, fitted, target)


def _identity_score(fitted: FittedPair, target: TargetMetric) -> float:
    """1 - sum |(y - x) onto|^2 / sum |(y - m) onto|^2."""
    test, onto = fitted.splits.test, target.onto
    left = test.yy - test.xy - test.xy.T + test.xx
    missed = (test.mean_y - test.mean_x) @ onto
    errors = float(((left @ onto) * onto).sum() + test.count * missed.square().sum())
    total = float(((fitted.against.total @ onto) * onto).sum())
    return 1 - errors / total if total > 0 else float("nan")


def _sizes(gains: Tensor, held: Tensor, fitted: FittedPair, target: TargetMetric) -> dict[str, Any]:
    """Sizes of the subspace of the ridge map; see `subspace` for least squares, with null distributions."""
    edge = noise_edge(fitted.basis.kept_rank, target.onto.shape[1], fitted.splits.fit.count)
    damping = fitted.basis.damping_of(fitted.penalty)
    fitted_y = (damping.square() * fitted.basis.variances)[:, None] * fitted.loadings
    variances = fitted.loadings.T @ fitted_y  # W^T S_xx W
    return {
        "above_edge": int((held > edge).sum()),
        "noise_edge": edge,
        **{name: directions_reaching(held, share) for name, share in _SHARES.items()},
        "effective_rank": effective_rank(variances),
        "participation": participation_ratio(gains.clamp_min(0).sqrt()),
    }

"""Ridge maps between all pairs of many sites, scored on the test shard beside what needs no fit.

The work that pairs share is done once: the axes of each source and the rotated moments of its validation and test rows,
the whitening of each target. What is left for a pair of width d is six products of d x d matrices (25 strengths add d^2
each), 961 pairs of width 576 in about two minutes on one core. Scores come from the axes directly, so that a map's
weight is built only where it is asked for.

Beware: memory is 8 d^2 bytes for each target on top of the moments, and again for each map that is kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from microtome.lenses.canonical import canonical_correlations
from microtome.lenses.fitted_pairs import FittedPair, Pair, fitted_pairs
from microtome.lenses.linear_map import LinearMap
from microtome.lenses.map_scores import Reference, scores_of_traces
from microtome.lenses.pair_matrix import pair_matrix
from microtome.lenses.pair_splits import SHARDS, MomentSource, PairSplits, pairs_held
from microtome.lenses.short_repr import short_repr
from microtome.lenses.simple_maps import channel_factors
from microtome.lenses.strength_path import StrengthPath, checked_strengths

_KINDS = ("r2_vw", "r2_ua", "r2_wh")


@dataclass(frozen=True, eq=False)
class RidgePairs:
    """Ridge maps of many pairs.

    Attributes:
        table: one row per pair: source, target, the ridge map's R2 on the test shard (r2_vw, r2_ua, r2_wh,
            r2_increment), those of identity_, shift_ and scale_ (NaN where widths differ), strength, alpha, dof, edge,
            condition, kept_rank, whitened_rank, validation_r2, count, test_count, tokens_per_channel; with
            `canonical` also ceiling (held out), in_sample_ceiling (biased), directions_above_edge and noise_edge.
            r2_increment is NaN where the target lies before the source: y - x then takes back what was added, and x
            alone says most of that.
        paths: of each pair, by the names of source and target.
        maps: of each pair; empty unless they were asked for.
    """

    table: pd.DataFrame
    paths: Mapping[Pair, StrengthPath]
    maps: Mapping[Pair, LinearMap] = field(default_factory=dict)

    __repr__ = short_repr

    def to_frame(self) -> pd.DataFrame:
        """One row per pair."""
        return self.table

    def matrix(self, value: str = "r2_vw") -> pd.DataFrame:
        """One column of the table as a matrix, sources down and targets across, both in the order of the table.

        Raises:
            KeyError: there is no such column.
        """
        return pair_matrix(self.table, value)

    def on_edge(self) -> pd.DataFrame:
        """Pairs whose strength is the weakest or strongest of the grid: give more strengths for these."""
        return self.table[self.table["edge"] != ""]


def ridge_pairs(
    moments: MomentSource,
    pairs: Sequence[tuple[Any, Any]] | None = None,
    *,
    strengths: Sequence[int | float] | None = None,
    penalty: str = "isotropic",
    select: str | None = None,
    refit: bool = False,
    stratum: str = "rest",
    shards: Sequence[Any] = SHARDS,
    keep_maps: bool = False,
    map_dtype: torch.dtype = torch.float64,
    canonical: bool = False,
    shuffled: bool = False,
    progress: bool = False,
) -> RidgePairs:
    """Fit, choose and score a ridge map for every pair.

    Args:
        moments: what gives the moments of pairs, `lenses.moments.Moments`.
        pairs: of source and target; every ordered pair that the moments hold if None, sites with themselves included.
        strengths, penalty, select, refit: as of `ridge_map`.
        stratum: which tokens: "rest" (neither sinks nor BOS), "sinks" or "all".
        shards: fit, validation (or None) and test, as of `pair_splits`; with folds
            `(moments.training("fold0"), None, "fold0")`.
        keep_maps: whether weights are kept, 8 d^2 bytes each in float64.
        map_dtype: what they are kept in.
        canonical: canonical ceilings too, which take several times as long as the maps.
        shuffled: pair every source with the target of another document: the control of the whole table.
        progress: show a bar.

    Raises:
        ValueError: no pairs, what `ridge_map` raises, or a shard without rows.
    """
    values = checked_strengths(strengths)
    pairs = pairs_held(moments) if pairs is None else list(pairs)
    if not pairs:
        raise ValueError("there are no pairs. Give at least one (source, target).")
    rows: dict[Pair, dict[str, Any]] = {}
    depth = {str(site): number for number, site in enumerate(moments.sites)}
    paths: dict[Pair, StrengthPath] = {}
    maps: dict[Pair, LinearMap] = {}
    fits = fitted_pairs(
        moments,
        pairs,
        values,
        penalty=penalty,
        select=select,
        refit=refit,
        stratum=stratum,
        shards=shards,
        shuffled=shuffled,
    )
    for fitted in tqdm(fits, total=len(pairs), desc="ridge maps", unit="pair", disable=not progress):
        name, final = fitted.name, fitted.splits
        paths[name] = fitted.path
        rows[name] = pair_row(fitted) | baseline_scores(final, fitted.against)
        rows[name] |= _ceilings(final) if canonical else {}
        if depth.get(name[1], 0) < depth.get(name[0], 0):
            rows[name]["r2_increment"] = float("nan")
        if keep_maps:
            maps[name] = fitted.map(stratum).to(map_dtype)
    return RidgePairs(pd.DataFrame([rows[str(a), str(b)] for a, b in pairs]), paths, maps)


def baseline_scores(splits: PairSplits, against: Reference) -> dict[str, float]:
    """R2 of the diagonal maps: identity, identity plus shift, scale per channel."""
    fit, test = splits.fit, splits.test
    names = [f"{name}_{kind}" for name in ("identity", "shift", "scale") for kind in _KINDS]
    if fit.d_in != fit.d_out:
        return dict.fromkeys(names, torch.nan)
    factors, ones = channel_factors(fit), torch.ones_like(fit.mean_x)
    choices = {
        "identity": (ones, torch.zeros_like(ones)),
        "shift": (ones, fit.mean_y - fit.mean_x),
        "scale": (factors, fit.mean_y - factors * fit.mean_x),
    }
    crossed, squared = against.inverse * test.xy, against.inverse * test.xx
    own = against.rank - _form(against.inverse, test.mean_y - fit.mean_y) * test.count
    found = {}
    for name, (scale, intercept) in choices.items():
        missed = test.mean_y - scale * test.mean_x - intercept
        diagonal = test.yy.diagonal() - 2 * scale * test.xy.diagonal() + scale.square() * test.xx.diagonal()
        diagonal = diagonal + test.count * missed.square()
        whitened = own - 2 * float(scale @ crossed.sum(1)) + _form(squared, scale)
        whitened += test.count * _form(against.inverse, missed)
        scores = scores_of_traces(float(diagonal.sum()), diagonal, whitened, torch.nan, against)
        found |= {f"{name}_{kind}": getattr(scores, kind) for kind in _KINDS}
    return found


def _form(matrix: Tensor, vector: Tensor) -> float:
    return float(vector @ (matrix @ vector))


def _ceilings(splits: PairSplits) -> dict[str, Any]:
    found = canonical_correlations(splits.fit, splits.test)
    return {
        "ceiling": float(found.held_out_ceiling[-1]),
        "in_sample_ceiling": float(found.in_sample_ceiling[-1]),
        "directions_above_edge": found.count_above_edge,
        "noise_edge": found.noise_edge,
    }


def pair_row(fitted: FittedPair) -> dict[str, Any]:
    """What a fit says of itself: scores, strength and how much there was to fit on."""
    splits, path, scores = fitted.splits, fitted.path, fitted.scores
    return {
        "source": fitted.name[0],
        "target": fitted.name[1],
        **{kind: getattr(scores, kind) for kind in (*_KINDS, "r2_increment")},
        "strength": path.strength,
        "alpha": path.penalty,
        "edge": path.edge,
        "selected_by": path.selected_by,
        "dof": float(path.dof[path.chosen]),
        "validation_r2": float(path.validation_r2[path.chosen]),
        "condition": path.condition,
        "kept_rank": path.kept_rank,
        "whitened_rank": scores.whitened_rank,
        "count": splits.fit.count,
        "test_count": splits.test.count,
        "tokens_per_channel": splits.fit.count / splits.fit.d_in,
    }

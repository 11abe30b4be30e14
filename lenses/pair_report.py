"""One pair of sites in full: every map, every R2, the ceilings, and controls beside them.

Maps: mean, identity, identity plus shift, scale per channel, Procrustes, least squares, ridge, and reduced ranks of the
ridge map in both metrics. All are fitted on the fit shard and scored on the test shard. Controls are the same ridge fit
on other moments: `shuffled` (x of a token with y of another document at the same position, which has to give 0) and a
model with random weights (which shows what the architecture alone carries).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from microtome.lenses.canonical import CanonicalCorrelations, canonical_correlations
from microtome.lenses.linear_map import LinearMap, identity_map
from microtome.lenses.map_scores import MapScores, map_scores, reference
from microtome.lenses.pair_splits import PairSplits
from microtome.lenses.participation import effective_rank
from microtome.lenses.reduced_rank import METRICS, reduced_rank
from microtome.lenses.ridge_map import RidgeFit, least_squares_map, ridge_map
from microtome.lenses.short_repr import short_repr
from microtome.lenses.simple_maps import mean_map, procrustes_map, scale_map, shift_map
from microtome.lenses.source_basis import source_basis
from microtome.lenses.strength_path import StrengthPath

# below this, correlations and R2 in sample are mostly noise
TOKENS_PER_CHANNEL = 20


@dataclass(frozen=True, eq=False)
class PairReport:
    """What linear maps of a pair do.

    Attributes:
        table: one row per map: data ("" or the control's name), map, rank, strength, r2_vw, r2_ua, r2_wh,
            r2_increment, whitened_rank, count, test_count, tokens_per_channel.
        directions: one row per direction, one column per map; no columns where none were given.
        canonical: correlations and ceilings, in sample (biased) and held out.
        path: of the ridge map's strengths.
        effective_rank: (sum g)^2 / sum g^2 of the variances g of the ridge map's fitted values.
        map: the ridge map.
        notes: what a reader must know of these numbers.
    """

    table: pd.DataFrame
    directions: pd.DataFrame
    canonical: CanonicalCorrelations
    path: StrengthPath
    effective_rank: float
    map: LinearMap
    notes: tuple[str, ...]

    __repr__ = short_repr

    def to_frame(self) -> pd.DataFrame:
        """One row per map."""
        return self.table


def pair_report(
    splits: PairSplits,
    *,
    controls: Mapping[str, PairSplits] | None = None,
    ranks: Sequence[int] = (),
    directions: Float[Tensor, "direction width"] | None = None,
    strengths: Sequence[int | float] | None = None,
    penalty: str = "isotropic",
) -> PairReport:
    """Fit and score every map of a pair.

    Args:
        splits: the pair, by shard.
        controls: other moments of the same widths, by name: `{"shuffled": ..., "random weights": ...}`.
        ranks: of the reduced maps.
        directions: u, in the target's channels.
        strengths, penalty: as of `ridge_map`.

    Raises:
        ValueError: a control of other widths, a rank there is not, or what the maps raise.
    """
    for name, other in (controls or {}).items():
        if other.fit.xy.shape != splits.fit.xy.shape:
            raise ValueError(
                f"control {name!r} is {tuple(other.fit.xy.shape)}, the pair {tuple(splits.fit.xy.shape)}: other sites."
            )
    basis = source_basis(splits.fit, penalty)
    ridge = ridge_map(splits.fit, splits.validation, strengths=strengths, penalty=penalty, basis=basis)
    against = reference(splits.test, splits.fit.mean_y)
    maps = {found.kind: found for found in [*_baselines(splits), ridge.map]}
    for metric in METRICS if ranks else ():
        reduced = reduced_rank(splits.fit, metric=metric, strength=ridge.path.strength, basis=basis)
        maps |= {f"reduced rank {rank}, {metric}": reduced.at(rank) for rank in ranks}
    rows, along = [], {}
    for name, found in maps.items():
        scores = map_scores(found, splits.test, splits.fit, directions=directions, against=against)
        rows.append(_row("", name, found, scores, splits))
        along[name] = scores.r2_directions.cpu().numpy()
    for data, other in (controls or {}).items():
        found = ridge_map(other.fit, other.validation, strengths=strengths, penalty=penalty).map
        scores = map_scores(found, other.test, other.fit, directions=directions)
        rows.append(_row(data, found.kind, found, scores, other))
        along[f"{found.kind}, {data}"] = scores.r2_directions.cpu().numpy()
    canonical = canonical_correlations(splits.fit, splits.test)
    return PairReport(
        pd.DataFrame(rows),
        pd.DataFrame(along if directions is not None else {}),
        canonical,
        ridge.path,
        effective_rank(ridge.map.weight.T @ splits.fit.xx @ ridge.map.weight),
        ridge.map,
        _notes(splits, ridge, canonical),
    )


def _baselines(splits: PairSplits) -> list[LinearMap]:
    fit = splits.fit
    found = [mean_map(fit)]
    if fit.d_in == fit.d_out:
        found += [identity_map(fit.d_in), shift_map(fit), scale_map(fit)]
    if fit.d_in <= fit.d_out:
        found.append(procrustes_map(fit))
    return [*found, least_squares_map(fit)]


def _row(data: str, name: str, found: LinearMap, scores: MapScores, splits: PairSplits) -> dict[str, object]:
    return {
        "data": data,
        "map": name,
        "rank": found.rank,
        "strength": found.strength,
        "r2_vw": scores.r2_vw,
        "r2_ua": scores.r2_ua,
        "r2_wh": scores.r2_wh,
        "r2_increment": scores.r2_increment,
        "whitened_rank": scores.whitened_rank,
        "count": splits.fit.count,
        "test_count": scores.count,
        "tokens_per_channel": splits.fit.count / splits.fit.d_in,
    }


def _notes(splits: PairSplits, ridge: RidgeFit, canonical: CanonicalCorrelations) -> tuple[str, ...]:
    notes = []
    per_channel = splits.fit.count / splits.fit.d_in
    if per_channel < TOKENS_PER_CHANNEL:
        notes.append(
            f"{per_channel:.1f} tokens per channel: below {TOKENS_PER_CHANNEL}, scores and ceilings in sample are "
            "mostly noise. Read the held-out ones, or give more text."
        )
    if ridge.path.edge:
        notes.append(f"the {ridge.path.edge} strength of the grid was taken: give strengths beyond it.")
    for name, rank, width in (
        ("source", canonical.rank_x, canonical.width_x),
        ("target", canonical.rank_y, canonical.width_y),
    ):
        if rank < width:
            notes.append(f"whitening kept {rank} of {width} directions of the {name} (floor 1e-10 of the largest).")
    notes.append(
        f"ceilings in sample are biased upwards by about {canonical.null_mean:.3f} (independent sites would show that)."
    )
    return tuple(notes)

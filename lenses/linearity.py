"""How linear the step from one depth to the next is: the published score, and what is left of it held out.

    published             1 - |Y - X A|^2 / |Y|^2,  Y, X centred (each at unit norm), A least squares, on the same rows
    published_increment   the same with Y - X in place of Y
    r2_vw, r2_increment   of the ridge map (strength from the validation shard), on the test shard
    procrustes            R2 on the test shard of the best rotation with one scale, which the paper is named for

"Your transformer is secretly linear" (Razzhigaev et al. 2024, arXiv 2405.12250) reports the first, 0.99 for streams,
under the name of Procrustes. It is the R2 of an unconstrained map on the rows it was fitted to, so it rises with
channels per row; a few sink tokens of huge norm carry it alone; and y = x + what a block adds is near x whatever the
block does. Hence the increment, the test shard and the strata: "rest" is without sinks and BOS, "all" is with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm

from microtome.lenses.depths import depth_of, next_pairs
from microtome.lenses.linear_map import identity_map
from microtome.lenses.map_scores import increment_total, map_scores, reference
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.pair_splits import SHARDS, MomentSource, PairSplits, pair_splits, pairs_held
from microtome.lenses.ridge_map import ridge_map
from microtome.lenses.short_repr import short_repr
from microtome.lenses.simple_maps import procrustes_map
from microtome.lenses.source_basis import SourceBasis, source_basis


@dataclass(frozen=True, eq=False)
class Linearity:
    """Linearity by layer.

    Attributes:
        table: one row per pair and stratum: source, target, depth (of the source), stratum, published,
            published_increment, r2_vw, r2_increment, procrustes, procrustes_increment, identity, increment_share
            (tr S_DD / tr S_yy on the test shard), anisotropy (share of the largest axis in the source's variance),
            strength, edge, count, tokens_per_channel.
    """

    table: pd.DataFrame

    __repr__ = short_repr

    def to_frame(self) -> pd.DataFrame:
        """One row per pair and stratum."""
        return self.table

    def by_stratum(self, value: str = "r2_increment") -> pd.DataFrame:
        """One row per pair, one column per stratum, of one column of the table.

        Raises:
            KeyError: there is no such column.
        """
        if value not in self.table.columns:
            raise KeyError(f"the table has no column {value!r}; it has {list(self.table.columns)}.")
        return self.table.pivot_table(index=["depth", "source", "target"], columns="stratum", values=value)


def linearity(
    moments: MomentSource,
    pairs: Sequence[tuple[Any, Any]] | None = None,
    *,
    strata: Sequence[str] = ("rest", "all"),
    shards: Sequence[Any] = SHARDS,
    strengths: Sequence[int | float] | None = None,
    progress: bool = False,
) -> Linearity:
    """Score the step between depths of one width.

    Args:
        moments: of the sites.
        pairs: of source and target; every residual depth with the next, where held, if None.
        strata: which tokens, each a row: "rest", "all", "sinks".
        shards: fit, validation and test, as of `ridge_pairs`.
        strengths: ρ of the ridge map.
        progress: show a bar.

    Raises:
        ValueError: no pairs, sites of unlike width, or a shard without rows.
    """
    pairs = pairs_held(moments, next_pairs(moments.sites)) if pairs is None else list(pairs)
    if not pairs:
        raise ValueError("there are no pairs. Give at least one (source, target).")
    work = [(source, target, stratum) for source, target in pairs for stratum in strata]
    rows = []
    for source, target, stratum in tqdm(work, desc="linearity", unit="pair", disable=not progress):
        splits = pair_splits(moments, source, target, stratum, shards=shards)
        name = {"source": str(source), "target": str(target), "depth": depth_of(source), "stratum": stratum}
        rows.append(name | _row(splits, strengths))
    return Linearity(pd.DataFrame(rows))


def published_score(fit: PairMoments, basis: SourceBasis | None = None) -> float:
    """1 - |Y - X A|^2 of centred rows at unit norm, A by pseudo-inverse on the same rows: in-sample R2. Pass
    `fit.increment()` for the score without the residual part.

    basis: of this source, where it is there already. NaN where Y does not vary.
    """
    basis = source_basis(fit) if basis is None else basis
    total = float(fit.yy.trace())
    explained = basis.damping_of(0.0) @ basis.rotated(fit.xy).square().sum(1)
    return float(explained) / total if total > 0 else torch.nan


def _row(splits: PairSplits, strengths: Sequence[int | float] | None) -> dict[str, object]:
    fit, test = splits.fit, splits.test
    if fit.d_in != fit.d_out:
        raise ValueError(f"linearity of a step needs one width, got {fit.d_in} and {fit.d_out} channels.")
    basis, against = source_basis(fit), reference(test, fit.mean_y)
    ridge = ridge_map(fit, splits.validation, strengths=strengths, basis=basis)
    maps = {"": ridge.map, "procrustes": procrustes_map(fit), "identity": identity_map(fit.d_in)}
    scores = {name: map_scores(found, test, fit, against=against) for name, found in maps.items()}
    return {
        "published": published_score(fit, basis),
        "published_increment": published_score(fit.increment(), basis),
        "r2_vw": scores[""].r2_vw,
        "r2_increment": scores[""].r2_increment,
        "procrustes": scores["procrustes"].r2_vw,
        "procrustes_increment": scores["procrustes"].r2_increment,
        "identity": scores["identity"].r2_vw,
        "increment_share": increment_total(test, fit) / max(float(against.total.trace()), 1e-300),
        "anisotropy": float(basis.variances.max() / basis.variances.sum().clamp_min(1e-300)),
        "strength": ridge.path.strength,
        "edge": ridge.path.edge,
        "count": fit.count,
        "tokens_per_channel": fit.count / fit.d_in,
    }

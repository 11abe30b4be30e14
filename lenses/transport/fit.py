"""Fit a transport operator from moments: ridge, its strength chosen on the validation shard, then the best of a rank.

    full rank     W = (S_xx + λ)^-1 S_xy                           `ridge_map`
    rank k        the best in the whitened or the raw metric       `reduced_rank`: never the truncated singular values

The strength is that of the full map, so that a rank of the source's full rank gives that map back.
"""

import warnings
from collections.abc import Sequence
from typing import Any

from microtome.capture.sites import Site
from microtome.lenses.pair_splits import SHARDS, MomentSource, PairSplits, pair_splits
from microtome.lenses.reduced_rank import METRICS, reduced_rank
from microtome.lenses.ridge_map import ridge_map
from microtome.lenses.source_basis import source_basis
from microtome.lenses.transport.operator import TransportOperator
from microtome.lenses.transport.routes import Route


def transport_operator(
    moments: MomentSource,
    source: Any,
    target: Any,
    *,
    rank: int | None = None,
    metric: str = "whitened",
    strengths: Sequence[int | float] | None = None,
    penalty: str = "isotropic",
    stratum: str = "rest",
    shards: Sequence[Any] = SHARDS,
    shuffled: bool = False,
) -> TransportOperator:
    """The operator from `source` to `target`, same token.

    Args:
        moments: `moments_of(...)`, or anything that gives moments of pairs.
        rank: the full map if None; 0 is the mean.
        metric: in which the rank is best: "whitened" (every direction of the target counts the same) or "raw"
            (directions count by their variance, as in R2_vw).
        strengths, penalty: as of `ridge_map`.
        stratum: tokens it is fitted on: "rest" (neither sinks nor BOS), "sinks" or "all".
        shards: fit, validation (or None) and test, as of `pair_splits`.
        shuffled: fit on x with y of another document, for the control; the moments need the shuffled pairing.

    Raises:
        KeyError: sites that the moments do not hold.
        ValueError: a rank above that of the source's directions with variance, another metric, too few rows.

    Warns:
        UserWarning: fewer rows than source channels: the map fits them without an error, and says nothing of others.
    """
    splits = pair_splits(moments, source, target, stratum, shards=shards, shuffled=shuffled)
    facts = _facts(moments) | {"shards": [str(name) for name in shards], "shuffled": shuffled}
    names = str(Site.parse(source)), str(Site.parse(target))
    return operator_of_splits(
        splits,
        *names,
        rank=rank,
        metric=metric,
        strengths=strengths,
        penalty=penalty,
        stratum=stratum,
        facts=facts,
    )


def operator_of_splits(
    splits: PairSplits,
    source: str,
    target: str,
    *,
    route: Route | str = "same",
    rank: int | None = None,
    metric: str = "whitened",
    strengths: Sequence[int | float] | None = None,
    penalty: str = "isotropic",
    stratum: str = "rest",
    facts: dict[str, object] | None = None,
) -> TransportOperator:
    """The same from the moments of one pair, of any route."""
    if metric not in METRICS:
        raise ValueError(f"metric is {metric!r}; there are {METRICS}.")
    fit = splits.fit
    if fit.count <= fit.d_in:
        warnings.warn(
            f"{source} to {target}: {fit.count} rows for {fit.d_in} channels. The map fits them without an error and "
            "says nothing of others; give at least 20 rows per channel.",
            stacklevel=3,
        )
    basis = source_basis(fit, penalty)
    found = ridge_map(fit, splits.validation, strengths=strengths, penalty=penalty, basis=basis)
    said = {
        "count": fit.count,
        "alpha": found.path.penalty,
        "penalty": penalty,
        "selected_by": found.path.selected_by,
        "edge": found.path.edge,
        "kept_rank": found.path.kept_rank,
    }
    said |= facts or {}
    if rank is None:
        whole = found.map
        return TransportOperator(
            whole.weight,
            None,
            whole.intercept,
            source,
            target,
            Route.parse(route),
            whole.kind,
            found.path.strength,
            None,
            stratum,
            said,
        )
    reduced = reduced_rank(fit, metric=metric, strength=found.path.strength, penalty=penalty, basis=basis)
    if not 0 <= rank <= reduced.full_rank:
        raise ValueError(
            f"rank {rank} for {source} to {target}: {reduced.full_rank} directions have variance ({fit.count} rows, "
            f"{fit.d_in} channels), so there are ranks 0 to {reduced.full_rank}."
        )
    left, right = reduced.left[:, :rank].contiguous(), reduced.right[:rank].contiguous()
    intercept = reduced.mean_y - (reduced.mean_x @ left) @ right
    kind = f"reduced rank, {metric}"
    return TransportOperator(
        left, right, intercept, source, target, Route.parse(route), kind, found.path.strength, rank, stratum, said
    )


def _facts(moments: MomentSource) -> dict[str, object]:
    """The model behind these moments: name and hash of its weights, where they say so."""
    loaded = getattr(moments, "provenance", {}).get("loaded") or {}
    named = {"model": loaded.get("name"), "weight_sha256": loaded.get("weight_sha256")}
    return {key: value for key, value in named.items() if value}

"""Transport in feature space: R2 along any directions of the target, with intervals over documents, and a verdict each.

    a = y.u,   a_hat = y_hat.u,   R2 = 1 - sum (a - a_hat)^2 / sum (a - m)^2

m is the mean of y in the fit shard where it is known (what `map_scores` calls R2), else that of the scored rows. Beside
the operator, from the same rows: x as it is, x rescaled, and the null. `feature_verdict` has the rule.

A null at scoring time (x of another document) is left out: the R2 of independent x and y is -(var a_hat + bias^2) over
var a, below 0 whatever the operator, so it bounds nothing. What an operator fitted on shuffled pairs explains does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from microtome.lenses.documents import document_draws
from microtome.lenses.short_repr import short_repr
from microtome.lenses.transport.document_sums import r2_interval, total_squares
from microtome.lenses.transport.feature_sums import FeatureSums, Place
from microtome.lenses.transport.feature_verdict import (
    AS_IT_IS,
    CARRIED,
    MADE_HERE,
    RESCALED,
    ROTATED,
    UNDECIDED,
    feature_verdicts,
    null_bar,
    ways_carried,
)
from microtome.lenses.transport.operator import TransportOperator

_KEY = ["operator", "source", "target", "route", "kind", "rank"]


@dataclass(frozen=True, eq=False)
class FeatureTransport:
    """Scores of operators along directions.

    Attributes:
        table: one row per operator and direction: operator (its number), source, target, route, kind, rank, direction
            (its number), name, r2, r2_low, r2_high, identity_r2 and rescaled_r2 (NaN where widths differ), null_r2,
            null_bar, verdict, way, within_null, variance (of y along u of unit length), tokens, documents. With an
            encoder also what `ActiveSums.table` says.
        null_quantiles: by operator, the upper quantile of the null's R2 over directions; NaN without a null.
        facts: mean ("fit" or "scored" by target), draws, seed, threshold, stratum, null_quantile.
    """

    table: pd.DataFrame
    null_quantiles: tuple[float, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    __repr__ = short_repr

    def to_frame(self) -> pd.DataFrame:
        """One row per operator and direction."""
        return self.table

    def summary(self) -> pd.DataFrame:
        """One row per operator: directions, the median of r2, how many carried (as it is, rescaled, rotated), made
        here, undecided, within_null; the null's upper quantile."""
        rows = []
        for number, part in self.table.groupby("operator", sort=False):
            quantile = self.null_quantiles[int(number)]
            has_null = not np.isnan(quantile)
            said, way = part["verdict"].value_counts(), part["way"].value_counts()
            rows.append(
                {name: part[name].iloc[0] for name in _KEY}
                | {"directions": len(part), "median_r2": part["r2"].median()}
                | {word.replace(" ", "_"): int(said.get(word, 0)) for word in (CARRIED, MADE_HERE, UNDECIDED)}
                | {word.replace(" ", "_"): int(way.get(word, 0)) for word in (AS_IT_IS, RESCALED, ROTATED)}
                | {"within_null": int(part["within_null"].sum()) if has_null else np.nan, "null_quantile": quantile}
            )
        return pd.DataFrame(rows)


def feature_scores(
    sums: FeatureSums,
    names: Mapping[str, Sequence[str]],
    *,
    draws: int = 1000,
    seed: int = 0,
    threshold: float = 0.5,
    null_quantile: float = 0.975,
    facts: Mapping[str, Any] | None = None,
) -> FeatureTransport:
    """Scores, intervals and verdicts of what a pass has summed. Arguments as of `feature_transport`.

    Raises:
        ValueError: shares out of range, no draws, or an operator for which no token counts.
    """
    require_settings(draws, threshold, null_quantile)
    found = [
        _scored(sums, number, names, draws, seed, threshold, null_quantile) for number in range(len(sums.operators))
    ]
    said = {
        "mean": {operator.target: "fit" if operator.target in sums.means else "scored" for operator in sums.operators},
        **{"draws": draws, "seed": seed, "threshold": threshold, "null_quantile": null_quantile},
    }
    table = pd.concat([table for table, _ in found], ignore_index=True)
    return FeatureTransport(table, tuple(top for _, top in found), said | dict(facts or {}))


def require_settings(draws: int, threshold: float, null_quantile: float) -> None:
    """Raise ValueError for shares out of range, or no draws."""
    if not 0 < threshold < 1 or not 0 < null_quantile < 1 or draws < 1:
        raise ValueError(
            f"threshold={threshold} and null_quantile={null_quantile} are to lie between 0 and 1, draws={draws} to "
            "be 1 or more."
        )


def _scored(
    sums: FeatureSums,
    number: int,
    names: Mapping[str, Sequence[str]],
    draws: int,
    seed: int,
    threshold: float,
    null_quantile: float,
) -> tuple[pd.DataFrame, float]:
    operator, held = sums.operators[number], sums.by_document
    target, route = place = operator.target, operator.route
    if ("count", *place) not in held:
        raise ValueError(
            f"no token of these texts counts for {operator.source} to {target}, route {route}. Give longer texts or "
            "another stratum."
        )
    count = held["count", *place]
    some = count[:, 0] > 0
    is_known, count = target in sums.means, count[some]
    parts = [held[name, *place][some] for name in ("sum", "square")]
    total = total_squares(count.sum(0), *(part.sum(0) for part in parts), is_known)
    varies = total > _noise(sums, place)
    weights = torch.from_numpy(document_draws(len(count), draws, seed))

    def r2(key: tuple[Any, ...]) -> np.ndarray:
        if key not in held:
            return np.full(len(total), np.nan)
        return torch.where(varies, 1 - held[key].sum(0) / total, torch.nan).numpy()

    errors = held["operator", number][some]
    low, high = (
        torch.where(varies, end, torch.nan).numpy() for end in r2_interval(weights, errors, count, *parts, is_known)
    )
    own, null = r2(("operator", number)), r2(("null", number))
    identity = r2(("identity", operator.source, *place))
    rescaled = torch.where(varies, _squared_correlation(sums, operator), torch.nan).numpy()
    top, bar = null_bar(null, null_quantile)
    verdict = feature_verdicts(low, high, bar, threshold)
    rows = float(count.sum())
    table = pd.DataFrame(
        {
            "operator": number,
            "source": operator.source,
            "target": target,
            "route": str(route),
            "kind": operator.kind,
            "rank": operator.rank if operator.rank is not None else min(operator.d_in, operator.d_out),
            "direction": np.arange(len(own)),
            "name": list(names[target]),
            "r2": own,
            "r2_low": low,
            "r2_high": high,
            "identity_r2": identity,
            "rescaled_r2": rescaled,
            "null_r2": null,
            "null_bar": bar,
            "verdict": verdict,
            "way": ways_carried(verdict, own, identity, rescaled),
            "within_null": ~(low > np.maximum(np.nan_to_num(bar, nan=0.0), 0.0)),
            "variance": (total / rows).numpy(),
            "tokens": int(rows),
            "documents": len(count),
        }
    )
    if number in sums.active:
        table = pd.concat([table, sums.active[number].table()], axis=1)
    return table, top


def _noise(sums: FeatureSums, place: Place) -> Tensor:
    """Sums of squares along each direction that rounding of the values may amount to: 4 eps of each."""
    channels = sums.squares[place]
    return 16 * sums.eps**2 * (sums.directions[place[0]].to("cpu", torch.float64).square() @ channels)


def _squared_correlation(sums: FeatureSums, operator: TransportOperator) -> Tensor:
    """Of x.u with y.u over the scored rows: R2 of the best s x.u + c."""
    place = operator.target, operator.route
    held = sums.by_document
    key = (operator.source, *place)
    if key not in sums.copies:
        return torch.full((len(sums.directions[operator.target]),), torch.nan, dtype=torch.float64)
    n, a, aa = (held[name, *place].sum(0) for name in ("count", "sum", "square"))
    b, bb, ab = sums.copies[key]
    shared, spread = ab - a * b / n, (aa - a.square() / n) * (bb - b.square() / n)
    return torch.where(spread > 0, shared.square() / spread, 0.0)

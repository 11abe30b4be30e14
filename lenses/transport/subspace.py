"""How many directions are carried: the size of the linear transport subspace, each measure beside its null.

    above_edge       held-out canonical correlations above the largest that independent rows would show in the fit shard
    above_null       held-out canonical correlations above the largest held-out one of 95 % of the null draws: the
                     ceil(0.95 (n + 1))-th of n draws, which one more null draw passes in 5 % (of all, in 1/(n + 1))
    rank_90, _95, _99  fewest directions with this share of the held-out sum of r^2
    effective_rank   (sum g)^2 / sum g^2 of the variances g of the fitted values, raw metric
    participation    (sum r)^2 / sum r^2 in the fit shard, the published measure (arXiv 2508.17540, released code)

The null: the same measures of pairs that share nothing. Each null moments given (x with y of another document, whose
rows follow one another as the real ones do) is a draw. Further draws are simulated: independent sites give correlations
of the Jacobi ensemble at n rows, or at the fewer rows that would explain the mean r^2 of the null moments (neighbouring
tokens are not independent). Only the first two measures are 0 for noise: participation is
about 0.72 d (a quarter circle of correlations), and shares of nothing take many directions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from microtome.lenses.canonical import CanonicalCorrelations, canonical_correlations, noise_edge
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.pair_splits import PairSplits
from microtome.lenses.participation import directions_reaching, effective_rank, participation_ratio
from microtome.lenses.reduced_rank import target_metric
from microtome.lenses.ridge_map import least_squares_map
from microtome.lenses.short_repr import short_repr
from microtome.lenses.transport.efficiency import require_rows, require_variance

SHARES = (0.90, 0.95, 0.99)
Sizes = tuple[Tensor, Tensor, float]  # in-sample and held-out correlations, effective rank
MEASURES = ("above_edge", "above_null", "rank_90", "rank_95", "rank_99", "effective_rank", "participation")


@dataclass(frozen=True, eq=False)
class TransportSubspace:
    """Sizes of one pair.

    Attributes:
        table: one row per measure: measure, value, null_mean, null_low, null_high (95 % of the draws), draws.
        canonical: the correlations.
        edge: what above_edge counts from; null_edge: what above_null counts from.
        given_draws, simulated_draws: of the null.
    """

    table: pd.DataFrame
    canonical: CanonicalCorrelations
    edge: float
    null_edge: float
    given_draws: int
    simulated_draws: int

    __repr__ = short_repr

    def to_frame(self) -> pd.DataFrame:
        """One row per measure."""
        return self.table

    def __getitem__(self, measure: str) -> float:
        """The value of a measure."""
        return float(self.table.set_index("measure").loc[measure, "value"])


def transport_subspace(
    splits: PairSplits, *, nulls: Sequence[PairSplits] = (), draws: int = 20, seed: int = 0
) -> TransportSubspace:
    """Size of the subspace that least squares carries from source to target.

    Args:
        splits: of the pair.
        nulls: the same of pairs that share nothing: `pair_splits(..., shuffled=True)`, `shuffled_splits(...)`.
        draws: simulated besides. seed: of them.

    Raises:
        ValueError: fewer rows than channels of both sites together, a site that does not vary, nulls of other widths,
            or no null at all.
    """
    require_rows(splits)
    require_variance(splits)
    if draws < 0 or not (draws or len(nulls)):
        raise ValueError(f"draws={draws} and {len(nulls)} null moments: a size needs a null. Give draws=20.")
    found = canonical_correlations(splits.fit, splits.test)
    given = []
    for other in nulls:
        if other.fit.xy.shape != splits.fit.xy.shape:
            raise ValueError(f"null moments are {tuple(other.fit.xy.shape)}, the pair {tuple(splits.fit.xy.shape)}.")
        require_rows(other)
        require_variance(other)
        given.append((canonical_correlations(other.fit, other.test), other.fit))
    generator = torch.Generator().manual_seed(seed)
    rows = [_rows_like(splits.fit, found, [each.in_sample for each, _ in given], "fit")]
    rows.append(_rows_like(splits.test, found, [each.held_out for each, _ in given], "test"))
    roots = target_metric(splits.fit).back.cpu()
    simulated = [_draw(found, roots, *rows, generator) for _ in range(draws)]
    nulled = [(each.in_sample, each.held_out, _effective_rank(fit)) for each, fit in given] + simulated
    edge = noise_edge(found.rank_x, found.rank_y, rows[0])
    null_edge = _upper([float(held.max()) for _, held, _ in nulled], 0.95)
    values = _sizes(found.in_sample, found.held_out, _effective_rank(splits.fit), edge, null_edge)
    others = [_sizes(*each, edge, null_edge) for each in nulled]
    table = [
        {
            "measure": name,
            "value": values[name],
            "null_mean": float(np.mean([each[name] for each in others])),
            "null_low": float(np.quantile([each[name] for each in others], 0.025)),
            "null_high": float(np.quantile([each[name] for each in others], 0.975)),
            "draws": len(others),
        }
        for name in MEASURES
    ]
    return TransportSubspace(pd.DataFrame(table), found, edge, null_edge, len(given), draws)


def _upper(drawn: Sequence[float], level: float) -> float:
    """What one more draw passes with probability 1 - level; an interpolated quantile of few draws would be too low."""
    number = min(math.ceil(level * (len(drawn) + 1)), len(drawn))
    return sorted(drawn)[number - 1]


def _sizes(in_sample: Tensor, held: Tensor, effective: float, edge: float, null_edge: float) -> dict[str, float]:
    ranks = {f"rank_{round(100 * share)}": float(directions_reaching(held, share)) for share in SHARES}
    return {
        "above_edge": float((held > edge).sum()),
        "above_null": float((held > null_edge).sum()),
        **ranks,
        "effective_rank": effective,
        "participation": participation_ratio(in_sample),
    }


def _effective_rank(fit: PairMoments) -> float:
    """Of W^T S_xx W = W^T S_xy of least squares."""
    return effective_rank(least_squares_map(fit).weight.T @ fit.xy)


def _rows_like(part: PairMoments, found: CanonicalCorrelations, nulls: Sequence[Tensor], name: str) -> int:
    """Independent rows that would show the correlations of the null moments; the rows there are without these."""
    if not nulls:
        return part.count
    mean = float(torch.stack([each.square().mean() for each in nulls]).mean())
    larger = max(found.rank_x, found.rank_y) if name == "fit" else 1  # held out, each direction is one correlation
    least = found.rank_x + found.rank_y + 2 if name == "fit" else 2
    return max(least, min(part.count, round(larger / mean))) if mean > 0 else part.count


def _draw(
    found: CanonicalCorrelations,
    roots: Float64[Tensor, "kept d_out"],
    rows: int,
    test_rows: int,
    generator: torch.Generator,
) -> Sizes:
    """In-sample and held-out correlations of independent normal sites in so many rows, and the effective rank of what
    least squares makes of them.

    r^2 are eigenvalues of A (A + B)^-1, A and B Wishart of q and n - 1 - q degrees (Muirhead 1982, section 3.3); B is
    drawn by its triangle (Bartlett 1933), so that no rows are.
    """
    p, q = found.rank_y, found.rank_x
    free = rows - 1 - q
    between = torch.randn(q, p, generator=generator, dtype=torch.float64)
    triangle = torch.randn(p, p, generator=generator, dtype=torch.float64).tril(-1)
    degrees = free - torch.arange(p, dtype=torch.float64)
    triangle += torch._standard_gamma(degrees / 2, generator=generator).mul(2).sqrt().diag()
    whole = torch.linalg.cholesky(between.T @ between + triangle @ triangle.T)
    shared = torch.linalg.solve_triangular(whole, between.T, upper=False)  # [p, q]
    left, values, _ = torch.linalg.svd(shared, full_matrices=False)
    held = torch.randn(len(values), generator=generator, dtype=torch.float64) / max(test_rows - 1, 1) ** 0.5
    spread = roots.T @ (left * values)  # fitted values: S^(1/2) K
    return values.clamp(0, 1), held.clamp(-1, 1), effective_rank(spread.T @ spread)

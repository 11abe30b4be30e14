"""The four R2 of an affine map, from moments of rows it was not fitted on.

    E = sum (y - x W - c)^T (y - x W - c),   S = sum (y - m)^T (y - m);    m is the mean of y in the FIT shard

    variance-weighted  1 - tr E / tr S            what counts is the variance; a few outlier channels can be all of it
    uniform average    1 - mean_j E_jj / S_jj     every channel counts the same (scikit-learn's default for outputs)
    whitened           1 - tr(S^-1 E) / rank      every direction counts the same; comparable with canonical ceilings
    along u            1 - u E u^T / u S u^T      one direction: a dictionary's row, a steering vector, an unembedding
    increment          1 - tr E / tr S_DD         of D = y - x: E is the same, the total is that of what was added

Papers print one of them without saying which. The mean is the reference of all (R2 = 0), and an intercept that does not
fit the test shard is an error like any other. Whitening drops directions of S below 1e-10 of the largest or below the
rounding of float32 products, and the rank that is left is part of the result; channels that are constant in the test
shard are left out of the uniform average.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from microtome.lenses.linear_map import LinearMap
from microtome.lenses.pair_moments import PairMoments, is_measured

WHITENING_FLOOR = 1e-10


@dataclass(frozen=True, eq=False)
class MapScores:
    """R2 of one map on one shard; NaN where the shard has no variance to explain.

    Attributes:
        r2_vw, r2_ua, r2_wh: variance-weighted, uniform average, whitened.
        r2_increment: variance-weighted of y - x; NaN where widths differ.
        r2_directions: along each direction given.
        count: rows of the shard.
        whitened_rank: directions that whitening kept.
        constant_channels: left out of the uniform average.
    """

    r2_vw: float
    r2_ua: float
    r2_wh: float
    r2_increment: float
    count: int
    whitened_rank: int
    constant_channels: int
    r2_directions: Float64[Tensor, " direction"] = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))


@dataclass(frozen=True, eq=False)
class Reference:
    """What the errors of maps into one target are measured against, made once per target and shard.

    Attributes:
        total: S, about the fit mean of y.
        inverse: S^-1 on the directions that whitening keeps, 0 elsewhere.
        rank: their number.
        mean: of y in the fit shard.
    """

    total: Float64[Tensor, "d_out d_out"]
    inverse: Float64[Tensor, "d_out d_out"]
    rank: int
    mean: Float64[Tensor, " d_out"]
    count: int

    @property
    def constant(self) -> Tensor:
        """Channels without variance in this shard."""
        noise = 4 * self.count * (torch.finfo(torch.float64).eps * self.mean) ** 2
        return self.total.diagonal() <= noise


def reference(test: PairMoments, mean_y: Float64[Tensor, " d_out"]) -> Reference:
    """The reference of a target: test moments, about their own means, seen from the fit shard's mean of y.

    Raises:
        ValueError: no rows.
    """
    if not test.count:
        raise ValueError("the test moments have no rows, so there is nothing to score on.")
    shift = test.mean_y - mean_y
    total = test.yy + test.count * torch.outer(shift, shift)
    values, axes = torch.linalg.eigh(total)
    is_kept = is_measured(values, axes, test.noise_y, WHITENING_FLOOR * values[-1].clamp_min(0))
    inverse = (axes[:, is_kept] / values[is_kept]) @ axes[:, is_kept].T
    return Reference(total, inverse, int(is_kept.sum()), mean_y, test.count)


def error_moments(found: LinearMap, test: PairMoments) -> Float64[Tensor, "d_out d_out"]:
    """E = sum of (y - x W - c)^T (y - x W - c) over the rows behind these moments (about their own means).

    Raises:
        ValueError: the map is not between sites of these widths.
    """
    if (found.d_in, found.d_out) != (test.d_in, test.d_out):
        raise ValueError(f"the map is {found.d_in} to {found.d_out}, the moments {test.d_in} to {test.d_out} channels.")
    if test.is_recentred:
        raise ValueError("these moments are about other means than their own. Pass the shard as it came.")
    weight, intercept = found.weight.to(test.xy), found.intercept.to(test.xy)
    cross = weight.T @ test.xy
    missed = test.mean_y - test.mean_x @ weight - intercept
    errors = test.yy - cross - cross.T + weight.T @ test.xx @ weight
    return errors + test.count * torch.outer(missed, missed)


def map_scores(
    found: LinearMap,
    test: PairMoments,
    fit: PairMoments,
    *,
    directions: Float[Tensor, "direction width"] | None = None,
    against: Reference | None = None,
) -> MapScores:
    """Every R2 of a map on a test shard.

    Args:
        found: any affine map, fitted or not.
        test: moments of the shard, about its own means.
        fit: of the shard the map was fitted on; only its means are used, as the reference.
        directions: u, in the target's channels; of any length.
        against: `reference(test, fit.mean_y)`, where it is there already.

    Raises:
        ValueError: other widths, no rows, or a direction of length 0.
    """
    against = reference(test, fit.mean_y) if against is None else against
    errors = error_moments(found, test)
    along = torch.zeros(0, dtype=torch.float64)
    if directions is not None:
        along = _along(directions, errors, against.total)
    return scores_of_traces(
        float(errors.trace()),
        errors.diagonal(),
        float((against.inverse * errors).sum()),
        increment_total(test, fit),
        against,
        along,
    )


def scores_of_traces(
    trace: float,
    diagonal: Float64[Tensor, " d_out"],
    whitened: float,
    increment_total: float,
    against: Reference,
    along: Float64[Tensor, " direction"] | None = None,
) -> MapScores:
    """Scores from tr E, diag E and tr(S^-1 E)."""
    alive = ~against.constant
    total = against.total.diagonal()
    channels = 1 - diagonal[alive] / total[alive]
    return MapScores(
        _ratio(trace, float(total.sum())) if bool(alive.any()) else torch.nan,
        float(channels.mean()) if len(channels) else torch.nan,
        _ratio(whitened, against.rank),
        _ratio(trace, increment_total),
        against.count,
        against.rank,
        int((~alive).sum()),
        torch.zeros(0, dtype=torch.float64) if along is None else along,
    )


def increment_total(test: PairMoments, fit: PairMoments) -> float:
    """tr S_DD of D = y - x in the test shard, about the fit shard's mean of D; NaN where widths differ."""
    if test.d_in != test.d_out:
        return torch.nan
    shift = (test.mean_y - test.mean_x) - (fit.mean_y - fit.mean_x)
    squares = test.yy.trace() - 2 * test.xy.trace() + test.xx.trace()
    return float(squares + test.count * shift.square().sum())


def _along(directions: Tensor, errors: Tensor, total: Tensor) -> Float64[Tensor, " direction"]:
    if directions.shape[1] != len(errors):
        raise ValueError(f"directions have {directions.shape[1]} channels, the target {len(errors)}.")
    directions = directions.to(errors)
    if not bool((directions.square().sum(1) > 0).all()):
        raise ValueError("a direction has length 0. Drop it: nothing lies along it.")
    missed, there = (((directions @ matrix) * directions).sum(1) for matrix in (errors, total))
    return torch.where(there > 0, 1 - missed / there, torch.nan)


def _ratio(error: float, total: int | float) -> float:
    """1 - error / total; NaN where there is nothing to explain."""
    return 1 - error / total if total > 0 else torch.nan

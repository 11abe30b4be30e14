"""How much of a rated quantity can be explained at all: the share of mean ratings' variance that is no noise.

A text's rating y_i is the mean of k_i raters' single ratings with deviation s_i, and knows the text's true mean up to a
standard error SE_i = s_i/√k_i. Even the true means themselves would explain of y no more than

    R²_max = 1 - mean(SE_i²) / var(y)        (reliability, Spearman 1904; var with divisor n - 1).

A second estimate needs no variances: halve each text's raters at random, correlate the halves' means (r), and correct
for their fewer raters by Spearman (1910) and Brown (1910), ρ = c r / (1 + (c - 1) r), c the mean number of raters over
that in a half. Both assume that a text's raters err independently: people who share a bias raise both.

Beware: R² of a probe on held-out rows is to be compared with the ceiling on those same rows. A probe may pass the
ceiling by chance within the interval, not beyond.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float

from microtome.probes.row_keys import row_keys

_DRAWS_AT_ONCE = 250


@dataclass(frozen=True)
class NoiseCeiling:
    """R² that no probe can exceed but by chance, with percentile intervals over groups; split-half NaN if not asked."""

    ceiling: float
    low: float
    high: float
    split_half: float
    split_half_low: float
    split_half_high: float


def noise_ceiling(
    ratings: Float[np.ndarray, "example rater"],
    *,
    groups: np.ndarray | None = None,
    splits: int = 50,
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> NoiseCeiling:
    """Ceiling of the mean rating from a table of single ratings, NaN where a rater did not rate.

    A column need not be the same person in every row. Raises ValueError for rows with fewer than two ratings, infinity,
    fewer than three rows, equal mean ratings, and as `noise_ceiling_of_means`.
    """
    ratings = np.asarray(ratings, dtype=np.float64)
    if ratings.ndim != 2:
        raise ValueError(f"ratings have shape {ratings.shape}; give a table [row, rater].")
    if splits < 0:
        raise ValueError(f"splits={splits}; give 0 for no split-half reliability, or how many.")
    counts = np.isfinite(ratings).sum(axis=1)
    if np.isinf(ratings).any() or (counts < 2).any():
        row = int(np.argmax(np.isinf(ratings).any(axis=1) | (counts < 2)))
        raise ValueError(
            f"ratings[{row}] has {counts[row]} finite ratings of {ratings.shape[1]}; every row needs two or more, and "
            "NaN for no rating. Drop the others."
        )
    means = np.nanmean(ratings, axis=1)
    errors = np.nanstd(ratings, axis=1, ddof=1) / np.sqrt(counts)
    generator = np.random.default_rng(seed)
    halves = [_halves(ratings, counts, generator) for _ in range(splits)]
    factor = counts.mean() / (counts // 2).mean()
    return _with_intervals(
        means, errors, groups, np.array(halves).reshape(splits, 2, len(ratings)), factor, draws, level, generator
    )


def noise_ceiling_of_means(
    means: Float[np.ndarray, " example"],
    standard_errors: Float[np.ndarray, " example"],
    *,
    groups: np.ndarray | None = None,
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> NoiseCeiling:
    """Ceiling from each row's mean rating and its standard error: the raters' deviation over the root of their number.

    groups: rows of a group are resampled together; every row by itself if None. Raises ValueError for values that are
    not finite, a negative error, fewer than three rows, and means that are all equal.
    """
    means, standard_errors = np.asarray(means, dtype=np.float64), np.asarray(standard_errors, dtype=np.float64)
    if means.ndim != 1 or means.shape != standard_errors.shape:
        raise ValueError(f"means have shape {means.shape}, errors {standard_errors.shape}; give one of each per row.")
    if not (np.isfinite(means).all() and np.isfinite(standard_errors).all() and (standard_errors >= 0).all()):
        raise ValueError("means and standard_errors must be finite, and errors 0 or more. Drop rows without ratings.")
    no_halves = np.empty((0, 2, len(means)))
    generator = np.random.default_rng(seed)
    return _with_intervals(means, standard_errors, groups, no_halves, 2.0, draws, level, generator)


def _halves(ratings: np.ndarray, counts: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Mean rating of two random halves of each row's raters `[2, row]`; an odd one is left out."""
    place = generator.random(ratings.shape)
    place[np.isnan(ratings)] = np.inf
    order = place.argsort(axis=1).argsort(axis=1)
    half = (counts // 2)[:, None]
    filled = np.nan_to_num(ratings)
    first, second = order < half, (order >= half) & (order < 2 * half)
    return np.stack([(filled * part).sum(axis=1) / half[:, 0] for part in (first, second)])


def _with_intervals(
    means: np.ndarray,
    errors: np.ndarray,
    groups: np.ndarray | None,
    halves: np.ndarray,
    factor: float,
    draws: int,
    level: float,
    generator: np.random.Generator,
) -> NoiseCeiling:
    n = len(means)
    if n < 3 or np.ptp(means) == 0:
        raise ValueError(f"{n} rows with ratings from {means.min()} to {means.max()}; a ceiling needs 3 that differ.")
    if not 0 < level < 1:
        raise ValueError(f"level={level}; give a share between 0 and 1, such as 0.95.")
    if draws < 1:
        raise ValueError(f"draws={draws}; an interval needs draws, 2000 say.")
    codes = np.arange(n) if groups is None else pd.factorize(row_keys(groups, n, "groups"), sort=True)[0]
    if codes.min() < 0:
        raise ValueError(f"groups has no key for row {int((codes < 0).argmax())}. Fill it in, or drop the row.")
    n_groups = int(codes.max()) + 1
    # about their mean, so that sums of squares lose no digits
    y, (a, b) = means - means.mean(), (halves - means.mean()).transpose(1, 0, 2)
    columns = np.concatenate([[np.ones(n), y, y**2, errors**2], a, b, a**2, b**2, a * b])
    sums = np.zeros((n_groups, len(columns)))
    np.add.at(sums, codes, columns.T)
    whole = _estimates(sums.sum(axis=0, keepdims=True), len(halves), factor)[:, 0]
    resampled = []
    for first in range(0, draws, _DRAWS_AT_ONCE):
        size = min(_DRAWS_AT_ONCE, draws - first)
        counts = generator.multinomial(n_groups, np.full(n_groups, 1 / n_groups), size=size)
        resampled.append(_estimates(counts @ sums, len(halves), factor))
    tail = (1 - level) / 2
    # draws of equal ratings have no variance to share; where halves were not asked for, every draw's is NaN
    drawn = np.concatenate(resampled, axis=1)
    limits = [np.quantile(kept if len(kept := row[np.isfinite(row)]) else [np.nan], [tail, 1 - tail]) for row in drawn]
    low, high = np.transpose(limits)
    return NoiseCeiling(*(float(v) for pair in zip(whole, low, high, strict=True) for v in pair))


def _estimates(sums: np.ndarray, splits: int, factor: float) -> np.ndarray:
    """Ceiling and split-half reliability `[2, draw]` from sums over rows."""
    n, total, squares, noise = sums.T[:4]
    variance = (squares - total**2 / n) / (n - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ceiling = 1 - noise / n / variance
    if splits == 0:
        return np.stack([ceiling, np.full_like(ceiling, np.nan)])
    a, b, aa, bb, ab = (part / n for part in np.split(sums.T[4:], 5))
    with np.errstate(divide="ignore", invalid="ignore"):
        r = ((ab - a * b) / np.sqrt((aa - a**2) * (bb - b**2))).mean(axis=0)
        return np.stack([ceiling, factor * r / (1 + (factor - 1) * r)])

"""Is a feature at the target carried there, or made on the way? One rule, from R2 with its interval and a null.

R2 is the share of a direction's held-out variance that is an affine image of the source. With b = max(upper quantile of
the null's R2 over all directions, the null's R2 of this one), the null being the operator fitted on sources of other
documents (at the same positions, so that what position alone says counts as null):

    carried     low > threshold and low > b        most of it, surely, and more than the null explains
    made here   high < threshold                   surely most of it is no affine image of the source
    undecided   the interval holds the threshold, or b; or the direction does not vary

and of those that are carried, how:

    as it is    R2 of x.u as it is within 0.05 of the operator's       (or above it)
    rescaled    R2 of s x.u + c within 0.05                            the same direction, other size or mean
    rotated     neither: it lay along other directions

`within_null`: low <= max(b, 0), nothing of it is shown to be carried. "Made here" says most is new, not that all is.
Beware: what is no affine image may still be computed from the source, by what is not linear; and an operator fitted on
too few rows explains less than one could, which reads as "made here". Look at r2 on the fit shard as well.
"""

import numpy as np

CLOSE = 0.05
CARRIED, MADE_HERE, UNDECIDED = "carried", "made here", "undecided"
AS_IT_IS, RESCALED, ROTATED = "as it is", "rescaled", "rotated"


def feature_verdicts(low: np.ndarray, high: np.ndarray, bar: np.ndarray, threshold: float) -> np.ndarray:
    """One word per direction. bar: b, NaN without a null; NaN ends (no variance, one document) are undecided."""
    bar = np.nan_to_num(bar, nan=-np.inf)
    with np.errstate(invalid="ignore"):
        is_carried = (low > threshold) & (low > bar)
        is_made = high < threshold
    return np.select([is_carried, is_made], [CARRIED, MADE_HERE], UNDECIDED)


def ways_carried(verdict: np.ndarray, r2: np.ndarray, identity: np.ndarray, rescaled: np.ndarray) -> np.ndarray:
    """ "as it is", "rescaled" or "rotated" where a direction is carried, "" elsewhere; sites of other widths can only
    rotate."""
    with np.errstate(invalid="ignore"):
        same, scaled = identity >= r2 - CLOSE, rescaled >= r2 - CLOSE
    way = np.select([same, scaled], [AS_IT_IS, RESCALED], ROTATED)
    return np.where(verdict == CARRIED, way, "")


def null_bar(null: np.ndarray, quantile: float) -> tuple[float, np.ndarray]:
    """The null's upper quantile over directions, and b of each; NaN where there is no null or no variance."""
    if np.isnan(null).all():
        return float("nan"), null
    top = float(np.nanquantile(null, quantile))
    return top, np.maximum(null, top)

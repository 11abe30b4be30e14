"""The interval of a share."""

from math import nan, sqrt


def wilson_interval(hits: int, count: int, *, z: int | float = 1.959964) -> tuple[float, float]:
    """The 95 % interval of a share of hits, within 0 and 1 (Wilson 1927); NaN for no counts."""
    if count == 0:
        return nan, nan
    share, spread = hits / count, z * z / count
    middle = (share + spread / 2) / (1 + spread)
    half = z * sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)

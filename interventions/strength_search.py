"""The largest strength that a side effect allows: doubling until it is exceeded, then bisection; all tries are kept.

The side effect is taken to grow with strength; where it does not, the first strength that exceeds the limit counts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd


@dataclass(frozen=True, eq=False)
class StrengthSearch:
    """What was tried, and what was found.

    Attributes:
        table: strength, side_effect and whatever the measure returned, in order of strength.
        strength: the largest one tried within the limit; 0 if none is.
        limit: of the side effect.
        is_reached: whether some strength exceeded the limit; otherwise a stronger push is allowed than was tried.
    """

    table: pd.DataFrame
    strength: float
    limit: float
    is_reached: bool


def search_strength(
    measure: Callable[[float], float | dict[str, float]],
    limit: float,
    *,
    start: float = 1.0,
    largest: float = 64.0,
    tolerance: float = 0.05,
    most: int = 24,
) -> StrengthSearch:
    """Bracket by doubling (or halving), then bisect until the side effect is within `tolerance` of the limit.

    Args:
        measure: the side effect at a strength, or several numbers with it under "side_effect".
        limit: of the side effect, above 0.
        start: first strength; a negative one searches that way.
        largest: absolute strength that is not exceeded.
        tolerance: relative to the limit.
        most: calls of measure at most.

    Raises:
        ValueError: a limit that is not above 0, a start of 0 or beyond `largest`.
    """
    if not limit > 0 or start == 0 or not abs(start) <= largest or not 0 < tolerance < 1 or most < 2:
        raise ValueError(
            f"limit={limit}, start={start}, largest={largest}, tolerance={tolerance}, most={most}: give a limit above "
            "0, a start that is not 0 and not beyond largest, a tolerance between 0 and 1, at least two calls."
        )
    tried: dict[float, dict[str, float]] = {}

    def effect(strength: float) -> float:
        if strength not in tried:
            found = measure(strength)
            row = found if isinstance(found, dict) else {"side_effect": float(found)}
            tried[strength] = {"strength": strength, **row}
        value = tried[strength]["side_effect"]
        return float("inf") if value != value else value  # NaN: the model broke

    sign = 1.0 if start > 0 else -1.0
    low, high = 0.0, None
    size = abs(start)
    while len(tried) < most:
        if effect(sign * size) > limit:
            high = size
            if low > 0 or size < abs(start) / 2**10:
                break
            size /= 2
        else:
            low = size
            if high is not None or size >= largest:
                break
            size = min(2 * size, largest)
    while high is not None and len(tried) < most:
        if low > 0 and effect(sign * low) >= (1 - tolerance) * limit:
            break
        if (high - low) <= 1e-3 * high:
            break
        middle = (low + high) / 2
        if effect(sign * middle) > limit:
            high = middle
        else:
            low = middle
    table = pd.DataFrame(sorted(tried.values(), key=lambda row: row["strength"]))
    return StrengthSearch(table, sign * low if low else 0.0, limit, high is not None)

"""How many directions a spectrum amounts to: by participation ratio, and by the share of its squares.

participation ratio   (sum v)^2 / sum v^2          n for n equal values, 1 for a single one
effective rank        tr(M)^2 / tr(M^2)            the same of a symmetric matrix's eigenvalues, without them
"""

from jaxtyping import Float64
from torch import Tensor


def participation_ratio(values: Float64[Tensor, " direction"]) -> float:
    """(sum v)^2 / sum v^2; 0 where all are 0."""
    squares = float(values.square().sum())
    return float(values.sum()) ** 2 / squares if squares > 0 else 0.0


def effective_rank(matrix: Float64[Tensor, "width width"]) -> float:
    """tr(M)^2 / tr(M^2) of a symmetric matrix; 0 where it is 0."""
    squares = float(matrix.square().sum())
    return float(matrix.trace()) ** 2 / squares if squares > 0 else 0.0


def directions_reaching(correlations: Float64[Tensor, " direction"], share: float) -> int:
    """Fewest directions with this share of the sum of r^2, negative r counting nothing; 0 where there is none."""
    sums = correlations.clamp_min(0).square().sort(descending=True).values.cumsum(0)
    if not len(sums) or not float(sums[-1]) > 0:
        return 0
    return int((sums < share * sums[-1] * (1 - 1e-12)).sum()) + 1

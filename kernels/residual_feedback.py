"""Low-rank feedback on a stream: read a few directions, add a few, in one read and one write of the stream.

    x[t] += weight[t] sum_j write_j (setpoint_j - read_j . x[t])

`weight` is strength by row times position mask; 0 changes nothing, to the bit. Definition:
`residual_feedback_reference`. Cost: 4 d rank FLOPs a token, against d elements read and written.
Tolerance against the reference of the same inputs: 1e-5 of the largest |x| in float32, 1e-12 in float64.
"""

import torch
from jaxtyping import Float
from torch import Tensor

MAX_RANK = 32


def residual_feedback(
    x: Float[Tensor, "*row d"],
    read: Float[Tensor, "rank d"],
    write: Float[Tensor, "rank d"],
    setpoint: Float[Tensor, " rank"] | Float[Tensor, "*row rank"],
    weight: Float[Tensor, "*row 1"] | None = None,
    *,
    one_sided: bool = False,
    in_place: bool = False,
) -> Float[Tensor, "*row d"]:
    """x with the feedback added.

    Args:
        x: the stream, or any vectors.
        read: directions that are read; write: what is added per unit of gap.
        setpoint: wanted readings, for all rows or for each.
        weight: by row; None is 1.
        one_sided: only readings below their setpoint are acted on.
        in_place: change x itself.

    Raises:
        ValueError: rank above 32.
    """
    delta = feedback_delta(x, read, write, setpoint, weight, one_sided=one_sided)
    return x.add_(delta) if in_place else x + delta


def feedback_delta(
    x: Float[Tensor, "*row d"],
    read: Float[Tensor, "rank d"],
    write: Float[Tensor, "rank d"],
    setpoint: Float[Tensor, " rank"] | Float[Tensor, "*row rank"],
    weight: Float[Tensor, "*row 1"] | None = None,
    *,
    one_sided: bool = False,
) -> Float[Tensor, "*row d"]:
    """What is added; arguments and errors as `residual_feedback`."""
    if len(read) > MAX_RANK:
        raise ValueError(f"{len(read)} directions: feedback reads at most {MAX_RANK}. Split them into several edits.")
    gap = setpoint - x @ read.T
    gap = gap.clamp_min(0) if one_sided else gap
    if weight is not None:
        gap = gap * weight
    return gap @ write if len(read) > 1 else gap * torch.squeeze(write, 0)

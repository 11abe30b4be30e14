"""Low-rank feedback on a stream, written out: the definition.

delta[t] = weight[t] sum_j write_j (setpoint_j - read_j . x[t]),     with one_sided (.) -> max(0, .)
"""

import torch
from jaxtyping import Float
from torch import Tensor


def feedback_delta(
    x: Float[Tensor, "*row d"],
    read: Float[Tensor, "rank d"],
    write: Float[Tensor, "rank d"],
    setpoint: Float[Tensor, " rank"] | Float[Tensor, "*row rank"],
    weight: Float[Tensor, "*row 1"] | None = None,
    *,
    one_sided: bool = False,
) -> Float[Tensor, "*row d"]:
    """The change, one feature after the other."""
    delta = torch.zeros_like(x)
    for j in range(len(read)):
        gap = setpoint[..., j] - (x * read[j]).sum(-1)
        gap = gap.clamp_min(0) if one_sided else gap
        delta = delta + gap[..., None] * write[j]
    return delta if weight is None else weight * delta

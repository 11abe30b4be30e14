"""What a norm does to one part of its input: `g * (x - mean(x))` or `g * x`, the part of it that is linear.

A norm module is n(x) = g * c(x) / rms(c(x)) + b, with c(x) = x for an RMSNorm and x - mean(x) for a LayerNorm. Of a sum
of parts, each part's share at the whole's scale is g * c(part) / rms(c(whole)). g, b and c are read off the module's own
outputs, so that a gain stored as g - 1 (Gemma) needs no case of its own; a module of another form is refused.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

_LARGE = 1e3  # against the norm's epsilon
_TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class NormGain:
    """The linear part of a norm.

    Attributes:
        gain: g.
        bias: b, zeros where there is none.
        is_centred: whether the mean is subtracted first.
    """

    gain: Float[Tensor, " d_model"]
    bias: Float[Tensor, " d_model"]
    is_centred: bool

    def __call__(self, x: Float[Tensor, "*any d_model"]) -> Float[Tensor, "*any d_model"]:
        """g * c(x), without any division by a scale."""
        return (x - x.mean(-1, keepdim=True) if self.is_centred else x) * self.gain.to(x.dtype)

    def scale(
        self, whole: Float[Tensor, "*any d_model"], normed: Float[Tensor, "*any d_model"]
    ) -> Float[Tensor, "*any 1"]:
        """1 / rms of each row, epsilon included: the number s with normed = s g c(whole) + b."""
        direction = self(whole)
        out = (normed - self.bias.to(normed.dtype)) * direction
        return out.sum(-1, keepdim=True) / direction.square().sum(-1, keepdim=True).clamp_min(1e-30)


@torch.no_grad()
def norm_gain(norm: nn.Module | None, d_model: int, like: Tensor) -> NormGain:
    """The linear part of a norm module; of None, the identity.

    Args:
        norm: takes `[..., d_model]`.
        like: a tensor of the dtype and device on which it works.

    Raises:
        ValueError: the module is no RMSNorm and no LayerNorm, in what it computes.
    """
    ones = torch.ones(d_model, dtype=like.dtype, device=like.device)
    if norm is None:
        return NormGain(ones, torch.zeros_like(ones), False)
    number = torch.arange(d_model, device=like.device)
    spread = torch.stack([torch.cos(1.0 + 2.399963 * number), torch.sin(0.5 + 1.7 * number)]).to(like.dtype) * _LARGE
    middle = spread - spread.mean(-1, keepdim=True)
    up, down = norm.forward(middle), norm.forward(-middle)
    bias = ((up + down) / 2).mean(0)
    is_centred = torch.allclose(norm.forward(middle + _LARGE), up, rtol=_TOLERANCE, atol=_TOLERANCE)
    unit = middle / middle.square().mean(-1, keepdim=True).sqrt()
    odd = (up - down) / 2
    # of two vectors, the one that is further from zero at a coordinate tells its gain
    gain = torch.where(unit[0].abs() > unit[1].abs(), odd[0] / unit[0], odd[1] / unit[1])
    found = NormGain(gain, bias, is_centred)
    check = torch.sin(0.3 + 0.9 * number).to(like.dtype)[None] * _LARGE + 0.3 * _LARGE
    centred = check - check.mean(-1, keepdim=True) if is_centred else check
    expected = found(check) / centred.square().mean(-1, keepdim=True).sqrt() + bias
    if not torch.allclose(norm.forward(check), expected, rtol=0.02, atol=0.02 * float(expected.abs().max())):
        raise ValueError(
            f"{type(norm).__name__} is neither an RMSNorm nor a LayerNorm in what it computes, so one part's share of "
            "its output cannot be told. Read the whole output instead (norm='own')."
        )
    return found

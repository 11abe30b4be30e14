"""What each head of a layer writes into the stream, also where a norm follows attention.

    o_h = z_h W_O[h],      write_h = k o_h,      behind a norm: write_h = k g c(o_h) / rms(c(sum_h o_h + b_O))

with k the factor (or vector) by which attention enters the stream. Whether a norm follows is not asked of a name: the
sum of the heads is compared with attn_out on the very tokens that are read, and what fits neither way is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from microtome.capture.anatomy import Anatomy, coefficient
from microtome.capture.output_weights import output_weights
from microtome.capture.sites import Site
from microtome.lenses.norm_gain import NormGain, norm_gain

_LIMIT = 1e-3


@dataclass(frozen=True, eq=False)
class HeadWrites:
    """The writes of one layer's heads, from z and attn_out.

    Attributes:
        z, out: the sites to read.
        weight: W_O by head.
        bias: b_O, None without one.
        norm: the module whose output is attn_out, tried where the heads' plain sum is not attn_out.
        gain: its linear part, None where it is no norm.
        factor: number or vector by which attn_out enters the stream.
    """

    z: Site
    out: Site
    weight: Float[Tensor, "head d_head d_model"]
    bias: Float[Tensor, " d_model"] | None
    norm: nn.Module | None
    gain: NormGain | None
    factor: float | Tensor

    @property
    def reads(self) -> tuple[Site, Site]:
        """z of all heads, and attn_out."""
        return self.z, self.out

    def __call__(self, values: Mapping[Site, Tensor]) -> Float[Tensor, "token head d_model"]:
        """The writes. Raises ValueError where they cannot be told apart: something else lies between heads and stream."""
        z, out = values[self.z], values[self.out]
        plain = torch.einsum("the,hed->thd", z, self.weight.to(z.dtype))
        whole = plain.sum(1) if self.bias is None else plain.sum(1) + self.bias
        if self._same(whole, out):
            return plain * self.factor
        if self.gain is not None and self._same(self.norm.forward(whole), out):
            scale = self.gain.scale(whole, out)
            return self.gain(plain) * scale[:, None] * self.factor
        raise ValueError(
            f"The heads of {self.z} do not sum to {self.out}, nor does a norm of their sum, so one head's write cannot "
            f"be told. Read {self.out} instead."
        )

    @staticmethod
    def _same(one: Tensor, other: Tensor) -> bool:
        limit = _LIMIT if one.dtype in (torch.float32, torch.float64) else 0.03
        return bool((one - other).abs().max() <= limit * other.abs().max().clamp_min(1e-12))


@torch.no_grad()
def head_writes(model: nn.Module, site: Site, *, anatomy: Anatomy) -> HeadWrites:
    """Of the layer of `site`, a `head_out`. KeyError, IndexError where the model does not offer it."""
    tap = anatomy.tap(site)
    (z, weight) = next(iter(output_weights(model, layers=site.layer, anatomy=anatomy).items()))
    z, out = site.whole.__class__("z", site.layer, stack=site.stack, call=site.call), _write_site(anatomy, site)
    projection = model.get_submodule(tap.through)
    width = getattr(projection, "in_features", weight.shape[0] * weight.shape[1])
    bias = projection.forward(torch.zeros(1, 1, width, dtype=weight.dtype, device=weight.device))[0, 0]
    out_tap = anatomy.tap(out)
    norm = None if out_tap.point.module == tap.through else model.get_submodule(out_tap.point.module)
    gain = None
    if norm is not None and not any(True for _ in norm.children()):  # an attention module is no norm
        try:
            gain = norm_gain(norm, anatomy.d_model, weight[0])
        except (ValueError, TypeError):
            norm = None
    return HeadWrites(
        z,
        out,
        weight,
        bias if bool(bias.any()) else None,
        norm,
        gain,
        coefficient(model, out_tap.factor, out_tap.vectors),
    )


def _write_site(anatomy: Anatomy, site: Site) -> Site:
    """What the layer's mixer adds: attn_out or mixer_out."""
    options = [Site(kind, site.layer, stack=site.stack, call=site.call) for kind in ("attn_out", "mixer_out")]
    return next((option for option in options if option in anatomy.taps), options[0])

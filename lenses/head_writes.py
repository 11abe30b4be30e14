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
from microtome.capture.dissect import dissect
from microtome.capture.models import LoadedModel
from microtome.capture.output_weights import output_weights
from microtome.capture.sites import Site
from microtome.lenses.frozen_norm import FrozenNorm
from microtome.lenses.short_repr import short_repr
from microtome.lenses.stream_terms import last_map

_LIMIT = 1e-3


@dataclass(frozen=True, eq=False)
class HeadWrites:
    """The writes of one layer's heads, from z and attn_out.

    Attributes:
        z, out: the sites to read.
        weight: W_O by head.
        bias: b_O, None without one.
        norm: the norm behind the sum, tried where the heads' plain sum is not attn_out; None where there is none.
        factor: number or vector by which attn_out enters the stream.
    """

    z: Site
    out: Site
    weight: Float[Tensor, "head d_head d_model"]
    bias: Float[Tensor, " d_model"] | None
    norm: FrozenNorm | None
    factor: float | Tensor

    __repr__ = short_repr

    @property
    def reads(self) -> tuple[Site, Site]:
        """z of all heads, and attn_out."""
        return self.z, self.out

    def __call__(self, values: Mapping[Site, Tensor]) -> Float[Tensor, "token head d_model"]:
        """The writes. Raises ValueError where something unknown lies between heads and stream."""
        z, out = values[self.z], values[self.out]
        plain = torch.einsum("the,hed->thd", z, self.weight.to(z.dtype))
        whole = plain.sum(1) if self.bias is None else plain.sum(1) + self.bias
        if self._same(whole, out):
            return plain * self.factor
        if self.norm is not None and self._same(self.norm(whole).to(out), out):
            return self.norm.folded(plain) / self.norm.scale(whole).to(plain)[:, None, None] * self.factor
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
    z = Site("z", site.layer, stack=site.stack, call=site.call)
    weight = output_weights(model, layers=site.layer, anatomy=anatomy)[z]
    out = _write_site(anatomy, site)
    out_tap = anatomy.tap(out)
    try:
        last = last_map(model, tap.through, out_tap.point.module, anatomy.d_model)
    except ValueError:  # no norm is behind it; whether it changes the sum is seen on the tokens
        last = last_map(model, tap.through, tap.through, anatomy.d_model)
    bias = last.bias.to(weight) if bool(last.bias.any()) else None
    return HeadWrites(z, out, weight, bias, last.post_norm, coefficient(model, out_tap.factor, out_tap.vectors))


@torch.no_grad()
def head_maps(
    model: LoadedModel | nn.Module, layer: int, anatomy: Anatomy | None = None
) -> tuple[Float[Tensor, "head d_head d_model"], Float[Tensor, " d_model"]]:
    """W_O of every head of a layer, and b_O (zeros where there is none), before any norm; float32 or wider.

    Raises:
        KeyError, IndexError: a layer whose heads' writes this model does not offer.
    """
    module = model.module if isinstance(model, LoadedModel) else model
    anatomy = dissect(module) if anatomy is None else anatomy
    (weight,) = output_weights(module, layers=layer, anatomy=anatomy).values()
    path = anatomy.tap(anatomy.expand([("head_out", layer)])[0]).through
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return wide, last_map(module, path, path, anatomy.d_model).bias.to(wide)


def _write_site(anatomy: Anatomy, site: Site) -> Site:
    """What the layer's mixer adds: attn_out or mixer_out."""
    options = [Site(kind, site.layer, stack=site.stack, call=site.call) for kind in ("attn_out", "mixer_out")]
    return next((option for option in options if option in anatomy.taps), options[0])

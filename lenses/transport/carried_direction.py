"""A direction of one model carried into another by the linear part of a map between them, beside two nulls.

    carried = carried_direction(found.maps["a/resid_post.3", "b/resid_post.9"], u, native=v)
    carried.cosine, carried.p_map, carried.p_direction

    u' = u W            no intercept: u is a difference of two points, and the intercept takes no part in differences

What a cosine with a natively computed direction v of the target is worth depends on what another map, or another
direction, would give:

    another map        W of independent normal entries: u' points anywhere,    cosines of spread 1 / sqrt(d_out)
    another direction  a random u through this W: cosines are large where W writes mostly along a few axes and v too

(Steering vectors carried between sizes: LRT hypothesis, arXiv 2506.00653.)
"""

from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from microtome.lenses.linear_map import LinearMap
from microtome.lenses.short_repr import short_repr


@dataclass(frozen=True, eq=False)
class CarriedDirection:
    """Of one direction.

    Attributes:
        vector: u W, of the length asked for.
        gain: |u W| / |u| before that.
        cosine: with the native direction; NaN without one.
        of_maps: cosines of u through random maps; empty without a native direction.
        of_directions: of random directions through this map.
    """

    vector: Float64[Tensor, " d_out"]
    gain: float
    cosine: float
    of_maps: Float64[Tensor, " draw"]
    of_directions: Float64[Tensor, " draw"]

    __repr__ = short_repr

    @property
    def p_map(self) -> float:
        """Share of random maps that come as close (in |cosine|), the one at hand counted in."""
        return _share(self.cosine, self.of_maps)

    @property
    def p_direction(self) -> float:
        """Share of random directions through this map that come as close, the one at hand counted in."""
        return _share(self.cosine, self.of_directions)

    def to_frame(self) -> pd.DataFrame:
        """One row: gain, cosine, and of both nulls the mean |cosine|, its 95th percentile and p."""
        row = {"gain": self.gain, "cosine": self.cosine}
        for name, draws, p in (("map", self.of_maps, self.p_map), ("direction", self.of_directions, self.p_direction)):
            sizes = draws.abs()
            row[f"{name}_mean"] = float(sizes.mean()) if len(sizes) else torch.nan
            row[f"{name}_95"] = float(sizes.quantile(0.95)) if len(sizes) else torch.nan
            row[f"p_{name}"] = p
        return pd.DataFrame([row])


def carried_direction(
    found: LinearMap,
    direction: Float[Tensor, " d_in"],
    *,
    native: Float[Tensor, " d_out"] | None = None,
    norm: float | int | None = None,
    draws: int = 1000,
    seed: int = 0,
) -> CarriedDirection:
    """u W, rescaled.

    Args:
        found: from the site that u belongs to.
        direction: u, in units of the source: a steering vector, a difference of means, a probe's direction.
        native: the same thing computed in the target model, to compare with.
        norm: length of the result, such as the target's typical steering norm; that of `native` if None, and |u W|
            without one.
        draws, seed: of each null.

    Raises:
        ValueError: other widths than the map's, a direction of length 0 or one that the map sends to 0, fewer than 1
            draw, a norm that is not positive.
    """
    weight, u = found.weight.double(), direction.double()
    for name, vector, width in (("direction", u, found.d_in), ("native", native, found.d_out)):
        if vector is not None and (len(vector) != width or not 0 < float(vector.double().norm()) < torch.inf):
            raise ValueError(
                f"{name} has {len(vector)} channels and norm {float(vector.double().norm()):.3g}; the map is "
                f"{found.d_in} to {found.d_out} channels. Give a vector of {width} that is not 0."
            )
    if draws < 1 or (norm is not None and not 0 < norm < torch.inf):
        raise ValueError(f"draws={draws}, norm={norm}; give 1 draw or more and a length above 0.")
    carried = u @ weight
    length = float(carried.norm())
    if not length > 0:
        raise ValueError(f"the map {found.source} -> {found.target} sends this direction to 0: it says nothing of it.")
    wanted = length if norm is None and native is None else float(native.double().norm()) if norm is None else norm
    none = torch.zeros(0, dtype=torch.float64)
    cosine, of_maps, of_directions = torch.nan, none, none
    if native is not None:
        v = native.double() / native.double().norm()
        generator = torch.Generator().manual_seed(seed)
        # u through a map of independent normal entries is a vector of independent normal entries
        through_maps = torch.randn(draws, found.d_out, generator=generator, dtype=torch.float64).to(v)
        others = torch.randn(draws, found.d_in, generator=generator, dtype=torch.float64).to(v)
        cosine = float(carried @ v) / length
        of_maps, of_directions = _cosines(through_maps, v), _cosines(others @ weight, v)
    return CarriedDirection(carried * (wanted / length), length / float(u.norm()), cosine, of_maps, of_directions)


def _cosines(rows: Tensor, unit: Tensor) -> Tensor:
    return (rows @ unit) / rows.norm(dim=1).clamp_min(1e-300)


def _share(cosine: float, draws: Tensor) -> float:
    if not len(draws):
        return torch.nan
    return (1 + int((draws.abs() >= abs(cosine) - 1e-12).sum())) / (1 + len(draws))

"""Where a transported value comes from: for each target token, the place of its source token in the same text.

    same          i = j                                 what the residual stream itself carries
    offset K      i = j - K                             K tokens before, whatever they are
    head L.H      i = argmax_i A_LH[j, i]               the token that head H of layer L attends to most, sinks left out

A token without a source (the first K of a text; a head that sees nothing but sinks) is not transported: it is left out
of moments, and left as it is by an edit. Sources never lie behind their target. Beware: most heads attend most to the
first token, which is a sink and near-constant; with `sinks=True` it counts as a key like any other.
"""

import re
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from microtome.capture.sites import Site

NO_SOURCE = -1


@dataclass(frozen=True)
class Route:
    """One token policy. `str(route)` is what `Route.parse` reads.

    Attributes:
        offset: tokens before the target; 0 is the same token.
        head: the site `pattern.L.H` whose largest weight says where the source is; None for an offset.
        sinks: whether that head's first token counts as a key.
    """

    offset: int = 0
    head: Site | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        if self.offset < 0:
            raise ValueError(f"offset {self.offset} would take a token behind its target. Give 0 or more.")
        if self.head is not None and (self.head.kind != "pattern" or self.head.head is None or self.head.layer is None):
            raise ValueError(f"{self.head} is no single head's pattern. Give a route such as 'head 5.2'.")
        if self.head is not None and self.offset:
            raise ValueError("a route is an offset or a head, not both.")

    @classmethod
    def parse(cls, name: "str | Route") -> "Route":
        """ "same", "offset 1", "head 5.2" or "head 5.2 with sinks".

        Raises:
            ValueError: anything else.
        """
        if isinstance(name, Route):
            return name
        if name == "same":
            return cls()
        if found := re.fullmatch(r"offset (\d+)", name):
            return cls(offset=int(found[1]))
        if found := re.fullmatch(r"head (\d+)\.(\d+)( with sinks)?", name):
            return cls(head=Site("pattern", int(found[1]), int(found[2])), sinks=bool(found[3]))
        raise ValueError(
            f"{name!r} is no route. Expected 'same', 'offset 1' (one token before), or 'head 5.2' (the token that head "
            "2 of layer 5 attends to most; 'head 5.2 with sinks' lets it be the first)."
        )

    def __str__(self) -> str:
        if self.head is not None:
            return f"head {self.head.layer}.{self.head.head}{' with sinks' if self.sinks else ''}"
        return f"offset {self.offset}" if self.offset else "same"

    @property
    def is_same(self) -> bool:
        """Whether source and target are one token."""
        return self.head is None and self.offset == 0


def source_columns(
    route: Route,
    is_real: Bool[Tensor, "batch token"],
    pattern: Float[Tensor, "batch query key"] | None = None,
) -> Int64[Tensor, "batch token"]:
    """Column of each token's source, -1 where it has none; padding has none.

    Args:
        is_real: False at padding, on whichever side it is.
        pattern: of the route's head; ties go to the earlier key.

    Raises:
        ValueError: a head's route without its pattern, or with one of another shape.
    """
    columns = torch.arange(is_real.shape[1], device=is_real.device).expand_as(is_real)
    if route.head is None:
        place = is_real.long().cumsum(1) - 1  # real tokens of a row are neighbours, so places and columns step alike
        return torch.where(is_real & (place >= route.offset), columns - route.offset, NO_SOURCE)
    if pattern is None or pattern.shape != (*is_real.shape, is_real.shape[1]):
        given = None if pattern is None else tuple(pattern.shape)
        raise ValueError(f"route {route} needs its head's pattern {(*is_real.shape, is_real.shape[1])}, got {given}.")
    is_key = is_real if route.sinks else is_real & (is_real.long().cumsum(1) > 1)
    allowed = is_key[:, None, :] & (columns[:, None, :] <= columns[:, :, None])
    weight, source = pattern.masked_fill(~allowed, 0).max(2)
    return torch.where(is_real & (weight > 0), source, NO_SOURCE)

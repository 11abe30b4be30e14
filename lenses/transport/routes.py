"""Where a transported value comes from: for each target token, the place of its source token in the same text.

    same                i = j                      what the residual stream itself carries
    offset K            i = j - K                  K tokens before, whatever they are
    head L.H            i = argmax_i A_LH[j, i]    the token that head H of layer L attends to most, sinks left out
    head L.H choice N   the N-th of these          one of its top N
    random S            i uniform in 1 ... j - 1   an earlier token by chance, seed S: what a head has to beat

A token without a source (the first K of a text; a head that sees nothing but sinks) is not transported: it is left out
of moments, and left as it is by an edit. Sources never lie behind their target. Beware: most heads attend most to the
first token, which is a sink and near-constant, so it is no key here (nor drawn by chance); `with sinks` makes it one.
A head may attend most to the target itself; such rows are those of the same token.

The draw of a token is a hash of the token ids of its text up to it, so it depends on neither padding, batch nor what
follows, and an edit draws as the moments did. Two texts that start alike draw alike as long as they are alike.
"""

import re
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from microtome.capture.sites import Site
from microtome.lenses.site_pairs import site_name

NO_SOURCE = -1
_PRIME = 2**31 - 1  # products of two residues fit into 64 bits, so every device computes the same
_ROUNDS = ((1_103_515_245, 12_345), (48_271, 1_013_904_223), (69_621, 907_633_385))


@dataclass(frozen=True)
class Route:
    """One token policy. `str(route)` is what `Route.parse` reads.

    Attributes:
        offset: tokens before the target; 0 is the same token.
        head: the site `pattern.L.H` whose largest weight says where the source is; None for an offset.
        sinks: whether that head's first token counts as a key.
        choice: which of that head's keys, by weight: 1 is the largest.
        random: seed of an earlier token by chance; None for the others.
    """

    offset: int = 0
    head: Site | None = None
    sinks: bool = False
    choice: int = 1
    random: int | None = None

    def __post_init__(self) -> None:
        if self.offset < 0:
            raise ValueError(f"offset {self.offset} would take a token behind its target. Give 0 or more.")
        if self.head is not None and (self.head.kind != "pattern" or self.head.head is None or self.head.layer is None):
            raise ValueError(f"{self.head} is no single head's pattern. Give a route such as 'head 5.2'.")
        if (self.offset != 0) + (self.head is not None) + (self.random is not None) > 1:
            raise ValueError("a route is one of an offset, a head and a draw by chance.")
        if self.choice < 1:
            raise ValueError(f"choice {self.choice}: a head's most attended token is choice 1. Give 1 or more.")
        if self.head is None and (self.sinks or self.choice != 1):
            raise ValueError("sinks and choice are said of a head's keys, and this route has no head.")
        if self.random is not None and self.random < 0:
            raise ValueError(f"random {self.random}: a seed is 0 or more.")

    @classmethod
    def parse(cls, name: "str | Route") -> "Route":
        """ "same", "offset 1", "head 5.2", "head 5.2 choice 2", "head 5.2 with sinks" or "random 0".

        Raises:
            ValueError: anything else.
        """
        if isinstance(name, Route):
            return name
        if name == "same":
            return cls()
        if found := re.fullmatch(r"offset (\d+)", name):
            return cls(offset=int(found[1]))
        if found := re.fullmatch(r"random (\d+)", name):
            return cls(random=int(found[1]))
        if found := re.fullmatch(
            r"head (?:([A-Za-z_]\w*)\.)?(\d+\.\d+(?:@\d+)?)(?: choice (\d+))?( with sinks)?", name
        ):
            stack = f"{found[1]}." if found[1] else ""
            site = Site.parse(f"{stack}pattern.{found[2]}")
            return cls(head=site, sinks=bool(found[4]), choice=int(found[3] or 1))
        raise ValueError(
            f"{name!r} is no route. Expected 'same', 'offset 1' (one token before), 'head 5.2' (the token that head 2 "
            "of layer 5 attends to most; 'head 5.2 choice 2' the second; 'head 5.2 with sinks' lets it be the first), "
            "or 'random 0' (an earlier token by chance)."
        )

    def __str__(self) -> str:
        if self.head is not None:
            choice = f" choice {self.choice}" if self.choice > 1 else ""
            head = str(self.head).replace("pattern.", "")
            return f"head {head}{choice}{' with sinks' if self.sinks else ''}"
        if self.random is not None:
            return f"random {self.random}"
        return f"offset {self.offset}" if self.offset else "same"

    @property
    def is_same(self) -> bool:
        """Whether source and target are one token."""
        return self.head is None and self.random is None and self.offset == 0


def route_site(route: Route | str, source: str | tuple | Site) -> str:
    """What moments call a source by a route: "resid_post.3" by the same token, else "offset 1/resid_post.3"."""
    route, site = Route.parse(route), Site.parse(source)
    return str(site) if route.is_same else site_name((str(route), site))


def route_of(name: str) -> tuple[Route, str]:
    """Route and site of such a name.

    Raises:
        ValueError: a name that says no route and site.
    """
    route, slash, site = name.rpartition("/")
    return (Route.parse(route) if slash else Route()), str(Site.parse(site))


def source_columns(
    route: Route,
    is_real: Bool[Tensor, "batch token"],
    pattern: Float[Tensor, "batch query key"] | None = None,
    token_ids: Int[Tensor, "batch token"] | None = None,
) -> Int64[Tensor, "batch token"]:
    """Column of each token's source, -1 where it has none; padding has none.

    Args:
        is_real: False at padding, on whichever side it is.
        pattern: of the route's head; ties go to the earlier key.
        token_ids: for a draw by chance; what they are at padding does not matter.

    Raises:
        ValueError: a head's route without its pattern, a random one without token ids, or these of another shape.
    """
    columns = torch.arange(is_real.shape[1], device=is_real.device).expand_as(is_real)
    place = is_real.long().cumsum(1) - 1  # real tokens of a row are neighbours, so places and columns step alike
    if route.head is not None:
        return _most_attended(route, is_real, place, columns, pattern)
    if route.random is None:
        return torch.where(is_real & (place >= route.offset), columns - route.offset, NO_SOURCE)
    if token_ids is None or token_ids.shape != is_real.shape:
        given = None if token_ids is None else tuple(token_ids.shape)
        raise ValueError(f"route {route} needs token ids {tuple(is_real.shape)}, which it hashes; got {given}.")
    drawn = 1 + _hash_of_prefix(token_ids, is_real, place, route.random) % (place - 1).clamp_min(1)
    return torch.where(is_real & (place >= 2), columns - place + drawn, NO_SOURCE)


def _most_attended(route: Route, is_real: Tensor, place: Tensor, columns: Tensor, pattern: Tensor | None) -> Tensor:
    if pattern is None or pattern.shape != (*is_real.shape, is_real.shape[1]):
        given = None if pattern is None else tuple(pattern.shape)
        raise ValueError(f"route {route} needs its head's pattern {(*is_real.shape, is_real.shape[1])}, got {given}.")
    is_key = is_real if route.sinks else is_real & (place > 0)
    allowed = is_key[:, None, :] & (columns[:, None, :] <= columns[:, :, None])
    pattern = pattern.masked_fill(~allowed, 0)
    for _ in range(1, route.choice):  # max and not topk, whose order of ties is open
        pattern = pattern.scatter(2, pattern.argmax(2, keepdim=True), 0)
    weight, source = pattern.max(2)
    return torch.where(is_real & (weight > 0), source, NO_SOURCE)


def _hash_of_prefix(token_ids: Tensor, is_real: Tensor, place: Tensor, seed: int) -> Tensor:
    """A number below 2^31 - 1 for each token, of the tokens of its row up to it."""
    start = _scrambled(torch.tensor(seed % _PRIME, device=token_ids.device))
    tokens = _scrambled((token_ids.long() + start) % _PRIME)
    terms = torch.where(is_real, _scrambled((tokens + place.clamp_min(0)) % _PRIME), 0)
    return _scrambled((terms.cumsum(1) + start) % _PRIME)


def _scrambled(x: Tensor) -> Tensor:
    """A permutation of the residues of 2^31 - 1: x -> (a x + b)^5, three times."""
    for a, b in _ROUNDS:
        x = (x * a + b) % _PRIME
        square = x * x % _PRIME
        x = square * square % _PRIME * x % _PRIME
    return x

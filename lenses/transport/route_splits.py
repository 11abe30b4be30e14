"""What routed moments give to fitters: the shards of a route's pair, of several routes side by side, and operators.

    route_splits(moments, "head 2.1", "resid_post.8", "resid_post.9")                # x by the route, y
    route_splits(moments, ["same", "head 2.1"], "resid_post.8", "resid_post.9")      # [x by one ; x by the other], y

A token's own stream already says much of its source, and its source of it. So a head's route explains something new
only by what it adds to the same token, beyond what any earlier token adds:

    R2(same + head) - R2(same)   against   R2(same + random) - R2(same)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from microtome.capture.tap_plan import SiteName
from microtome.lenses.linear_map import LinearMap
from microtome.lenses.moments import Moments
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.pair_splits import SHARDS, PairSplits, pair_splits
from microtome.lenses.site_pairs import SiteKey
from microtome.lenses.strata import Stratum
from microtome.lenses.transport.operator import TransportOperator, operator_of
from microtome.lenses.transport.routes import Route, route_of, route_site


def held_routes(moments: Moments) -> list[Route]:
    """The routes of these moments, as they were asked for.

    Raises:
        ValueError: they are not of `routed_moments`.
    """
    if "routes" not in moments.provenance:
        raise ValueError("these moments know no routes: x and y are of one token. Make them with `routed_moments`.")
    return [Route.parse(route) for route in moments.provenance["routes"]]


def route_pairs(moments: Moments, route: Route | str) -> list[tuple[str, str]]:
    """Every (source by the route, target), as `ridge_pairs` takes them.

    Raises:
        KeyError: a route that is not held.
        ValueError: as `held_routes`.
    """
    route = _held(moments, route)
    facts = moments.provenance
    return [(route_site(route, source), target) for source in facts["sources"] for target in facts["targets"]]


def route_splits(
    moments: Moments,
    route: Route | str | Sequence[Route | str],
    source: SiteName,
    target: SiteName,
    stratum: Stratum = "rest",
    *,
    shards: Sequence[Any] = SHARDS,
    shuffled: bool = False,
) -> PairSplits:
    """The three shards of (source by the route, target); of several routes, x is their sources side by side.

    Raises:
        KeyError: a route, site or pair that is not held.
        ValueError: what `pair_splits` raises.
    """
    if isinstance(route, str | Route):
        source = route_site(_held(moments, route), source)
        return pair_splits(moments, source, target, stratum, shards=shards, shuffled=shuffled)
    return pair_splits(joined_routes(moments, route), source, target, stratum, shards=shards, shuffled=shuffled)


def route_operator(found: LinearMap, stratum: Stratum = "rest") -> TransportOperator:
    """A map fitted on routed moments, whose source is named "ROUTE/SITE", as an operator of that route.

    Raises:
        ValueError: the map names no sites, or another model's.
    """
    if not found.source:
        raise ValueError(f"the map {found.kind!r} does not say its sites. Give LinearMap(..., source=, target=).")
    route, source = route_of(found.source)
    return operator_of(replace(found, source=source), route=route, stratum=stratum)


@dataclass(frozen=True, eq=False)
class JoinedRoutes:
    """Moments of x = [x by the first route ; x by the second ; ...] with y, for `pair_splits` and `ridge_pairs`.

    Attributes:
        moments: with the products between routes (`joined=True`).
        routes: in the order of the parts of x.
    """

    moments: Moments
    routes: tuple[Route, ...]

    @property
    def sites(self) -> tuple[str, ...]:
        """Plain names."""
        facts = self.moments.provenance
        return tuple(dict.fromkeys([*facts["sources"], *facts["targets"]]))

    def pair(
        self, source: SiteKey, target: SiteKey, shard: Any = "fit", stratum: Stratum = "rest", *, shuffled: bool = False
    ) -> PairMoments:
        """Moments of (source by each route side by side, target).

        Raises:
            KeyError: a pair that was not accumulated.
            ValueError: shuffled, which keeps no products between sources of one token; no rows.
        """
        if shuffled:
            raise ValueError(
                "There is no shuffled control of joined routes. Join a draw by chance: ['same', 'random 0']."
            )
        names = [route_site(route, source) for route in self.routes]
        parts = [self.moments.pair(name, target, shard, stratum) for name in names]
        rows = [
            torch.cat(
                [
                    part.xx if i == j else self.moments.pair(names[i], names[j], shard, stratum).xy
                    for j in range(len(names))
                ],
                dim=1,
            )
            for i, part in enumerate(parts)
        ]
        noise = [part.noise_x for part in parts]
        return PairMoments(
            parts[0].count,
            torch.cat([part.mean_x for part in parts]),
            parts[0].mean_y,
            torch.cat(rows),
            torch.cat([part.xy for part in parts]),
            parts[0].yy,
            noise_x=None if any(each is None for each in noise) else torch.cat(noise),
            noise_y=parts[0].noise_y,
        )


def joined_routes(moments: Moments, routes: Sequence[Route | str]) -> JoinedRoutes:
    """What sources of several routes say of a target together: `R2(same + head) - R2(same)` is what the head's source
    adds to the token's own past, to be compared with `R2(same + random) - R2(same)`.

    Raises:
        ValueError: no routes.
        KeyError: a route that is not held.
    """
    known = list(routes)
    if not known:
        raise ValueError("no routes to join. Give two or more, such as ['same', 'head 2.1'].")
    return JoinedRoutes(moments, tuple(_held(moments, route) for route in known))


def _held(moments: Moments, route: Route | str) -> Route:
    held, route = held_routes(moments), Route.parse(route)
    if route not in held:
        raise KeyError(f"{route} is no route of these moments, which hold {', '.join(map(str, held))}.")
    return route

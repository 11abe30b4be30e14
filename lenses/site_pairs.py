"""Which pairs of sites have their cross-products accumulated, where these lie, and what they take.

All pairs of s sites of width d are P = s (s + 1) / 2 blocks of d x d: 8 P d^2 bytes in float64 per shard, and 2 P d^2
operations per token. A band keeps |i - j| <= K; a target keeps (site, itself) and (site, target). The block of (i, i)
is always there, since every map from i needs it. Only i <= j is kept; the other order is its transpose.

    rows [token, all widths one after the other];   per source i:  rows_i^T rows[:, run]  for each run of its targets

A run is a stretch of neighbouring targets, so that all pairs need one product per source site and no copy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from microtome.capture.sites import Site

SiteKey = str | Site | tuple
Pairs = str | int | Site | Sequence[tuple[SiteKey, SiteKey]]


@dataclass(frozen=True)
class SitePairs:
    """Sites in order, their widths, and the later sites that each is paired with.

    Attributes:
        names: of the sites, as written.
        widths: of their rows.
        targets: per site the numbers of the sites at or after it whose cross-products with it are kept, itself first.
        rule: what was asked for, in words.
    """

    names: tuple[str, ...]
    widths: tuple[int, ...]
    targets: tuple[tuple[int, ...], ...]
    rule: str

    @classmethod
    def of(cls, widths: Mapping[SiteKey, int], pairs: Pairs = "all") -> "SitePairs":
        """Plan the pairs.

        Args:
            widths: width of each site, in order of depth.
            pairs: "all"; a number K for the band |i - j| <= K; one site as the target of all; or a list of pairs.

        Raises:
            ValueError: no sites, two of one name, a negative band.
            KeyError: a pair names a site that is not among them.
        """
        names = tuple(site_name(key) for key in widths)
        if not names:
            raise ValueError("no sites. Give at least one, such as 'resid'.")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"Sites given twice: {', '.join(twice)}. Name each once.")
        places = {name: i for i, name in enumerate(names)}
        n = len(names)
        chosen: list[set[int]] = [{i} for i in range(n)]
        if isinstance(pairs, bool):
            raise ValueError(f"pairs={pairs}: expected 'all', a band (a whole number), a target site, or a list.")
        if isinstance(pairs, int):
            if pairs < 0:
                raise ValueError(f"pairs={pairs}: a band is 0 or more.")
            chosen, rule = [set(range(i, min(n, i + pairs + 1))) for i in range(n)], f"band {pairs}"
        elif isinstance(pairs, str) and pairs == "all":
            chosen, rule = [set(range(i, n)) for i in range(n)], "all"
        else:
            is_target = isinstance(pairs, str | Site)
            wanted = [(name, pairs) for name in names] if is_target else list(pairs)
            for pair in wanted:
                if not isinstance(pair, tuple) or len(pair) != 2:
                    raise ValueError(f"{pair!r} is no pair of sites. Give (source, target).")
                first, last = sorted(_place(places, key) for key in pair)
                chosen[first].add(last)
            rule = f"to {site_name(pairs)}" if is_target else f"{len(wanted)} pairs"
        return cls(names, tuple(widths.values()), tuple(tuple(sorted(each)) for each in chosen), rule)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First column of each site among all, and the number of columns."""
        starts = [0]
        for width in self.widths:
            starts.append(starts[-1] + width)
        return tuple(starts)

    @property
    def columns(self) -> int:
        """Width of a row of all sites."""
        return self.starts[-1]

    def span(self, site: int) -> slice:
        """Its columns among those of all sites."""
        return slice(self.starts[site], self.starts[site + 1])

    def runs(self, source: int) -> list[slice]:
        """Columns of the source's targets, neighbours joined."""
        found: list[slice] = []
        for target in self.targets[source]:
            span = self.span(target)
            if found and found[-1].stop == span.start:
                found[-1] = slice(found[-1].start, span.stop)
            else:
                found.append(span)
        return found

    def block_width(self, source: int) -> int:
        """Columns of all its targets."""
        return sum(self.widths[target] for target in self.targets[source])

    def place_in_block(self, source: int, target: int) -> slice:
        """Columns of a target in the source's block."""
        before = sum(self.widths[t] for t in self.targets[source] if t < target)
        return slice(before, before + self.widths[target])

    @property
    def numbers(self) -> int:
        """Entries of all blocks."""
        return sum(width * self.block_width(i) for i, width in enumerate(self.widths))

    @property
    def pairs(self) -> int:
        """Number of blocks."""
        return sum(map(len, self.targets))

    def find(self, key: Any) -> int:
        """Number of a site, by any spelling.

        Raises:
            KeyError: not among them.
        """
        return _place({name: i for i, name in enumerate(self.names)}, key)

    def block_of(self, source: int, target: int) -> tuple[int, int]:
        """(first, last) of the block that holds this pair in either order.

        Raises:
            KeyError: the pair was not accumulated; the message says which are and what to do.
        """
        first, last = min(source, target), max(source, target)
        if last not in self.targets[first]:
            near = last - first
            raise KeyError(
                f"The pair ({self.names[source]}, {self.names[target]}) was not accumulated: these moments hold pairs "
                f"{self.rule!r}. Run the pass again with pairs={near} (a band of |i - j| <= {near}), pairs='all', or a "
                "list that names it."
            )
        return first, last

    def described(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "sites": list(self.names),
            "widths": list(self.widths),
            "targets": [list(each) for each in self.targets],
            "rule": self.rule,
        }


def site_name(key: SiteKey) -> str:
    """How a site is written: "resid_post.3"; of a named model, given as (name, site), "name/resid_post.3".

    A string that is no site of a model stays as it is: any tensor may have a name.
    """
    if isinstance(key, Site):
        return str(key)
    if isinstance(key, tuple) and len(key) == 2 and isinstance(key[1], Site):
        return f"{key[0]}/{key[1]}"
    try:
        return str(Site.parse(key))
    except ValueError:
        if isinstance(key, str):
            return key
        raise


def _place(places: Mapping[str, int], key: Any) -> int:
    if isinstance(key, str) and key in places:
        return places[key]
    name = site_name(key)
    if name not in places:
        shown = ", ".join(list(places)[:6]) + (", ..." if len(places) > 6 else "")
        raise KeyError(f"{name} is not among these {len(places)} sites: {shown}.")
    return places[name]

"""Which pairs of sites are worth a map: depths of one stream, and what a block's part writes from what enters it."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from microtome.capture.sites import Site

# the residual stream is cut before a block, between its parts and behind it
_DEPTH = {"resid_pre": 0.0, "resid_mid": 0.5, "resid_post": 1.0}
STREAMS = {"residual": tuple(_DEPTH), "attn_out": ("attn_out",), "mlp_out": ("mlp_out",)}


def depth_of(site: Any) -> float:
    """How many blocks lie before a site: 0 for resid_pre.0, l + 1 for resid_post.l; a part's output by its block.

    Raises:
        ValueError: a site without a layer.
    """
    site = Site.parse(site)
    if site.layer is None:
        raise ValueError(f"{site} belongs to no block, so it has no depth. Depths are resid_pre.0, resid_post.0, ...")
    return site.layer + _DEPTH.get(site.kind, 0.0)


def in_order(sites: Sequence[Any], stream: str = "residual") -> list[Any]:
    """The sites of one stream ("residual", "attn_out", "mlp_out"), first depth first; one of two at the same depth.

    Raises:
        ValueError: another stream, or one of which there are no sites.
    """
    if stream not in STREAMS:
        raise ValueError(f"stream is {stream!r}; there are {list(STREAMS)}.")
    found: dict[float, Any] = {}
    for site in sites:
        if (parsed := Site.parse(site)).kind in STREAMS[stream] and parsed.layer is not None:
            found.setdefault(depth_of(parsed), site)
    if not found:
        raise ValueError(f"there are no sites of stream {stream!r} among {[str(site) for site in sites][:8]}.")
    return [found[depth] for depth in sorted(found)]


def deeper_pairs(sites: Sequence[Any], stream: str = "residual") -> list[tuple[Any, Any]]:
    """Every depth with every deeper one. Errors as of `in_order`."""
    depths = in_order(sites, stream)
    return [(source, target) for i, source in enumerate(depths) for target in depths[i + 1 :]]


def pairs_to_last(sites: Sequence[Any], stream: str = "residual") -> list[tuple[Any, Any]]:
    """Every depth with the last. Errors as of `in_order`."""
    depths = in_order(sites, stream)
    return [(source, depths[-1]) for source in depths[:-1]]


def next_pairs(sites: Sequence[Any], stream: str = "residual") -> list[tuple[Any, Any]]:
    """Every depth with the next. Errors as of `in_order`."""
    depths = in_order(sites, stream)
    return list(pairwise(depths))


def part_pairs(sites: Sequence[Any], part: str = "attn_out") -> list[tuple[Any, Any]]:
    """What enters a block's part with what the part writes, for "attn_out" or "mlp_out", layer by layer.

    An MLP is paired with resid_mid of its layer where there is one, otherwise, as attention is, with the stream that
    enters the block (resid_pre.l, or resid_post.(l-1), which is the same). The map replaces the norm and the part.
    Raises:
        ValueError: another part, or no such pair.
    """
    if part not in ("attn_out", "mlp_out"):
        raise ValueError(f"part is {part!r}; there are 'attn_out' and 'mlp_out'.")
    by_name = {str(Site.parse(site)): site for site in sites}
    found = []
    for site in in_order(sites, part):
        layer = Site.parse(site).layer
        names = [f"resid_mid.{layer}"] * (part == "mlp_out") + [f"resid_pre.{layer}", f"resid_post.{layer - 1}"]
        source = next((by_name[name] for name in names if name in by_name), None)
        if source is not None:
            found.append((source, site))
    if not found:
        raise ValueError(f"no {part} has its input among the sites. Take moments of resid_pre or resid_mid as well.")
    return found

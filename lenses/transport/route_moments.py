"""Moments of (x at the source token i(j), y at the target token j) for several routes, from one forward pass.

    moments = routed_moments(model, texts, "resid_post.8", "resid_post.9", ["same", "offset 1", "head 2.1", "random 0"])
    route_splits(moments, "head 2.1", "resid_post.8", "resid_post.9")              # PairSplits, for any fitter
    ridge_pairs(moments, route_pairs(moments, "head 2.1"))                         # source "head 2.1/resid_post.8"

Rows are the target tokens that have a source by every route that was asked for, so that routes are compared, and joined
(`joined_routes`), on the same tokens. What this leaves out is counted by route and shard in `moments.counts()`: with
"offset 8" the first 8 tokens of a text. Ask for a route alone where it should have all of its own tokens.

A row is a sink if its target or any of its sources is one (first, special, massive; the target's reason is the one that
is counted), judged token by token as `moments_of` judges them, whatever sites were asked for. So "rest" holds neither a
target nor a source that is set apart, and "head 2.1 with sinks" makes most rows sinks: ask for it alone.

The shuffled control pairs x of a row with y of another document at the same position of the target. One head's pattern
is read per head route, of one batch at a time, and only the columns of sources are used.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from microtome.capture.anatomy import Anatomy
from microtome.capture.batches import MAX_TOKENS
from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.capture.tap_plan import SiteName
from microtome.lenses.corpus_pass import Chunk
from microtome.lenses.depths import depth_of
from microtome.lenses.document_shards import SHARES
from microtome.lenses.moments import CHUNK, Moments
from microtome.lenses.moments_pass import RowPlan, Shards, accumulated, expand_sites
from microtome.lenses.site_pairs import SiteKey
from microtome.lenses.strata import TokenRule
from microtome.lenses.transport.route_rows import row_reasons, source_rows
from microtome.lenses.transport.routes import NO_SOURCE, Route, route_site

LEFT_OUT = "left out"  # in `counts()`, beside "without ROUTE"


def routed_moments(
    model: LoadedModel | nn.Module,
    texts: Any,
    sources: Sequence[SiteName] | SiteName,
    targets: Sequence[SiteName] | SiteName,
    routes: Sequence[Route | str] | Route | str,
    *,
    joined: bool = False,
    documents: Iterable[Any] | None = None,
    shards: Shards = SHARES,
    seed: int = 0,
    rule: TokenRule | None = None,
    shuffled: bool = False,
    medians: Mapping[str, float] | None = None,
    chunk: int = CHUNK,
    save: str | Path | None = None,
    checkpoint_minutes: int | float = 10,
    progress: bool = True,
    max_tokens: int = MAX_TOKENS,
    truncate: Literal["left", "right"] | None = None,
    max_length: int | None = None,
    add_special_tokens: bool = True,
) -> Moments:
    """Run the texts once and accumulate every source by every route with every target.

    Args:
        model: from `load_model` or `untrained`, or a transformers module in eval mode.
        texts: strings, message lists or token ids.
        sources, targets: in order of depth; "resid" stands for the whole residual stream.
        routes: `Route`s or their names.
        joined: hold products between the routes of each source too, which `joined_routes` needs.
        documents, shards, seed, rule, shuffled, medians, chunk, save, checkpoint_minutes, max_tokens, truncate,
            max_length, add_special_tokens: as of `moments_of`.

    Returns:
        Moments whose sites are the targets (and the sources of "same") by their own names and sources of other routes
        as "ROUTE/SITE": `route_site(route, source)`.

    Raises:
        ValueError: no routes or one twice, and what `moments_of` raises.
        KeyError, IndexError: a site or a head that the model does not have.
    """
    given = [routes] if isinstance(routes, str | Route) else list(routes)
    known = [Route.parse(route) for route in given]
    if not known:
        raise ValueError("no routes. Give one or more, such as ['same', 'offset 1', 'head 2.1'].")
    if twice := sorted({str(route) for route in known if known.count(route) > 1}):
        raise ValueError(f"Routes given twice: {', '.join(twice)}. Name each once.")
    plan = partial(_plan, sources=sources, targets=targets, routes=known, joined=joined)
    return accumulated(
        model,
        texts,
        plan,
        documents=documents,
        shards=shards,
        seed=seed,
        rule=rule,
        shuffled=shuffled,
        medians=medians,
        chunk=chunk,
        save=save,
        checkpoint_minutes=checkpoint_minutes,
        progress=progress,
        max_tokens=max_tokens,
        truncate=truncate,
        max_length=max_length,
        add_special_tokens=add_special_tokens,
    )


def _plan(
    anatomy: Anatomy,
    *,
    sources: Sequence[SiteName] | SiteName,
    targets: Sequence[SiteName] | SiteName,
    routes: list[Route],
    joined: bool,
) -> RowPlan:
    wanted, aims = expand_sites(anatomy, sources), expand_sites(anatomy, targets)
    ordered = sorted(dict.fromkeys([*wanted, *aims]), key=_depth)
    named: dict[SiteKey, Site] = {}
    made: dict[str, tuple[Route, Site]] = {}
    for site in ordered:  # another token's value before the token's own: it is no later
        for route in routes if site in wanted else ():
            if not route.is_same:
                made[route_site(route, site)] = route, site
                named[route_site(route, site)] = site
        if site in aims or any(route.is_same for route in routes):
            named[str(site)] = site
    pairs = [(route_site(route, source), str(target)) for source in wanted for route in routes for target in aims]
    if joined:
        for source in wanted:
            names = [route_site(route, source) for route in routes]
            pairs += [(names[i], names[j]) for j in range(len(names)) for i in range(j)]
    heads = tuple(dict.fromkeys(route.head for route in routes if route.head is not None))
    own = [str(site) for site in ordered if str(site) in named]
    count_in = partial(_count_rows, routes=routes, own=own, made=made)
    facts = {"routes": list(map(str, routes)), "sources": list(map(str, wanted)), "targets": list(map(str, aims))}
    return RowPlan(named, pairs, heads, count_in, 1 + len(routes), facts)


def _depth(site: Site) -> float:
    if site.layer is None:
        return -1.0 if site.kind == "embed" else float("inf")
    return depth_of(site)


def _count_rows(
    moments: Moments,
    chunk: Chunk,
    owners: list[int],
    *,
    routes: list[Route],
    own: list[str],
    made: Mapping[str, tuple[Route, Site]],
) -> None:
    """Add the rows of a chunk: tokens that have a source by every route."""
    position, text = chunk.position.cpu(), chunk.text.cpu()
    reasons = moments.reasons_of(chunk.values, position=position, is_special=chunk.is_special, text=text)
    source = {route: source_rows(route, chunk) for route in routes}
    picked = torch.ones(len(chunk), dtype=torch.bool, device=chunk.text.device)
    for route, rows in source.items():
        has = rows != NO_SOURCE
        if not route.is_same:
            moments.leave_out(f"without {route}", _of(owners, ~has))
        picked &= has
    moments.leave_out(LEFT_OUT, _of(owners, ~picked))
    target = picked.nonzero()[:, 0]
    source = {route: rows[target] for route, rows in source.items()}
    reason = row_reasons(reasons, target.cpu(), [rows.cpu() for rows in source.values()])

    def values_at(site: Site, rows: Tensor) -> Tensor:
        return chunk.values[site][rows.to(chunk.values[site].device)]

    values = {name: values_at(Site.parse(name), target) for name in own}
    values |= {name: values_at(site, source[route]) for name, (route, site) in made.items()}
    moments.update(
        values, documents=_of(owners, picked), position=position[target.cpu()], text=text[target.cpu()], reasons=reason
    )


def _of(owners: list[int], is_chosen: Tensor) -> list[int]:
    return [owner for owner, chosen in zip(owners, is_chosen.tolist(), strict=True) if chosen]

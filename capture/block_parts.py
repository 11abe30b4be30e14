"""The parts of one block: contributions with roles, output projection, head layout, and where each site is tapped.

Roles come from a test, not from names: the stream is changed at one position where a branch reads it, earlier terms
held at their recorded values; a branch that then moves at other positions is the mixer, one that does not is the MLP.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from microtome.capture.anatomy import Block, Contribution, HeadColumns, Hop, Point, Tap
from microtome.capture.head_layout import SeamRecord, before_rotation, column_match, head_axis, last_linear
from microtome.capture.opgraph import OpGraph
from microtome.capture.plain_hooks import plain_hooks
from microtome.capture.sites import Site
from microtome.capture.trunk import Chain, Norms, NotWalkable, Walk

MOVED = 1e-4  # relative change that counts as having moved; rounding is 1e-6, a real dependence 1e-2 and more
POSITION = 1  # the position that is changed
TERM_KINDS = ("resid_mid", "attn_out", "mlp_out", "mlp_act")
HEAD_KINDS = ("q", "k", "q_rot", "k_rot", "v", "z", "head_out", "pattern")


@dataclass
class BlockParts:
    """One block's description, the taps it could offer, and what it cannot offer and why."""

    block: Block
    taps: list[Tap] = field(default_factory=list)
    unavailable: dict[Site, str] = field(default_factory=dict)


def block_parts(graph: OpGraph, chain: Chain, k: int, seams: list[SeamRecord], norms: Norms) -> BlockParts:
    """What one recorded forward and a few replays of block k show of its parts; nothing is proved yet."""
    call = graph.calls[chain.calls[k]]
    width = graph.nodes[chain.exit_node(graph, k)].value.shape[-1]
    entry, exit = Point(call.path, "in", chain.entry), Point(call.path, "out", chain.exit)
    here = tuple(s for s in seams if s.path == call.path or s.path.startswith(call.path + "."))
    parts = BlockParts(Block(call.path, entry, exit, seams=tuple(s.path for s in here)))
    parts.taps += [Tap(Site("resid_pre", k), entry, width=width), Tap(Site("resid_post", k), exit, width=width)]
    try:
        walk = Walk(graph, chain.calls[k], chain.entry_node(graph, k), chain.exit_node(graph, k), norms)
    except NotWalkable as reason:
        for kind in (*TERM_KINDS, *HEAD_KINDS):
            parts.unavailable[Site(kind, k)] = f"the stream could not be followed through block {call.path}: {reason}"
        return parts
    mixing = _mixing(graph, chain, k, walk)
    contributions = tuple(
        Contribution(
            "mixer" if mixes else "mlp",
            Point(graph.calls[term.call].path, "out", term.slot),
            term.factor,
            _projection_input(graph, term.node, chain.calls[k]),
        )
        for term, mixes in zip(walk.terms, mixing, strict=True)
    )
    hops = tuple(Hop(s.step, s.term, s.factor, s.module) for s in walk.steps)
    mixers = [i for i, mixes in enumerate(mixing) if mixes]
    mlps = [i for i, mixes in enumerate(mixing) if not mixes]
    is_parallel = bool(
        len(mixers) == len(mlps) == 1 and walk.terms[mlps[0]].node not in graph.descendants(walk.terms[mixers[0]].node)
    )
    parts.block = Block(call.path, entry, exit, contributions, hops, parts.block.seams, is_parallel)
    _add_terms(parts, graph, walk, k, width, mixers, mlps, chain.calls[k])
    if len(mixers) == 1:
        _add_heads(parts, graph, walk, k, width, mixers[0], here, chain)
    return parts


def _projection_input(graph: OpGraph, term: int, block: int) -> Point | None:
    if (linear := last_linear(graph, term, block)) is None:
        return None
    return Point(graph.calls[linear].path, "in", next(iter(graph.calls[linear].inputs)))


def _mixing(graph: OpGraph, chain: Chain, k: int, walk: Walk) -> list[bool]:
    """For each term: does it move at other positions when the stream is changed at one, earlier terms held?"""
    call = graph.calls[chain.calls[k]]
    entry = Point(call.path, "in", chain.entry)
    points = [Point(graph.calls[t.call].path, "out", t.slot) for t in walk.terms]
    recorded = [graph.nodes[t.node].value for t in walk.terms]
    order = sorted(range(len(points)), key=lambda i: walk.terms[i].node)
    answers = [False] * len(points)
    noise = torch.randn(graph.nodes[walk.entry].value.shape[-1], generator=torch.Generator().manual_seed(1))
    for place, i in enumerate(order):
        seen: list[Tensor] = []

        def nudge(x: Tensor) -> Tensor:
            changed = x.clone()
            changed[:, POSITION] += (noise.to(x) * x[:, POSITION].norm(dim=-1, keepdim=True) / noise.norm()).to(x)
            return changed

        held = {points[j]: lambda x, j=j: recorded[j].to(x).reshape(x.shape).clone() for j in order[:place]}
        hooks = {entry: nudge, **held, points[i]: lambda x, seen=seen: seen.append(x.detach().clone())}
        args, kwargs = graph.arguments(call)
        with plain_hooks(graph.model, hooks):
            call.module(*args, **kwargs)
        moved = (seen[0].reshape(recorded[i].shape) - recorded[i]).abs().flatten(2).amax(-1)
        moved[:, POSITION] = 0
        answers[i] = bool(moved.max() > MOVED * recorded[i].abs().max())
    return answers


def _add_terms(
    parts: BlockParts, graph: OpGraph, walk: Walk, k: int, width: int, mixers: list[int], mlps: list[int], block: int
) -> None:
    for kind, found, what in (("attn_out", mixers, "mix positions"), ("mlp_out", mlps, "do not mix positions")):
        if len(found) == 1:
            point = parts.block.contributions[found[0]].point
            parts.taps.append(Tap(Site(kind, k), point, width=width, factor=walk.terms[found[0]].factor))
        else:
            reason = f"{len(found)} of the terms of block {parts.block.path} {what}; one was expected"
            parts.unavailable[Site(kind, k)] = reason
    if len(mlps) == 1 and (linear := last_linear(graph, walk.terms[mlps[0]].node, block)) is not None:
        slot, node = next(iter(graph.calls[linear].inputs.items()))
        value = graph.nodes[node].value
        if value.ndim == 3 and value.shape[:2] == graph.nodes[walk.entry].value.shape[:2]:
            point = Point(graph.calls[linear].path, "in", slot)
            parts.taps.append(Tap(Site("mlp_act", k), point, width=value.shape[-1]))
        else:
            reason = f"the MLP's last linear map gets a tensor of shape {tuple(value.shape)}"
            parts.unavailable[Site("mlp_act", k)] = reason
    else:
        parts.unavailable[Site("mlp_act", k)] = f"block {parts.block.path} has no single MLP with a last linear map"
    _add_resid_mid(parts, graph, walk, k, width, mixers, mlps, block)


def _add_resid_mid(
    parts: BlockParts, graph: OpGraph, walk: Walk, k: int, width: int, mixers: list[int], mlps: list[int], block: int
) -> None:
    site = Site("resid_mid", k)
    if len(mixers) != 1 or len(mlps) != 1:
        parts.unavailable[site] = f"block {parts.block.path} has {len(mixers)} mixers and {len(mlps)} MLPs, not 1 and 1"
        return
    if parts.block.is_parallel:
        parts.unavailable[site] = "attention and MLP are added in parallel; there is no stream between them"
        return
    steps = walk.steps
    at_mixer = next(i for i, s in enumerate(steps) if s.term == mixers[0])
    at_mlp = next(i for i, s in enumerate(steps) if s.term == mlps[0])
    middle = steps[at_mlp].before
    if at_mlp < at_mixer:
        parts.unavailable[site] = "the MLP comes before the mixer in this block"
        return
    if made := walk.makers.get(middle):
        index, slot = min(made, key=lambda m: graph.calls[m[0]].path.count("."))
        parts.taps.append(Tap(site, Point(graph.calls[index].path, "out", slot), width=width))
        return
    between = steps[at_mixer + 1 : at_mlp]
    readers = [
        (call, slot)
        for i, call in enumerate(graph.calls)
        if graph.is_inside(i, block) and i != block
        for slot, node in call.inputs.items()
        if graph.source(node) == graph.source(middle)
    ]
    if not readers or any(s.step != "scale" for s in between):
        parts.unavailable[site] = "no module takes or returns the stream between mixer and MLP"
        return
    factor = walk.terms[mixers[0]].factor
    for step in between:
        factor *= step.factor
    call, slot = readers[0]
    through = str(Site("attn_out", k))
    parts.taps.append(Tap(site, Point(call.path, "in", slot), width=width, through=through, factor=factor))


def _add_heads(
    parts: BlockParts,
    graph: OpGraph,
    walk: Walk,
    k: int,
    width: int,
    mixer: int,
    seams: tuple[SeamRecord, ...],
    chain: Chain,
) -> None:
    block = chain.calls[k]
    linear = last_linear(graph, walk.terms[mixer].node, block)
    seam = seams[0] if len(seams) == 1 else None
    z_tap, columns = _z_tap(graph, k, linear, seam)
    if z_tap is None:
        for kind in ("z", "head_out"):
            parts.unavailable[Site(kind, k)] = "no split into heads was found before the mixer's output projection"
    else:
        parts.taps.append(z_tap)
        slot = next(iter(graph.calls[linear].outputs))
        out = Point(graph.calls[linear].path, "out", slot)
        parts.taps.append(Tap(Site("head_out", k), out, columns, z_tap.head_count, width, through=out.module))
    if seam is None:
        for kind in ("q", "k", "v", "q_rot", "k_rot", "pattern"):
            parts.unavailable[Site(kind, k)] = (
                "this model's attention does not go through transformers' attention interface"
                if not seams
                else f"the block calls the attention interface in {len(seams)} modules"
            )
        return
    q_heads = graph.nodes[seam.q].value.shape[1]
    parts.taps.append(Tap(Site("pattern", k), Point(seam.path, "seam", "pattern"), head_count=q_heads))
    mixer_call = next(i for i, c in enumerate(graph.calls) if c.path == seam.path)
    for kind, node in (("q", seam.q), ("k", seam.k), ("v", seam.v)):
        _, heads, _, d_head = graph.nodes[node].value.shape
        found = before_rotation(graph, mixer_call, node, source=walk.entry)
        at_seam = Point(seam.path, "seam", kind)
        if found is not None:
            parts.taps.append(Tap(Site(kind, k), found[0], found[1], heads, d_head))
        elif kind == "v":
            parts.taps.append(Tap(Site(kind, k), at_seam, None, heads, d_head))
        else:
            parts.unavailable[Site(kind, k)] = (
                f"no module output holds the {kind} heads as columns; {kind}_rot is available"
            )
        if kind != "v":
            parts.taps.append(Tap(Site(f"{kind}_rot", k), at_seam, None, heads, d_head))


def _z_tap(
    graph: OpGraph, k: int, linear: int | None, seam: SeamRecord | None
) -> tuple[Tap | None, HeadColumns | None]:
    """z at the attention interface where it is the projection's input, else at the projection's input."""
    if linear is None:
        return None, None
    slot, into = next(iter(graph.calls[linear].inputs.items()))
    value = graph.nodes[into].value
    if value.ndim != 3:
        return None, None
    if seam is not None:
        z = graph.nodes[seam.z].value
        rows, heads, d_head = z.shape[0] * z.shape[1], z.shape[2], z.shape[3]
        match = column_match(z.reshape(rows, -1), value.reshape(rows, -1)) if z.numel() == value.numel() else None
        if match is not None:
            columns = HeadColumns(match.view(heads, d_head))
            return Tap(Site("z", k), Point(seam.path, "seam", "z"), None, heads, d_head), columns
    if (axis := head_axis(graph, into)) is None:
        return None, None
    columns = HeadColumns(torch.arange(value.shape[-1]).view(*axis))
    return Tap(Site("z", k), Point(graph.calls[linear].path, "in", slot), columns, *axis), columns

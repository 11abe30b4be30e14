"""The parts of one block: contributions with roles, output projection, head layout, and where each site is tapped.

Roles come from a test, not from names: the stream is changed at one position where a branch reads it, earlier terms
held at their recorded values; a branch that then moves at other positions is the mixer, one that does not is the MLP.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from microtome.capture.anatomy import TERM_OF_ROLE, Block, Contribution, HeadColumns, Hop, Point, Role, Tap
from microtome.capture.head_layout import SeamRecord, before_rotation, column_match, head_axis
from microtome.capture.linear_maps import last_linear
from microtome.capture.opgraph import OpGraph
from microtome.capture.plain_hooks import plain_hooks
from microtome.capture.sites import Site
from microtome.capture.trunk import Chain, Norms, NotWalkable, Walk

MOVED = 1e-4  # relative change that counts as having moved; rounding is 1e-6, a real dependence 1e-2 and more
POSITION = 1  # the position that is changed
WHAT_ROLES_DO = {
    "mixer": "mix positions",
    "mlp": "do not mix positions",
    "cross": "read another sequence",
    "extra": "read another input at their own position",
}
TERM_KINDS = ("resid_mid", "attn_out", "mlp_out", "mlp_act")
HEAD_KINDS = ("q", "k", "q_rot", "k_rot", "v", "z", "head_out", "pattern")


@dataclass
class BlockParts:
    """One block's description, the taps it could offer, and what it cannot offer and why."""

    block: Block
    taps: list[Tap] = field(default_factory=list)
    unavailable: dict[Site, str] = field(default_factory=dict)

    def refuse(self, kind: str, reason: str) -> None:
        """Note why a kind of site is not offered in this block."""
        self.unavailable[self.block.site(kind)] = reason


def block_parts(graph: OpGraph, chain: Chain, k: int, seams: list[SeamRecord], norms: Norms) -> BlockParts:
    """What one recorded forward and a few replays of block k show of its parts; nothing is proved yet."""
    call = graph.calls[chain.calls[k]]
    width = graph.nodes[chain.exit_node(graph, k)].value.shape[-1]
    entry, exit = graph.point(chain.calls[k], "in", chain.entry), graph.point(chain.calls[k], "out", chain.exit)
    layer, number = chain.label(graph, k)
    here = tuple(s for s in seams if graph.is_inside(s.call, chain.calls[k]))
    block = Block(call.path, entry, exit, layer=layer, stack=chain.stack, call=number)
    parts = BlockParts(block)
    parts.taps += [Tap(block.site("resid_pre"), entry, width=width), Tap(block.site("resid_post"), exit, width=width)]
    try:
        walk = Walk(graph, chain.calls[k], chain.entry_node(graph, k), chain.exit_node(graph, k), norms)
    except NotWalkable as reason:
        for kind in (*TERM_KINDS, *HEAD_KINDS):
            parts.refuse(kind, f"the stream could not be followed through block {call.path}: {reason}")
        return parts
    roles = _roles(graph, chain, k, walk)
    contributions = tuple(
        Contribution(
            role,
            graph.point(term.call, "out", term.slot),
            term.factor,
            _projection_input(walk, term.node),
        )
        for term, role in zip(walk.terms, roles, strict=True)
    )
    hops = tuple(Hop(s.step, s.term, s.factor, s.module) for s in walk.steps)
    mixers = [i for i, role in enumerate(roles) if role == "mixer"]
    mlps = [i for i, role in enumerate(roles) if role == "mlp"]
    is_parallel = bool(
        len(mixers) == len(mlps) == 1 and walk.terms[mlps[0]].node not in graph.descendants(walk.terms[mixers[0]].node)
    )
    parts.block = replace(block, contributions=contributions, hops=hops, is_parallel=is_parallel)
    _add_terms(parts, graph, walk, width, roles, chain.calls[k])
    if len(mixers) == 1:
        behind = {node.index for node in graph.ancestors(walk.terms[mixers[0]].node)}
        here = tuple(s for s in here if s.z in behind)
        _add_heads(parts, graph, walk, width, mixers[0], here, chain.calls[k])
    return parts


def _projection_input(walk: Walk, term: int) -> Point | None:
    if (linear := last_linear(walk, term)) is None:
        return None
    return walk.graph.point(linear, "in", next(iter(walk.graph.calls[linear].inputs)))


def _roles(graph: OpGraph, chain: Chain, k: int, walk: Walk) -> list[Role]:
    """What each term does when one position of the stream, or of another sequence that the block is given, is changed.

    A mixer moves at other positions; "cross" does when the other sequence is changed; "extra" moves with the other
    sequence at the same position; an MLP does neither.
    """
    call = graph.calls[chain.calls[k]]
    others = [
        (slot, node)
        for slot, node in call.inputs.items()
        if slot != chain.entry and graph.source(node) != walk.entry and graph.nodes[node].value.ndim == 3
        if graph.nodes[node].value.is_floating_point() and len(graph.nodes[node].value) == walk.shape[0]
    ]
    roles: list[Role] = ["mixer" if mixes else "mlp" for _, mixes in _moves(graph, chain, k, walk, chain.entry)]
    for slot, _ in others:
        for i, (moves, mixes) in enumerate(_moves(graph, chain, k, walk, slot)):
            if moves and roles[i] == "mlp":
                roles[i] = "cross" if mixes else "extra"
    return roles


def _moves(graph: OpGraph, chain: Chain, k: int, walk: Walk, changed: int | str) -> list[tuple[bool, bool]]:
    """For each term, earlier terms held: does it move, and at other positions, when one argument changes at one?

    Movement elsewhere is confirmed by a second change, two rows of the batch swapped at the position: linear maps that
    round all of their input by its largest value (quantised ones) move every position with one, but not by a swap.
    """
    call = graph.calls[chain.calls[k]]
    entry = graph.point(chain.calls[k], "in", changed)
    points = [graph.point(t.call, "out", t.slot) for t in walk.terms]
    recorded = [graph.nodes[t.node].value.reshape(walk.shape) for t in walk.terms]
    order = sorted(range(len(points)), key=lambda i: walk.terms[i].node)
    answers = [(False, False)] * len(points)
    width = graph.nodes[call.inputs[changed]].value.shape[-1]
    noise = torch.randn(width, generator=torch.Generator().manual_seed(1))

    def nudged(x: Tensor) -> Tensor:
        changed = x.clone()
        changed[:, POSITION] += (noise.to(x) * x[:, POSITION].norm(dim=-1, keepdim=True) / noise.norm()).to(x)
        return changed

    def same(x: Tensor) -> Tensor:
        return x.clone()

    for place, i in enumerate(order):

        def moved(change: Callable, hold: Callable, place: int = place, i: int = i) -> tuple[bool, bool]:
            seen: list[Tensor] = []
            held = {points[j]: lambda x, j=j: hold(recorded[j]).to(x).reshape(x.shape) for j in order[:place]}
            hooks = {entry: change, **held, points[i]: lambda x: seen.append(x.detach().clone())}
            args, kwargs = graph.arguments(call)
            with plain_hooks(graph.model, hooks, calls_before=graph.calls_before(chain.calls[k])):
                call.module(*args, **kwargs)
            distance = (seen[0].reshape(recorded[i].shape) - recorded[i]).abs().flatten(2).amax(-1)
            least = MOVED * recorded[i].abs().max()
            at_all = bool(distance.max() > least)
            distance[:, POSITION] = 0
            return at_all, bool(distance.max() > least)

        moves, mixes = moved(nudged, same)
        if mixes and _can_swap(graph.nodes[call.inputs[changed]].value):
            _, mixes = moved(_swapped, _swapped)
        answers[i] = moves, mixes
    return answers


def _swapped(x: Tensor) -> Tensor:
    """The first two rows of the batch change places at the position."""
    changed = x.clone()
    changed[:2, POSITION] = x[:2, POSITION].flip(0)
    return changed


def _can_swap(x: Tensor) -> bool:
    """Whether the two rows differ there by about as much as they hold."""
    a, b = x[0, POSITION].float(), x[1, POSITION].float()
    return bool((a - b).norm() > 0.1 * a.norm())


def _add_terms(parts: BlockParts, graph: OpGraph, walk: Walk, width: int, roles: list[Role], block: int) -> None:
    by_role = {role: [i for i, found in enumerate(roles) if found == role] for role in TERM_OF_ROLE}
    mixers, mlps = by_role["mixer"], by_role["mlp"]
    for role, found in by_role.items():
        kind = TERM_OF_ROLE[role]
        if role in ("cross", "extra") and not found:
            continue
        if len(found) == 1:
            point = parts.block.contributions[found[0]].point
            term = walk.terms[found[0]]
            tapped = graph.nodes[graph.calls[term.call].outputs[term.slot]].value
            rows_of = parts.block.entry if tapped.ndim == 2 else None
            factor = term.factor
            parts.taps.append(Tap(parts.block.site(kind), point, width=width, factor=factor, rows_of=rows_of))
        else:
            what = WHAT_ROLES_DO[role]
            parts.refuse(kind, f"{len(found)} of the terms of block {parts.block.path} {what}; one was expected")
    if len(mlps) == 1 and (linear := last_linear(walk, walk.terms[mlps[0]].node)) is not None:
        slot, node = next(iter(graph.calls[linear].inputs.items()))
        value = graph.nodes[node].value
        if value.ndim == 3 and value.shape[:2] == walk.shape[:2]:
            point = graph.point(linear, "in", slot)
            parts.taps.append(Tap(parts.block.site("mlp_act"), point, width=value.shape[-1]))
        else:
            reason = f"the MLP's last linear map gets a tensor of shape {tuple(value.shape)}"
            parts.refuse("mlp_act", reason)
    else:
        what = f"{len(mlps)} MLPs" if len(mlps) != 1 else "an MLP whose output several maps add up to, as experts do"
        parts.refuse("mlp_act", f"block {parts.block.path} has {what}; one last linear map was expected")
    _add_resid_mid(parts, graph, walk, width, mixers, mlps, block)


def _add_resid_mid(
    parts: BlockParts, graph: OpGraph, walk: Walk, width: int, mixers: list[int], mlps: list[int], block: int
) -> None:
    site = parts.block.site("resid_mid")
    if len(mixers) != 1 or len(mlps) != 1:
        parts.refuse(
            "resid_mid", f"block {parts.block.path} has {len(mixers)} mixers and {len(mlps)} MLPs, not 1 and 1"
        )
        return
    if parts.block.is_parallel:
        parts.refuse("resid_mid", "attention and MLP are added in parallel; there is no stream between them")
        return
    steps = walk.steps
    at_mixer = next(i for i, s in enumerate(steps) if s.term == mixers[0])
    at_mlp = next(i for i, s in enumerate(steps) if s.term == mlps[0])
    middle = steps[at_mlp].before
    if at_mlp < at_mixer:
        parts.refuse("resid_mid", "the MLP comes before the mixer in this block")
        return
    if made := walk.makers.get(middle):
        index, slot = min(made, key=lambda m: graph.calls[m[0]].path.count("."))
        parts.taps.append(Tap(site, graph.point(index, "out", slot), width=width))
        return
    between = steps[at_mixer + 1 : at_mlp]
    readers = [
        (i, slot)
        for i, call in enumerate(graph.calls)
        if graph.is_inside(i, block) and i != block
        for slot, node in call.inputs.items()
        if graph.source(node) == graph.source(middle)
    ]
    if not readers or any(s.step != "scale" for s in between):
        parts.refuse("resid_mid", "no module takes or returns the stream between mixer and MLP")
        return
    factor = walk.terms[mixers[0]].factor
    for step in between:
        factor *= step.factor
    through = str(parts.block.site("attn_out"))
    parts.taps.append(Tap(site, graph.point(readers[0][0], "in", readers[0][1]), None, None, width, through, factor))


def _add_heads(
    parts: BlockParts,
    graph: OpGraph,
    walk: Walk,
    width: int,
    mixer: int,
    seams: tuple[SeamRecord, ...],
    block: int,
) -> None:
    site = parts.block.site
    linear = last_linear(walk, walk.terms[mixer].node)
    seam = seams[0] if len(seams) == 1 else None
    z_tap, columns = _z_tap(graph, site("z"), linear, seam)
    if z_tap is None:
        reason = "no split into heads was found before the mixer's output projection"
        if linear is None:
            reason = "no split into heads was found: the mixer's output is not made by one linear map alone"
        for kind in ("z", "head_out"):
            parts.refuse(kind, reason)
    else:
        parts.taps.append(z_tap)
        slot = next(iter(graph.calls[linear].outputs))
        out = graph.point(linear, "out", slot)
        parts.taps.append(Tap(site("head_out"), out, columns, z_tap.head_count, width, through=out.module))
    if seam is None:
        for kind in ("q", "k", "v", "q_rot", "k_rot", "pattern"):
            parts.refuse(
                kind,
                "this model's attention does not go through transformers' attention interface"
                if not seams
                else f"the block calls the attention interface in {len(seams)} modules",
            )
        return
    q_heads = graph.nodes[seam.q].value.shape[1]
    parts.taps.append(Tap(site("pattern"), seam.point("pattern"), head_count=q_heads))
    for kind, node in (("q", seam.q), ("k", seam.k), ("v", seam.v)):
        _, heads, _, d_head = graph.nodes[node].value.shape
        found = before_rotation(graph, seam.call, node, source=walk.entry)
        at_seam = seam.point(kind)
        if found is not None:
            parts.taps.append(Tap(site(kind), found[0], found[1], heads, d_head))
        elif kind == "v":
            parts.taps.append(Tap(site(kind), at_seam, None, heads, d_head))
        else:
            parts.refuse(
                kind,
                f"no module output holds the {kind} heads as columns; {kind}_rot is available",
            )
        if kind != "v":
            parts.taps.append(Tap(site(f"{kind}_rot"), at_seam, None, heads, d_head))


def _z_tap(
    graph: OpGraph, site: Site, linear: int | None, seam: SeamRecord | None
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
            return Tap(site, seam.point("z"), None, heads, d_head), columns
    if (axis := head_axis(graph, into)) is None:
        return None, None
    columns = HeadColumns(torch.arange(value.shape[-1]).view(*axis))
    return Tap(site, graph.point(linear, "in", slot), columns, *axis), columns

"""The parts of one block: contributions with roles, output projection, head layout, and where each site is tapped.

Roles come from a test, not from names: the stream is changed at one position where a branch reads it, earlier terms
held at their recorded values; a branch that then moves at other positions is a mixer, one that does not is the MLP. A
mixer is attention if there is a softmax over positions, or a call of the attention interface, on the way to its term.
"""

from collections.abc import Sequence
from dataclasses import replace

from microtome.capture.anatomy import TERM_OF_ROLE, Block, Contribution, Hop, Point, Role, Tap
from microtome.capture.attention_ops import attention_ops
from microtome.capture.causality import terms_move
from microtome.capture.found_parts import BlockParts, replay
from microtome.capture.head_layout import SeamRecord
from microtome.capture.linear_maps import last_linear
from microtome.capture.mixer_heads import MixerHeads
from microtome.capture.opgraph import OpGraph, Ref, map_tensors
from microtome.capture.routers import Router, find_router
from microtome.capture.trunk import Chain, Norms, NotWalkable, Walk

WHAT_ROLES_DO = {
    "attention": "mix positions by a softmax over them",
    "mixer": "mix positions in another way",
    "mlp": "do not mix positions",
    "cross": "read another sequence",
    "extra": "read another input at their own position",
}
TERM_KINDS = ("resid_mid", "attn_out", "mlp_out", "mlp_act")
MIXERS = ("attention", "mixer")
HEAD_KINDS = ("q", "k", "q_rot", "k_rot", "v", "z", "head_out", "pattern")


def block_parts(graph: OpGraph, chain: Chain, k: int, seams: list[SeamRecord], norms: Norms) -> BlockParts:
    """What one recorded forward and a few replays of block k show of its parts; nothing is proved yet."""
    parts = _stream(graph, chain, k)
    block = parts.block
    here = tuple(s for s in seams if graph.is_inside(s.call, chain.calls[k]))
    try:
        walk = Walk(graph, chain.calls[k], chain.entry_node(graph, k), chain.exit_node(graph, k), norms)
    except NotWalkable as reason:
        parts.taps.clear()
        for kind in ("resid_pre", "resid_post", *TERM_KINDS, *HEAD_KINDS):
            parts.refuse(kind, f"the stream could not be followed through the block: {reason}")
        return parts
    if not walk.terms:
        parts.taps.clear()
        for kind in ("resid_pre", "resid_post"):
            parts.refuse(kind, "the block adds nothing to what it is given: there is no residual stream")
    behind = [walk.behind(i) for i in range(len(walk.terms))]
    ops = [attention_ops(graph, nodes, walk.shape) for nodes in behind]
    seams_of = [tuple(s for s in here if any(n.index == s.z for n in nodes)) for nodes in behind]
    roles: list[Role] = [
        "attention" if role == "mixer" and (ops[i] or seams_of[i]) else role
        for i, role in enumerate(_roles(parts, graph, chain, k, walk))
    ]
    contributions = tuple(
        Contribution(
            role,
            graph.point(term.call, "out", term.slot),
            term.factor.number,
            _projection_input(walk, term.node),
            term.factor.vectors,
        )
        for term, role in zip(walk.terms, roles, strict=True)
    )
    hops = tuple(Hop(s.step, s.term, s.factor.number, s.module, s.factor.vectors) for s in walk.steps)
    mixers = [i for i, role in enumerate(roles) if role in MIXERS]
    mlps = [i for i, role in enumerate(roles) if role == "mlp"]
    is_parallel = False
    if len(mixers) == len(mlps) == 1:
        mixer, mlp = walk.terms[mixers[0]].node, walk.terms[mlps[0]].node
        is_parallel = mlp not in graph.descendants(mixer) and mixer not in graph.descendants(mlp)
    parts.block = replace(block, contributions=contributions, hops=hops, is_parallel=is_parallel)
    width = graph.nodes[chain.exit_node(graph, k)].value.shape[-1]
    _add_terms(parts, graph, walk, width, roles, chain.calls[k])
    with_heads = [i for i in mixers if roles[i] == "attention"] or mixers
    if len(with_heads) == 1:
        i = with_heads[0]
        heads = MixerHeads(parts, graph, walk, width, i, chain, k)
        heads.add_z(seams_of[i])
        heads.add_inputs(seams_of[i], ops[i])
    return parts


def _stream(graph: OpGraph, chain: Chain, k: int) -> BlockParts:
    """Where the stream enters and leaves block k."""
    call = graph.calls[chain.calls[k]]
    into, out = (graph.nodes[node(graph, k)].value.shape[-1] for node in (chain.entry_node, chain.exit_node))
    stream = graph.source(chain.entry_node(graph, k))
    inputs = tuple(graph.point(chain.calls[k], "in", s) for s, n in call.inputs.items() if graph.source(n) == stream)
    given: list[int] = []
    map_tensors((call.args, call.kwargs), lambda r: given.append(r.node), Ref)
    is_nested = sum(graph.source(n) == stream for n in given) > len(inputs)  # once more, inside a tuple or dict
    entry = inputs[0] if len(inputs) == 1 else _maker(graph, chain, k)
    exit = graph.point(chain.calls[k], "out", chain.exit)
    layer, number = chain.label(graph, k)
    block = Block(call.path, entry or inputs[0], exit, layer=layer, stack=chain.stack, call=number, inputs=inputs)
    parts = BlockParts(block)
    parts.taps.append(Tap(block.site("resid_post"), exit, width=out))
    if is_nested:
        parts.refuse("resid_pre", "the block is given the stream a second time inside a tuple or dict")
    elif entry is not None:
        parts.taps.append(Tap(block.site("resid_pre"), entry, width=into))
    else:
        parts.refuse("resid_pre", f"the block is given the stream {len(inputs)} times, and no module returns it")
    return parts


def _maker(graph: OpGraph, chain: Chain, k: int) -> Point | None:
    """Where the stream that a block is given at several arguments is made: the one place to edit it."""
    if k > 0:
        return graph.point(chain.calls[k - 1], "out", chain.exit)
    node, shape = graph.source(chain.entry_node(graph, k)), graph.nodes[chain.entry_node(graph, k)].value.shape
    for number, call in enumerate(graph.calls[: chain.calls[k]]):
        for slot, made in call.outputs.items():
            if graph.source(made) == node and graph.nodes[made].value.shape == shape:
                return graph.point(number, "out", slot)
    return None


def _projection_input(walk: Walk, term: int) -> Point | None:
    if (linear := last_linear(walk, term)) is None:
        return None
    return walk.graph.point(linear, "in", next(iter(walk.graph.calls[linear].inputs)))


def _roles(parts: BlockParts, graph: OpGraph, chain: Chain, k: int, walk: Walk) -> list[Role]:
    """What each term does when one position of the stream, or of another sequence that the block is given, is changed.

    A mixer moves at other positions; "cross" does when the other sequence is changed; "extra" moves with the other
    sequence at the same position; an MLP does neither.
    """
    call = graph.calls[chain.calls[k]]
    others = [
        (slot, node)
        for slot, node in call.inputs.items()
        if graph.source(node) != walk.entry and graph.nodes[node].value.ndim == 3
        if graph.nodes[node].value.is_floating_point() and len(graph.nodes[node].value) == walk.shape[0]
    ]
    run = replay(graph, chain.calls[k])
    order = sorted(walk.terms, key=lambda t: t.node)
    recorded = {graph.point(t.call, "out", t.slot): graph.nodes[t.node].value.reshape(walk.shape) for t in order}
    in_order = [walk.terms.index(t) for t in order]

    def moves(inputs: Sequence[Point]) -> list[tuple[int, tuple[bool, bool]]]:
        return list(zip(in_order, terms_move(run, inputs, recorded), strict=True))

    roles: list[Role] = ["mlp"] * len(order)
    for i, (_, mixes) in moves(parts.block.inputs):
        roles[i] = "mixer" if mixes else "mlp"
    for slot, _ in others:
        for i, (moved, mixes) in moves([graph.point(chain.calls[k], "in", slot)]):
            if moved and roles[i] == "mlp":
                roles[i] = "cross" if mixes else "extra"
    return roles


def _add_terms(parts: BlockParts, graph: OpGraph, walk: Walk, width: int, roles: list[Role], block: int) -> None:
    by_role = {role: [i for i, found in enumerate(roles) if found == role] for role in TERM_OF_ROLE}
    mixers, mlps = by_role["attention"] + by_role["mixer"], by_role["mlp"]
    for role, found in by_role.items():
        kind = TERM_OF_ROLE[role]
        if found and _are_side_by_side(graph, walk, found):
            parts.taps.append(_term_tap(parts, graph, walk, width, found, kind))
        elif role == "attention" and not found:
            without = "no term of the block mixes positions"
            if mixers:
                without += " by a softmax over them; what its mixer adds is mixer_out"
            parts.refuse(kind, without)
        elif found or role == "mlp":
            what = WHAT_ROLES_DO[role]
            parts.refuse(kind, f"{len(found)} terms of the block {what}; one was expected")
    _add_mlp_act(parts, graph, walk, mlps)
    _add_resid_mid(parts, graph, walk, width, mixers, mlps, block)
    if any(tap.site.kind == "mlp_act" for tap in parts.taps):  # neurons that alone decide: no experts
        return
    routers = [router for i in mlps if (router := find_router(graph, walk.behind(i))) is not None]
    if len(routers) == 1:
        _add_router(parts, graph, walk, routers[0])


def _are_side_by_side(graph: OpGraph, walk: Walk, terms: list[int]) -> bool:
    """Whether terms count as one: none depends on another, and the same vectors scale them."""
    nodes = [walk.terms[i].node for i in terms]
    depends = any(b in graph.descendants(a) for a in nodes for b in nodes if a != b)
    shapes = {graph.nodes[n].value.shape for n in nodes}
    vectors = {walk.terms[i].factor.vectors for i in terms}
    is_alike = shapes == {walk.shape} and len(vectors) == 1
    return not depends and (len(terms) == 1 or is_alike)


def _term_tap(parts: BlockParts, graph: OpGraph, walk: Walk, width: int, terms: list[int], kind: str) -> Tap:
    *others, last = sorted(terms, key=lambda i: walk.terms[i].node)
    term, point = walk.terms[last], parts.block.contributions[last].point
    tapped = graph.nodes[graph.calls[term.call].outputs[term.slot]].value
    return Tap(
        parts.block.site(kind),
        point,
        width=width,
        factor=term.factor.number,
        vectors=term.factor.vectors,
        rows_of=parts.block.entry if tapped.ndim == 2 else None,
        others=tuple(
            (parts.block.contributions[i].point, walk.terms[i].factor.number / term.factor.number) for i in others
        ),
    )


def _add_mlp_act(parts: BlockParts, graph: OpGraph, walk: Walk, mlps: list[int]) -> None:
    linear = last_linear(walk, walk.terms[mlps[0]].node) if len(mlps) == 1 else None
    if linear is None:
        what = f"{len(mlps)} MLPs" if len(mlps) != 1 else "an MLP whose output several maps add up to, as experts do"
        parts.refuse("mlp_act", f"the block has {what}; one last linear map was expected")
        return
    slot, node = next(iter(graph.calls[linear].inputs.items()))
    value = graph.nodes[node].value
    is_flat = value.ndim == 2 and len(value) == walk.shape[:2].numel()
    if not is_flat and (value.ndim != 3 or value.shape[:2] != walk.shape[:2]):
        parts.refuse("mlp_act", f"the MLP's last linear map gets a tensor of shape {tuple(value.shape)}")
        return
    rows_of = parts.block.entry if is_flat else None
    point = graph.point(linear, "in", slot)
    parts.taps.append(Tap(parts.block.site("mlp_act"), point, width=value.shape[-1], rows_of=rows_of))


def _add_router(parts: BlockParts, graph: OpGraph, walk: Walk, router: Router) -> None:
    value = next(
        graph.nodes[call.outputs[router.logits.slot]].value
        for number, call in enumerate(graph.calls)
        if graph.point(number, "out", router.logits.slot) == router.logits
    )
    is_flat = value.ndim == 2 and len(value) == walk.shape[:2].numel()
    if not is_flat and (value.ndim != 3 or value.shape[:2] != walk.shape[:2]):
        parts.refuse("router", f"the router returns logits of shape {tuple(value.shape)}")
        return
    if router.input is not None and router.experts > walk.shape[-1]:
        parts.refuse("router", f"edits act on the router's input, {walk.shape[-1]} wide, for {router.experts} experts")
        return
    rows_of = parts.block.entry if is_flat else None
    site = parts.block.site("router")
    parts.taps.append(Tap(site, router.logits, width=router.experts, edited_at=router.input, rows_of=rows_of))


def _add_resid_mid(
    parts: BlockParts, graph: OpGraph, walk: Walk, width: int, mixers: list[int], mlps: list[int], block: int
) -> None:
    site = parts.block.site("resid_mid")
    if len(mixers) != 1 or len(mlps) != 1:
        parts.refuse("resid_mid", f"the block has {len(mixers)} mixers and {len(mlps)} MLPs, not 1 and 1")
        return
    if parts.block.is_parallel:
        parts.refuse("resid_mid", "attention and MLP are added in parallel; there is no stream between them")
        return
    steps = walk.steps
    at_mixer = next(i for i, s in enumerate(steps) if s.term == mixers[0])
    at_mlp = next(i for i, s in enumerate(steps) if s.term == mlps[0])
    if at_mlp < at_mixer:
        parts.refuse("resid_mid", "the MLP comes before the mixer in this block")
        return
    routed = {r.input for i in mlps if (r := find_router(graph, walk.behind(i))) is not None}
    for after in range(at_mlp, at_mixer, -1):  # the latest stream between them that a module returns or takes
        if any(step.step == "add" for step in steps[after:at_mlp]):
            break
        middle = steps[after - 1].after
        tapped = {"width": width, "after": after}
        if made := walk.makers.get(middle):
            index, slot = min(made, key=lambda m: graph.calls[m[0]].path.count("."))
            is_flat = graph.nodes[graph.calls[index].outputs[slot]].value.ndim == 2
            rows_of = parts.block.entry if is_flat else None
            parts.taps.append(Tap(site, graph.point(index, "out", slot), rows_of=rows_of, **tapped))
            return
        reading = [
            (i, slot, node)
            for i, call in enumerate(graph.calls)
            if graph.is_inside(i, block) and i != block
            for slot, node in call.inputs.items()
            if graph.source(node) == graph.source(middle)
        ]
        readers = [  # outermost: what is inside one of them reads what it was given
            (graph.point(i, "in", slot), graph.nodes[node].value.ndim == 2)
            for i, slot, node in reading
            if not any(graph.is_inside(i, other) for other, _, _ in reading if other != i)
        ]
        parts.mid_readers = [point for point, _ in readers]
        readers = [reader for reader in readers if reader[0] not in routed]  # a router's input is edited by itself
        added = max(i for i, step in enumerate(steps[:after]) if step.term is not None)
        between = steps[added + 1 : after]
        if readers and all(step.step in ("scale", "shift") for step in between):
            factor = walk.terms[steps[added].term].factor
            for step in between:
                factor = factor * step.factor if step.step == "scale" else factor
            through = str(parts.block.site(TERM_OF_ROLE[parts.block.contributions[steps[added].term].role]))
            point, is_flat = readers[0]
            rows_of = parts.block.entry if is_flat else None
            scaled = {"factor": factor.number, "vectors": factor.vectors}
            parts.taps.append(Tap(site, point, through=through, rows_of=rows_of, **tapped, **scaled))
            return
    parts.refuse("resid_mid", "no module takes or returns the stream between mixer and MLP")

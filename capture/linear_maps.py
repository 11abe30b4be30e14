"""Which module call is a linear map with bias: told by its place on the op graph and by what it does, not by its class.

Adapters and quantised linears hide their linear op or hold several. A call counts if it takes one tensor and
either is a linear op on that very tensor, or behaves as a pointwise affine map. The outermost such call is the map: for
a LoRA linear the adapted module, not the base layer or one of the adapter's factors, whether merged or switched off.
"""

import torch
from torch import Tensor

from microtome.capture.anatomy import Point
from microtome.capture.opgraph import DIVISIONS, MULTIPLICATIONS, Call, Node, OpGraph, Ref, map_tensors
from microtome.capture.precision import precision
from microtome.capture.trunk import ADDITIONS, Walk

LINEAR_OPS = {"linear", "addmm", "matmul", "__matmul__", "mm"}
# ops of one data tensor that keep its numbers, order or type aside
PASSED = {"to", "type", "type_as", "float", "half", "bfloat16", "double", "__getitem__", "narrow", "split", "chunk"} | {
    *("transpose", "permute", "movedim", "swapaxes", "t", "T", "mT", "neg", "__neg__")
}
EXACT, ROUNDED = 1e-4, 5e-2  # departure from an affine map, as a share of its largest value; a GELU departs by 0.1


def last_linear(walk: Walk, term: int) -> int | None:
    """The module call that is the last linear map before a term leaves the block, walking back from the term.

    Norms, casts, numbers and views are passed; anything else that changes the value, and any place where two tensors
    that depend on the stream meet, ends the walk. So the term depends on the stream through this call alone.
    """
    graph, index = walk.graph, term
    while graph.is_inside(graph.nodes[index].call, walk.block):
        if (call := linear_call(graph, index, within=walk.block)) is not None:
            return call
        if (before := _passed(walk, index)) is None:
            return None
        index = before
    return None


def _passed(walk: Walk, index: int) -> int | None:
    """The node before one step of the walk, None where the walk ends."""
    if (norm := walk.norm_made(index)) is not None:
        return norm[1]
    node = walk.graph.nodes[index]
    data = [p for p in node.parents if p in walk.inside]
    same = [p for p in data if node.op != "alias" and walk.graph.same_value(p, index)]
    if len(same) == 1:
        return same[0]
    passes = node.op in PASSED | ADDITIONS.keys() | MULTIPLICATIONS or (
        node.op in DIVISIONS and node.parents[:1] == tuple(data)
    )
    return data[0] if len(data) == 1 and passes else None


def linear_call(graph: OpGraph, index: int, *, within: int) -> int | None:
    """The outermost module call inside another whose output is this node and which is a linear map of one tensor."""
    found = None
    for number in range(len(graph.calls) - 1, within, -1):  # inner calls come after outer ones
        call = graph.calls[number]
        if list(call.outputs) != [None] or call.outputs[None] != index or not graph.is_inside(number, within):
            continue
        if (into := _only_input(call)) is None:
            continue
        if _is_linear_op(graph, index, into) or _behaves_as_linear(graph, call, into):
            found = number
        elif found is not None:
            break
    return found


def _only_input(call: Call) -> int | None:
    refs: list[int] = []
    map_tensors((call.args, call.kwargs), lambda ref: refs.append(ref.node), Ref)
    return refs[0] if len(refs) == 1 and len(call.inputs) == 1 else None


def _is_linear_op(graph: OpGraph, index: int, into: int) -> bool:
    """Whether the node is a linear op on one tensor of the data, reached from it by views alone."""
    node = graph.nodes[graph.source(index)]
    if node.op not in LINEAR_OPS:
        return False
    depends = graph.descendants(graph.source(into))
    data = [p for p in node.parents if p in depends]
    return len(data) == 1 and graph.source(data[0]) == graph.source(into)


def _behaves_as_linear(graph: OpGraph, call: Call, into: int) -> bool:
    """`behaves_as_linear`, remembered per module."""
    if id(call.module) not in graph.linear:
        limit = EXACT if precision(call.module) == "full" else ROUNDED
        graph.linear[id(call.module)] = behaves_as_linear(call, graph.nodes[into].value, limit)
    return graph.linear[id(call.module)]


def behaves_as_linear(call: Call, value: Tensor, limit: float) -> bool:
    """Whether the called module is a pointwise affine map that mixes coordinates, up to a share of its largest value.

    Checked by running it: `f(a) + f(b) - f(0) = f(a + b)`; one moved position leaves the others; one moved coordinate
    moves others.

    Args:
        call: a recorded call with one tensor argument.
        value: that argument, `[..., position, width]`.
        limit: largest departure, as a share of the largest value that `f` adds to `f(0)`.
    """
    if not value.is_floating_point() or value.ndim < 2 or value.numel() == 0 or value.shape[-2] < 2:
        return False
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
    other = noise * value.float().pow(2).mean().sqrt().to(value)

    def run(x: Tensor) -> Tensor:
        args, kwargs = map_tensors((call.args, call.kwargs), lambda _: x.clone(), Ref)
        return call.module(*args, **kwargs).double()

    with torch.no_grad():
        zero, first = run(torch.zeros_like(value)), run(value)
        if zero.shape[:-1] != value.shape[:-1]:
            return False
        both = run(value + other)
        largest = float((both - zero).abs().max())
        if not float((first + run(other) - zero - both).abs().max()) <= limit * largest or largest == 0:
            return False
        moved = value.clone()
        moved[..., 0, 0] += 3 * other.abs().max()
        change = (run(moved) - first).abs()
    elsewhere = change.clone()
    elsewhere[..., 0, :] = 0
    mixes = int((change[..., 0, :].flatten(0, -2).amax(0) > 1e-3 * change.max()).sum()) > 1
    return mixes and float(elsewhere.max()) <= limit * max(largest, float(change.max()))


def linear_maps(graph: OpGraph, behind: list[Node], before: int, block: int) -> list[Point]:
    """Outputs of the modules inside a block that hold one linear map each, among nodes earlier than one of them."""
    found = {}
    for node in behind:
        if node.op in LINEAR_OPS and node.index < before and node.call != block:
            call = graph.calls[node.call]
            if list(call.outputs) == [None] and graph.source(call.outputs[None]) == graph.source(node.index):
                found[graph.point(node.call, "out", None)] = None
    return list(found)

"""What lies between the last block and the model's output: final norm, unembedding, factor and soft cap.

Read off the recorded op graph: back from the output through multiplications, `tanh` and slices to the last linear map,
then to the norm that feeds it. `logits = cap * tanh(factor * W norm(resid) / cap)`.
"""

from dataclasses import dataclass

from torch import Tensor

from microtome.capture.anatomy import Point
from microtome.capture.linear_maps import linear_call
from microtome.capture.opgraph import DIVISIONS, MULTIPLICATIONS, OpGraph
from microtome.capture.trunk import Chain, Norms


@dataclass(frozen=True)
class Tail:
    """The end of the model.

    Attributes:
        output: where the model returns its first tensor, at the root module.
        norm: output of the final norm; None if the last block's output is used as it is, or more lies between.
        unembedding: path of the linear map to the vocabulary, None for a model without one.
        factor: number times the unembedding's output.
        cap: c of a soft cap, or None.
        reason: why there is no lens, if there is none.
    """

    output: Point
    norm: Point | None = None
    unembedding: str | None = None
    factor: float = 1.0
    cap: float | None = None
    reason: str = ""


def find_tail(graph: OpGraph, chain: Chain, norms: Norms) -> Tail:
    """The tail of the recorded model: see the module's docstring."""
    root = graph.calls[0]
    slot, output = next((s, n) for s, n in root.outputs.items() if graph.nodes[n].value.is_floating_point())
    point = graph.point(0, "out", slot)
    last = graph.source(chain.exit_node(graph, len(chain.calls) - 1))
    shape = graph.nodes[output].value.shape
    stream = graph.nodes[chain.exit_node(graph, len(chain.calls) - 1)].value.shape
    if shape[:2] != stream[:2]:
        reason = f"the model returns {list(shape)} for a stream {list(stream)}: not a value for each position"
        return Tail(point, None, reason=reason)
    factor, cap, index = _unscaled(graph, output)
    if index > last and (made_by := _linear_before(graph, index)) is not None:
        unembedding = graph.calls[made_by]
        feeds = next(iter(unembedding.inputs.values()))
        norm = _norm_between(graph, last, feeds, norms)
        if norm is None and graph.source(feeds) != last:
            between = {graph.calls[n.call].path for n in graph.ancestors(feeds) if n.index > last and n.call > 0}
            reason = f"more than a norm lies between the last block and the unembedding: {', '.join(sorted(between))}"
            return Tail(point, None, unembedding.path, factor, cap, reason)
        return Tail(point, norm, unembedding.path, factor, cap)
    norm = _norm_between(graph, last, output, norms)
    return Tail(point, norm, reason="this model has no unembedding and returns the last block's output as it is")


def _linear_before(graph: OpGraph, index: int) -> int | None:
    """The module call that is a linear map and returns a node, whatever its shape there."""
    outputs = {o for call in graph.calls[1:] if (o := call.outputs.get(None)) is not None and o >= index}
    same = sorted(o for o in outputs if graph.source(o) == index)
    return next((call for o in same if (call := linear_call(graph, o, within=0)) is not None), None)


def _norm_between(graph: OpGraph, last: int, index: int, norms: Norms) -> Point | None:
    node = graph.source(index)
    for number, call in enumerate(graph.calls):
        for slot, made in call.outputs.items():
            inputs = [n for n in call.inputs.values() if graph.source(n) == last]
            if graph.source(made) == node and inputs and norms.is_norm(call, graph.nodes[inputs[0]].value):
                return graph.point(number, "out", slot)
    return None


def _unscaled(graph: OpGraph, index: int) -> tuple[float, float | None, int]:
    """Walk back through numbers and one tanh: the factor (cap divided out), the cap, and the node underneath."""
    before, after, is_capped = 1.0, 1.0, False
    while True:
        source = graph.source(index)
        node = graph.nodes[source]
        tensors = [p for p in node.parents if graph.nodes[p].value.numel() > 1]
        if node.op in MULTIPLICATIONS | DIVISIONS and len(tensors) == 1:
            fixed = [float(graph.nodes[p].value) for p in node.parents if graph.nodes[p].value.numel() == 1]
            (number,) = [*node.numbers, *fixed] or [1.0]
            number = number if node.op in MULTIPLICATIONS else 1 / number
            if is_capped or "tanh" not in _ops_back(graph, source):
                before *= number
            else:
                after *= number
        elif node.op == "tanh" and len(tensors) == 1:
            is_capped = True
        else:
            return before * after, after if is_capped else None, source
        index = tensors[0]


def _ops_back(graph: OpGraph, index: int) -> set[str]:
    ops = set()
    while len(tensors := [p for p in graph.nodes[index].parents if graph.nodes[p].value.numel() > 1]) == 1:
        ops.add(graph.nodes[index].op)
        index = tensors[0]
    return ops


def token_embedding(graph: OpGraph, ids: Tensor | None) -> Point | None:
    """The module that looks the token ids up: the one around the first embedding op whose indices are the ids.

    Where the model's own input embedding (`get_input_embeddings`) is around that op, as an adapted one, it is that.
    """
    if ids is None:
        return None
    declared = graph.model.get_input_embeddings() if hasattr(graph.model, "get_input_embeddings") else None
    own = [i for i, call in enumerate(graph.calls) if call.module is declared and list(call.outputs) == [None]]
    for number in own:
        given = [graph.nodes[n].value for n in graph.calls[number].inputs.values()]
        if len(given) == 1 and given[0].numel() == ids.numel() and given[0].flatten().equal(ids.flatten()):
            return graph.point(number, "out", None)
    for node in graph.nodes:
        if node.op == "embedding" and node.call > 0:
            indices = graph.nodes[node.parents[0]].value
            around = [i for i, c in enumerate(graph.calls) if c.module is declared and graph.is_inside(node.call, i)]
            number = (around or [node.call])[0]
            is_lookup = indices.numel() == ids.numel() and indices.flatten().equal(ids.flatten())
            if is_lookup and list(graph.calls[number].outputs) == [None]:
                return graph.point(number, "out", None)
    return None

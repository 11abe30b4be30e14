"""The router of a mixture of experts on the recorded op graph: the linear map whose outputs choose the experts.

Where the experts' numbers come from (the whole numbers of a top-k, sort or maximum on the way to the MLP's term), back
to the last linear map. Most routers return their logits beside the choice they already made from them, so an edit there
would change nothing; it acts on the router's own input instead: `x + d W^+` gives the logits `x W + b + d`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from microtome.capture.anatomy import Point
from microtome.capture.linear_maps import LINEAR_OPS
from microtome.capture.opgraph import Node, OpGraph, elements

CHOICES = {"topk", "sort", "argsort", "max", "argmax"}


@dataclass(frozen=True)
class Router:
    """A router's logits: where they pass, of how many experts, and its input, if edits must act there."""

    logits: Point
    experts: int
    input: Point | None


def find_router(graph: OpGraph, behind: list[Node]) -> Router | None:
    """The one router behind a term; None if there is none, or several.

    Args:
        graph: the recorded forward.
        behind: nodes that depend on the block's input and on which the term depends, latest first.
    """
    depends = {node.index for node in behind}
    waiting = [n.index for n in behind if n.op in CHOICES and n.value.dtype == torch.int64]
    found: set[int] = set()
    seen: set[int] = set()
    while waiting:
        node = graph.nodes[waiting.pop()]
        if node.index in seen or node.index not in depends:
            continue
        seen.add(node.index)
        if node.op in LINEAR_OPS:
            found.add(node.index)
        else:
            waiting += node.parents
    if len(found) != 1:
        return None
    (node,) = (graph.nodes[index] for index in found)
    call = graph.calls[node.call]
    slot = next((s for s, made in call.outputs.items() if made == node.index), "none")
    if slot == "none" or len(call.inputs) != 1:
        return None
    (into,) = call.inputs
    chooses = slot is not None or len(call.outputs) > 1
    if chooses and _uses_input_otherwise(graph, node):
        return None
    logits = graph.point(node.call, "out", slot)
    return Router(logits, node.value.shape[-1], graph.point(node.call, "in", into) if chooses else None)


def _uses_input_otherwise(graph: OpGraph, linear: Node) -> bool:
    """Whether the module that holds a linear op uses its input for anything else, which an edit there would reach."""
    call = graph.calls[linear.call]
    same = {next(iter(call.inputs.values()))}
    for node in graph.nodes[call.first : call.last]:
        if same.isdisjoint(node.parents) or node.index == linear.index:
            continue
        parents = [p for p in node.parents if p in same]
        if len(node.parents) > 1 or not graph.same_value(parents[0], node.index):
            return True
        same.add(node.index)
    return False


def router_map(module: nn.Module, slot: int | str | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """Weight `[d_model, expert]` and bias `[expert]` of the map from a router's input to its logits.

    Args:
        module: the router; called without its hooks on zero and on the axes.
        slot: which element of its output the logits are.
        like: an input of it, for width, number of axes, dtype and device.
    """
    width = like.shape[-1]
    axes = torch.cat([torch.zeros(1, width), torch.eye(width)]).to(like)
    axes = axes.view(*(1 for _ in range(like.ndim - 2)), width + 1, width)
    logits = dict(elements(module.forward(axes)))[slot].reshape(width + 1, -1)
    return logits[1:] - logits[:1], logits[0]

"""Attention that models compute themselves: softmax over positions and fused attention ops on the recorded op graph.

Where a model does not go through transformers' attention interface, its queries, keys and values are the operands of
these ops: of `scaled_dot_product_attention` directly; of a softmax, back through masks, scales and biases to the
product that made its argument, and forward to the product of the probabilities with the values.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from microtome.capture.opgraph import Node, OpGraph

PRODUCTS = {"matmul", "__matmul__", "bmm", "baddbmm", "einsum"}
SOFTMAXES = {"softmax", "_softmax"}
FUSED = "scaled_dot_product_attention"


@dataclass(frozen=True)
class AttentionOp:
    """One attention: nodes of its queries, keys and values, None where they could not be told, and its query heads."""

    q: int | None
    k: int | None
    v: int | None
    heads: int

    def parts(self, graph: OpGraph) -> list[tuple[str, int, int]]:
        """Name, node and d_head of each operand that is known."""
        known = [("q", self.q, self.q), ("k", self.k, self.q), ("v", self.v, self.v)]
        return [(kind, node, graph.nodes[wide].value.shape[-1]) for kind, node, wide in known if node is not None]


def attention_ops(graph: OpGraph, behind: list[Node], shape: Sequence[int]) -> list[AttentionOp]:
    """Every attention op among the nodes that a term of a block is made from, latest first.

    Args:
        graph: the recorded forward.
        behind: nodes that depend on the block's input and on which the term depends, latest first.
        shape: `[batch, position, width]` of the block's input.
    """
    depends = {node.index for node in behind}
    ops = []
    for node in behind:
        if node.op == FUSED:
            q, k, v = node.parents[:3]
            ops.append(AttentionOp(q, k, v, node.value.shape[1] if node.value.ndim == 4 else 1))
        elif node.op in SOFTMAXES and (heads := _heads_of_softmax(node, shape)):
            ops.append(_around_softmax(graph, node, heads, behind, depends))
    return ops


def _heads_of_softmax(node: Node, shape: Sequence[int]) -> int:
    """Heads of `[batch, head, query, key]` or `[batch * head, query, key]` probabilities; 0 for another softmax."""
    batch, positions = shape[:2]
    if node.value.ndim == 4 and node.value.shape[0] == batch:
        return node.value.shape[1]
    is_square = node.value.ndim == 3 and node.value.shape[1:] == (positions, positions)
    return node.value.shape[0] // batch if is_square and node.value.shape[0] % batch == 0 else 0


def _around_softmax(graph: OpGraph, softmax: Node, heads: int, behind: list[Node], depends: set[int]) -> AttentionOp:
    q, k = _product_before(graph, softmax, depends)
    after = graph.descendants(softmax.index)
    product = next((n for n in reversed(behind) if n.op in PRODUCTS and n.index in after), None)
    v = None
    if product is not None:
        others = [p for p in product.parents if p not in after and p in depends]
        v = others[0] if len(others) == 1 else None
    return AttentionOp(q, k, v, heads)


def _product_before(graph: OpGraph, softmax: Node, depends: set[int]) -> tuple[int | None, int | None]:
    """Queries and keys: the last two operands of the earliest product of two tensors of this stream that has the
    softmax's size, back through ops that keep that size."""
    size = softmax.value.numel()
    waiting, seen = [softmax.index], set[int]()
    products: dict[int, tuple[int, int]] = {}
    while waiting:
        node = graph.nodes[waiting.pop()]
        if node.index in seen:
            continue
        seen.add(node.index)
        pair = [p for p in node.parents if p in depends][-2:]
        if node.op in PRODUCTS and len(pair) == 2:
            products[node.index] = (pair[0], pair[1])
        elif node.op not in PRODUCTS:
            waiting += [p for p in node.parents if p in depends and graph.nodes[p].value.numel() == size]
    return products[min(products)] if products else (None, None)

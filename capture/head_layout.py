"""Which columns of which module output belong to which head, read off a recorded forward.

The attention interface shows q, k, v and z by head. Their values are looked up, bit for bit, among the outputs of the
mixer's modules: a query before rotation is the latest tensor of the query's shape, on the way to it, whose every column
is a column of one module's output. So fused, interleaved and grouped projections need no knowledge of the family.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from microtome.capture.anatomy import HeadColumns, Point
from microtome.capture.opgraph import OpGraph


@dataclass(frozen=True)
class SeamRecord:
    """One call of the attention interface: the calling module and the nodes of q, k, v (key-value heads) and z.

    `call` is the module call in which it was made; `number` counts this module's calls of the interface in one forward,
    None where there is one.
    """

    path: str
    call: int
    q: int
    k: int
    v: int
    z: int
    number: int | None = None

    def point(self, slot: str) -> Point:
        """Where q, k, v, z or the pattern passes by."""
        return Point(self.path, "seam", slot, self.number)


def column_match(columns_of: Tensor, among: Tensor) -> Tensor | None:
    """For each column of `[row, m]` the equal column of `[row, n]`, bit for bit; None if one has none, or several.

    Returns:
        `[m]` int64 column numbers of `among`.
    """
    positions: dict[bytes, int] = {}
    twice: set[bytes] = set()
    for number, column in enumerate(_bytes_of_columns(among)):
        if column in positions:
            twice.add(column)
        positions[column] = number
    found = [positions.get(column, -1) if column not in twice else -1 for column in _bytes_of_columns(columns_of)]
    return None if -1 in found else torch.tensor(found)


def _bytes_of_columns(matrix: Tensor) -> list[bytes]:
    table = matrix.T.contiguous().cpu()
    table = table.view(torch.uint8) if table.dtype != torch.uint8 else table
    return [row.tobytes() for row in table.numpy()]


def before_rotation(graph: OpGraph, mixer: int, rotated: int, *, source: int) -> tuple[Point, HeadColumns] | None:
    """Where a query, key or value lies among the outputs of the mixer's modules, before it is rotated.

    Args:
        graph: the recorded forward.
        mixer: module call to look in.
        rotated: node of q, k or v as the attention interface got it, `[batch, head, position, d_head]`.
        source: node of the block's input; only what depends on it is considered.

    Returns:
        The latest module output from which it is taken, and the columns of each head; None if there is none.
    """
    batch, heads, positions, width = graph.nodes[rotated].value.shape
    depends = graph.descendants(source)
    first = graph.calls[mixer].first
    made_here = itertools.takewhile(lambda node: node.index >= first, graph.ancestors(rotated))
    ancestors = [node for node in made_here if node.index in depends]
    outputs = {}
    for index, call in enumerate(graph.calls):
        if index != mixer and graph.is_inside(index, mixer):
            for slot, node in call.outputs.items():
                outputs.setdefault(node, (index, slot))
    wide = [n for n in ancestors if n.index in outputs and n.value.shape[:2] == (batch, positions)]
    for node in ancestors:
        if node.value.shape == (batch, heads, positions, width):
            value = node.value.transpose(1, 2)
        elif node.value.shape == (batch, positions, heads, width):
            value = node.value
        else:
            continue
        flat = value.reshape(batch * positions, heads * width)
        for origin in wide:
            if origin.index > node.index:
                continue
            match = column_match(flat, origin.value.reshape(batch * positions, -1))
            if match is not None:
                index, slot = outputs[origin.index]
                return graph.point(index, "out", slot), HeadColumns(match.view(heads, width))
    return None


def head_axis(graph: OpGraph, index: int) -> tuple[int, int] | None:
    """Number and width of heads of a `[batch, position, head * d_head]` node, from the 4-D tensor behind it."""
    batch, positions, width = graph.nodes[index].value.shape
    for node in graph.ancestors(index):
        if not graph.same_value(node.index, index):
            return None
        shape = node.value.shape
        if len(shape) == 4 and shape[:2] == (batch, positions) and shape[2:].numel() == width:
            return shape[2], shape[3]
    return None

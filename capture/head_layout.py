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
from microtome.capture.opgraph import Node, OpGraph


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


def scaled_column_match(columns_of: Tensor, among: Tensor) -> Tensor | None:
    """As `column_match`, where all columns are those of `among` times one number (queries divided by sqrt(d_head)).

    Two columns are the same direction if their cosine is within 1e-5 of 1, and no other column's is; the ratios of
    length must agree to 1e-4.
    """
    if columns_of.dtype not in (torch.float32, torch.float64) or len(columns_of) < 8:
        return None
    norms, lengths = columns_of.norm(dim=0), among.norm(dim=0)
    if not bool((norms > 0).all()):
        return None
    cosines = (columns_of / norms).T @ (among / lengths.clamp(min=1e-30))
    alike = cosines > 1 - 1e-5
    if not bool((alike.sum(1) == 1).all()):
        return None
    found = cosines.argmax(1)
    ratios = norms / lengths[found]
    return found.cpu() if bool(((ratios / ratios[0] - 1).abs() < 1e-4).all()) else None


def _bytes_of_columns(matrix: Tensor) -> list[bytes]:
    table = matrix.T.contiguous().cpu()
    table = table.view(torch.uint8) if table.dtype != torch.uint8 else table
    return [row.tobytes() for row in table.numpy()]


def before_rotation(
    graph: OpGraph, mixer: int, rotated: int, *, source: int, shape: tuple[int, int], heads: int, width: int
) -> tuple[Point, HeadColumns] | None:
    """Where a query, key or value lies among the outputs of the mixer's modules, before it is rotated or scaled.

    Args:
        graph: the recorded forward.
        mixer: module call to look in.
        rotated: node of q, k or v as attention gets it.
        source: node of the block's input; only what depends on it is considered.
        shape: batch and positions.
        heads: number of heads that attention has; a divisor of it is found where keys were repeated for their group.
        width: d_head.

    Returns:
        The latest module output from which it is taken, and the columns of each head; None if there is none.
    """
    batch, positions = shape
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
    for match_columns in (column_match, scaled_column_match):
        for node in ancestors:
            if node.value.ndim != 4 or node.value.shape[0] != batch or node.value.shape[3] != width:
                continue
            if node.value.shape[2] == positions and heads % node.value.shape[1] == 0:
                value = node.value.transpose(1, 2)
            elif node.value.shape[1] == positions and heads % node.value.shape[2] == 0:
                value = node.value
            else:
                continue
            flat = value.reshape(batch * positions, -1)
            for origin in wide:
                if origin.index > node.index:
                    continue
                match = match_columns(flat, origin.value.reshape(batch * positions, -1))
                if match is not None:
                    index, slot = outputs[origin.index]
                    columns = match.view(-1, width)
                    distinct = list(dict.fromkeys(map(tuple, columns.tolist())))
                    return graph.point(index, "out", slot), HeadColumns(torch.tensor(distinct))
    return None


def head_axes(graph: OpGraph, behind: list[Node], index: int) -> list[tuple[int, int]]:
    """Possible numbers and widths of heads of a `[batch, position, head * d_head]` node, likeliest first.

    From 4-D tensors `[batch, position, head, d_head]` or `[batch, head, position, d_head]` among earlier nodes behind
    the same term: the nearest with the same numbers, then those with a gate, a norm or a reshape between.
    """
    batch, positions, width = graph.nodes[index].value.shape
    same: dict[tuple[int, int], None] = {}
    other: dict[tuple[int, int], None] = {}
    for node in behind:
        shape = node.value.shape
        if node.index > index or len(shape) != 4 or shape[0] != batch or shape[1:].numel() != positions * width:
            continue
        if shape[1] == positions:
            axes = (shape[2], shape[3])
        elif shape[2] == positions:
            axes = (shape[1], shape[3])
        else:
            continue
        (same if shape[1] == positions and graph.same_value(node.index, index) else other)[axes] = None
    return [axes for axes in {**same, **other} if min(axes) > 1]

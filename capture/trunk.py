"""The residual stream on the recorded op graph: which modules are blocks, and what each block adds to its stream.

Blocks are a chain: modules in one list, or of one class in one container, each of which takes the tensor that the one
before returned. Inside a block the trunk is walked back from its output through additions, multiplications by numbers
and parameter vectors, views and norms; the operand from which the block's input is reachable by such steps alone is the
trunk, the other is a contribution, and the numbers and vectors met on the way are its factor. A norm is recognised by
what it does: it depends on the position alone, mixes the coordinates, and does not change when its input is doubled.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from microtome.capture.opgraph import DIVISIONS, MULTIPLICATIONS, Call, Node, OpGraph, Ref, map_tensors

ADDITIONS = {"add": 1.0, "__add__": 1.0, "__radd__": 1.0, "add_": 1.0, "__iadd__": 1.0, "sub": -1.0, "__sub__": -1.0}
VIEWS = {
    "expand_as",
    "expand",
    "view",
    "reshape",
    "unsqueeze",
    "squeeze",
    "flatten",
    "__getitem__",
    "to",
    "float",
    "type_as",
}


class NotWalkable(Exception):
    """The trunk of a block cannot be followed; the message says at which op."""


@dataclass(frozen=True)
class Factor:
    """A number times parameter vectors, given by their paths."""

    number: float = 1.0
    vectors: tuple[str, ...] = ()

    def __mul__(self, other: "Factor") -> "Factor":
        return Factor(self.number * other.number, self.vectors + other.vectors)


@dataclass(frozen=True)
class Term:
    """A term added to the stream: its node, the factor before it, and the module call whose output it is."""

    node: int
    factor: Factor
    call: int
    slot: int | str | None


@dataclass(frozen=True)
class Step:
    """One step of a walked trunk; `before` and `after` are nodes of the stream around it."""

    step: Literal["add", "scale", "shift", "norm"]
    before: int
    after: int
    term: int | None = None
    factor: Factor = Factor()
    module: str | None = None


@dataclass(frozen=True)
class Chain:
    """Consecutive block calls and the slots by which the stream enters and leaves them; "" names the main stack."""

    calls: tuple[int, ...]
    entry: int | str
    exit: int | str | None
    stack: str = ""

    def entry_node(self, graph: OpGraph, k: int) -> int:
        """Node of the stream entering block k."""
        return graph.calls[self.calls[k]].inputs[self.entry]

    def label(self, graph: OpGraph, k: int) -> tuple[int, int | None]:
        """Number of block k's module in the stack (in its list), and of its call where modules run several times."""
        paths = list(dict.fromkeys(graph.calls[i].path for i in self.calls))
        here = graph.calls[self.calls[k]]
        number = here.path.rpartition(".")[2]
        layer = int(number) if number.isdecimal() else paths.index(here.path)
        return layer, graph.point(self.calls[k], "out", None).call

    def exit_node(self, graph: OpGraph, k: int) -> int:
        """Node of the stream leaving block k."""
        return graph.calls[self.calls[k]].outputs[self.exit]


def find_chains(graph: OpGraph) -> list[Chain]:
    """All chains of blocks that are not inside another chain, heaviest (most parameters) first."""
    groups: dict[tuple[str, type | None], list[int]] = {}
    for index, call in enumerate(graph.calls):
        container, _, _ = call.path.rpartition(".")
        # blocks of a hybrid are of several classes, in one list
        is_list = isinstance(graph.model.get_submodule(container), nn.ModuleList)
        groups.setdefault((container, None if is_list else type(call.module)), []).append(index)
    chains = [chain for calls in groups.values() for chain in _linked_runs(graph, calls)]
    chains.sort(key=lambda c: -sum(p.numel() for i in c.calls for p in graph.calls[i].module.parameters()))
    outer: list[Chain] = []
    for chain in chains:
        inside = any(graph.is_inside(chain.calls[0], i) for other in outer for i in other.calls)
        around = any(graph.is_inside(other.calls[0], i) for other in outer for i in chain.calls)
        if not inside and not around:
            outer.append(chain)
    return outer


def _linked_runs(graph: OpGraph, calls: list[int]) -> list[Chain]:
    runs: list[Chain] = []
    run: list[int] = calls[:1]
    link: tuple | None = None
    for before, after in itertools.pairwise(calls):
        found = _link(graph, graph.calls[before], graph.calls[after])
        if found and link in (None, found):
            link = found
            run.append(after)
        else:
            runs += [Chain(tuple(run), *link)] if link else []
            run, link = [after], None
    if link:
        runs.append(Chain(tuple(run), *link))
    elif len(calls) == 1:
        call = graph.calls[calls[0]]
        container = graph.model.get_submodule(call.path.rpartition(".")[0])
        if (
            isinstance(container, nn.ModuleList)
            and len(container) == 1
            and (found := _link(graph, call, call, same_shape=True))
        ):
            runs.append(Chain((calls[0],), *found))
    return runs


def _link(
    graph: OpGraph, before: Call, after: Call, *, same_shape: bool = False
) -> tuple[int | str, int | str | None] | None:
    for exit_slot, out in before.outputs.items():
        value = graph.nodes[out].value
        if not value.is_floating_point() or value.ndim < 2:
            continue
        for entry_slot, into in after.inputs.items():
            other = graph.nodes[into].value
            # a block that takes the stream at another argument than its successor (an encoder before a decoder) is none
            is_same_place = entry_slot in before.inputs
            if is_same_place and (out == into or (same_shape and value.shape == other.shape)):
                return entry_slot, exit_slot
    return None


class Walk:
    """The trunk of one block call, walked back from its output to its input."""

    def __init__(self, graph: OpGraph, block: int, entry: int, exit: int, norms: "Norms"):
        self.graph, self.block, self.norms = graph, block, norms
        self.shape = graph.nodes[entry].value.shape  # [batch, position, width]; the source may have other axes
        self.entry = graph.source(entry)
        self.inside = graph.descendants(self.entry)
        self.makers: dict[int, list[tuple[int, int | str | None]]] = {}
        for index, call in enumerate(graph.calls):
            if index != block and graph.is_inside(index, block):
                for slot, node in call.outputs.items():
                    self.makers.setdefault(node, []).append((index, slot))
        self._reach: dict[int, bool] = {}
        self.terms: list[Term] = []
        self.steps = self._steps(exit)

    def behind(self, term: int) -> list[Node]:
        """What a term is made from inside the block, latest first, other terms and what is behind them left out."""
        others = {t.node for t in self.terms} - {self.terms[term].node}
        nodes = self.graph.ancestors(self.terms[term].node, without=others)
        return [n for n in nodes if n.index in self.inside and self.graph.is_inside(n.call, self.block)]

    def reaches_entry(self, index: int) -> bool:
        """Whether the block's input is reached from a node by trunk steps alone."""
        if index not in self._reach:
            self._reach[index] = index == self.entry or any(self.reaches_entry(p) for p in self._back(index))
        return self._reach[index]

    def _back(self, index: int) -> list[int]:
        if index not in self.inside:
            return []
        if (norm := self.norm_made(index)) is not None:
            return [norm[1]]
        if (source := self.graph.source(index)) != index:
            return [source]
        node = self.graph.nodes[index]
        if node.op in ADDITIONS:
            return [p for p in node.parents if p in self.inside]
        if (scaled := self._scaled(index)) is not None:
            return [scaled[0]]
        return []

    def norm_made(self, index: int) -> tuple[int, int] | None:
        """The module call that made a node if it behaves as a norm, and the node it was made from."""
        for call, _ in self.makers.get(index, []):
            inputs = [n for n in self.graph.calls[call].inputs.values() if n in self.inside]
            if len(inputs) == 1 and self.norms.is_norm(self.graph.calls[call], self.graph.nodes[inputs[0]].value):
                return call, inputs[0]
        return None

    def _vector(self, index: int) -> str | None:
        """Path of the parameter or buffer that a node repeats at every position: one number, or one vector."""
        value = self.graph.nodes[index].value
        while (path := self.graph.leaf_paths.get(index)) is None:
            node = self.graph.nodes[index]
            if node.op not in VIEWS or not node.parents:
                return None
            index = node.parents[0]
        vector = self.graph.nodes[index].value.flatten()
        is_repeated = len(vector) in (1, self.shape[-1]) and value.numel() % len(vector) == 0
        return path if is_repeated and bool((value.reshape(-1, len(vector)) == vector).all()) else None

    def _scaled(self, index: int) -> tuple[int, Factor] | None:
        """For a node that is another times what does not depend on the data: that node and the factor."""
        node = self.graph.nodes[index]
        if node.op not in MULTIPLICATIONS | DIVISIONS:
            return None
        data = [p for p in node.parents if p in self.inside]
        fixed = [p for p in node.parents if p not in self.inside]
        if len(data) != 1 or len(fixed) + len(node.numbers) != 1:
            return None
        is_division = node.op in DIVISIONS
        if is_division and node.parents[0] != data[0]:
            return None
        path = self._vector(fixed[0]) if fixed and not is_division else None
        if path is not None:
            return data[0], Factor(1.0, (path,))
        if fixed and self.graph.nodes[fixed[0]].value.numel() != 1:
            return None
        (number,) = node.numbers or (float(self.graph.nodes[fixed[0]].value),)
        return data[0], Factor(float(1 / number if is_division else number))

    def _steps(self, index: int) -> list[Step]:
        if index == self.entry:
            return []
        if (norm := self.norm_made(index)) is not None and self.reaches_entry(norm[1]):
            step = Step("norm", norm[1], index, module=self.graph.calls[norm[0]].path)
            return [*self._steps(norm[1]), step]
        if (source := self.graph.source(index)) != index:
            return self._steps(source)
        node = self.graph.nodes[index]
        if node.op in ADDITIONS and len(node.parents) == 2:
            a, b = node.parents
            trunk = [p for p in (a, b) if p in self.inside and self.reaches_entry(p)]
            if len(trunk) == 1:
                other = b if trunk[0] == a else a
                sign = ADDITIONS[node.op] if other == b else 1.0
                if trunk[0] == b and ADDITIONS[node.op] < 0:
                    raise NotWalkable(f"the stream is subtracted from something at op {node.op!r}")
                earlier = self._steps(trunk[0])
                factor = Factor(float(sign * next((n for n in node.numbers), 1.0)))
                return [*earlier, *(replace(s, before=trunk[0], after=index) for s in self._split(other, factor))]
            raise NotWalkable(f"{len(trunk)} operands of op {node.op!r} lead to the block's input")
        if (scaled := self._scaled(index)) is not None:
            return [*self._steps(scaled[0]), Step("scale", scaled[0], index, factor=scaled[1])]
        raise NotWalkable(f"op {node.op!r} with {len(node.parents)} tensors is no addition, factor or norm")

    def _split(self, index: int, factor: Factor) -> list[Step]:
        """Take one operand apart into module outputs and constant vectors, as far as the block put them together."""
        node = self.graph.nodes[index]
        if (path := self._vector(index)) is not None:
            return [Step("shift", index, index, factor=factor * Factor(1.0, (path,)))]
        if (made := self._module_output(index)) is not None:
            self.terms.append(Term(index, factor, *made))
            return [Step("add", index, index, term=len(self.terms) - 1, factor=factor)]
        if (source := self.graph.source(index)) != index:
            return self._split(source, factor)
        if node.op in ADDITIONS and len(node.parents) == 2:
            sign = Factor(float(ADDITIONS[node.op] * next((n for n in node.numbers), 1.0)))
            return [*self._split(node.parents[0], factor), *self._split(node.parents[1], factor * sign)]
        if (scaled := self._scaled(index)) is not None:
            return self._split(scaled[0], factor * scaled[1])
        raise NotWalkable(f"a term made by op {node.op!r} is no module's output")

    def _module_output(self, index: int) -> tuple[int, int | str | None] | None:
        """The outermost module call whose output is this node, back through steps that do not change its numbers."""
        while True:
            if made := self.makers.get(index):
                return min(made, key=lambda m: self.graph.calls[m[0]].path.count("."))
            if (before := self.graph.unchanged(index)) is None:
                return None
            index = before


class Norms:
    """Which modules behave as norms, remembered per module."""

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}

    def is_norm(self, call: Call, value: Tensor) -> bool:
        """Whether the called module only rescales each position's vector: see `behaves_as_norm`."""
        if id(call.module) not in self._known:
            self._known[id(call.module)] = behaves_as_norm(call, value)
        return self._known[id(call.module)]


def behaves_as_norm(call: Call, value: Tensor) -> bool:
    """Output unchanged when the input is doubled, own position only, coordinates mixed; vector parameters only.

    Tested at root mean square 1 and above, where the norm's epsilon does not count.
    """
    tensors = [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Ref)]
    if len(tensors) != 1 or list(call.outputs) != [None] or any(p.ndim > 1 for p in call.module.parameters()):
        return False
    x = value.float() + 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value.device)
    x = (x / x.pow(2).mean().sqrt()).to(value.dtype)

    def run(y: Tensor) -> Tensor:
        args, kwargs = map_tensors((call.args, call.kwargs), lambda _: y.clone(), Ref)
        return call.module(*args, **kwargs).float()

    with torch.no_grad():
        plain, doubled = run(x), run(2 * x)
        tolerance = 2e-2 if x.dtype in (torch.float16, torch.bfloat16) else 1e-3  # one step of bfloat16 is 8e-3
        if plain.shape != x.shape or not torch.allclose(plain, doubled, rtol=tolerance, atol=tolerance):
            return False
        nudged = x.clone()
        nudged[..., 0, 0] += 3.0
        moved = (run(nudged) - plain).abs() > 1e-4
    elsewhere = moved.clone()
    elsewhere[..., 0, :] = False
    return bool(moved[..., 0, 1:].any()) and not bool(elsewhere.any())

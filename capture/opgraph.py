"""The recorded op graph of one forward pass: every torch call with the identity of its tensors, and every module call.

A `TorchFunctionMode` sees each torch function with its Python arguments (`linear`, `layer_norm` and
`scaled_dot_product_attention` stay whole); hooks on all modules tell which module made which tensor.
Each tensor becomes a node with a copy of its value; an in-place op makes a new node for the same object, and for
every live view of the same storage, so that a value is never rewritten under a node. Nothing of the model is changed.

Beware: compiled or scripted code is one opaque call, and hub kernels hide their inner ops.
"""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from microtome.capture.anatomy import Point

MULTIPLICATIONS = {"mul", "__mul__", "__rmul__", "mul_", "__imul__", "multiply"}
DIVISIONS = {"div", "__truediv__", "div_", "true_divide", "__itruediv__", "__div__"}
IN_PLACE_DUNDERS = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__setitem__"}


@dataclass
class Node:
    """One tensor at one moment.

    Attributes:
        index: position in the graph; parents always have smaller ones.
        op: name of the torch function that made it, or "parameter", "buffer", "input".
        parents: nodes of its tensor arguments, in order.
        numbers: its plain number arguments, in order.
        value: a copy of the value (parameters and buffers: the tensor itself).
        call: index of the innermost module call in which it was made, -1 outside all.
    """

    index: int
    op: str
    parents: tuple[int, ...]
    numbers: tuple[int | float, ...]
    value: Tensor
    call: int


@dataclass
class Call:
    """One call of one module.

    Attributes:
        path: the module's dotted path; "" is the model itself.
        number: which call of this module it is, from 0.
        parent: index of the enclosing module call, -1 for none.
        inputs: node of each tensor argument, by position or keyword.
        outputs: node of each tensor output; key None where the output is a tensor, else index or key of the element.
        args, kwargs: the arguments with every tensor replaced by a `Ref` to its node.
    """

    path: str
    module: nn.Module
    number: int
    parent: int
    inputs: dict[int | str, int] = field(default_factory=dict)
    outputs: dict[int | str | None, int] = field(default_factory=dict)
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    first: int = 0
    last: int = 0


@dataclass(frozen=True)
class Ref:
    """Stands for a tensor in recorded arguments: its node."""

    node: int


def map_tensors(tree: Any, f: Callable[[Tensor], Any], leaf: type = Tensor) -> Any:
    """The same nesting of tuples, lists and dicts with `f` applied to every leaf of that type; the rest is kept."""
    if isinstance(tree, leaf):
        return f(tree)
    if isinstance(tree, tuple):
        mapped = [map_tensors(x, f, leaf) for x in tree]
        return type(tree)(*mapped) if hasattr(tree, "_fields") else tuple(mapped)
    if isinstance(tree, list):
        return [map_tensors(x, f, leaf) for x in tree]
    if type(tree) is dict:
        return {key: map_tensors(x, f, leaf) for key, x in tree.items()}
    return tree


def elements(output: Any) -> Iterator[tuple[int | str | None, Tensor]]:
    """The tensors directly in a module's output, with the slot of each: None, an index, or a key."""
    if isinstance(output, Tensor):
        yield None, output
    elif isinstance(output, (tuple, list)):
        yield from ((i, x) for i, x in enumerate(output) if isinstance(x, Tensor))
    elif hasattr(output, "items"):
        yield from ((key, x) for key, x in output.items() if isinstance(x, Tensor))


class OpGraph(TorchFunctionMode):
    """Records a forward pass: `with OpGraph(model) as graph: model(**inputs)`.

    Attributes:
        nodes: every tensor in the order in which it appeared.
        calls: every module call in the order in which it began.
        linear: what `microtome.capture.linear_maps` found of modules, by id.
        leaf_paths: for the node of a parameter or buffer, its path in the model.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self._thread = threading.get_ident()
        self.nodes: list[Node] = []
        self.calls: list[Call] = []
        self._stack: list[int] = []
        self._index: dict[int, int] = {}
        self._alive: list[Tensor] = []
        self._storages: dict[int, list[Tensor]] = {}
        self._numbers: dict[str, int] = {}
        self._handles: list[Any] = []
        self._leaves = {id(b): ("buffer", path) for path, b in model.named_buffers()}
        self._leaves |= {id(p): ("parameter", path) for path, p in model.named_parameters()}
        self.leaf_paths: dict[int, str] = {}
        self.linear: dict[int, bool] = {}

    def __enter__(self) -> "OpGraph":
        for path, module in self.model.named_modules():
            enter = lambda module, args, kwargs, path=path: self._enter_call(path, module, args, kwargs)  # noqa: E731
            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave_call, prepend=False))
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        for handle in self._handles:
            handle.remove()
        self._alive.clear()
        self._storages.clear()

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        inputs: list[Tensor] = []
        map_tensors((args, kwargs), inputs.append)
        parents = tuple(self.node_of(t) for t in inputs)
        output = func(*args, **kwargs)
        in_place = name in IN_PLACE_DUNDERS or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs
        if name == "__get__":
            name = (resolve_name(func) or "get.get").split(".")[-2]
        if in_place and inputs:
            target = kwargs.get("out", args[0] if args else None)
            if isinstance(target, Tensor):
                self._rewrite(name, target, parents, _numbers(args, kwargs))
                return output
        for _, tensor in elements(output) if not isinstance(output, Tensor) else [(None, output)]:
            if id(tensor) not in self._index:
                self._add(name, tensor, parents, _numbers(args, kwargs))
        return output

    def node_of(self, tensor: Tensor) -> int:
        """Index of the tensor's present node; a tensor never seen before becomes a leaf."""
        if (index := self._index.get(id(tensor))) is None:
            kind, path = self._leaves.get(id(tensor), ("input", ""))
            index = self._add(kind, tensor, (), ())
            if path:
                self.leaf_paths[index] = path
        return index

    def _add(self, op: str, tensor: Tensor, parents: tuple[int, ...], numbers: tuple[int | float, ...]) -> int:
        keep = op in ("parameter", "buffer")
        with torch._C.DisableTorchFunction():
            value = tensor.detach() if keep else tensor.detach().clone()
        node = Node(len(self.nodes), op, parents, numbers, value, self._stack[-1] if self._stack else -1)
        self.nodes.append(node)
        self._index[id(tensor)] = node.index
        self._alive.append(tensor)
        if not keep:
            self._storages.setdefault(_storage_address(tensor), []).append(tensor)
        return node.index

    def _rewrite(self, op: str, target: Tensor, parents: tuple[int, ...], numbers: tuple[int | float, ...]) -> None:
        index = self._add(op, target, parents, numbers)
        for alias in self._storages.get(_storage_address(target), [])[:-1]:
            if alias is not target:
                before = self._index[id(alias)]
                self._add("alias", alias, (before, index), ())
                self._storages[_storage_address(target)].pop()

    def _enter_call(self, path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if threading.get_ident() != self._thread:  # another thread's forward
            return
        number = self._numbers.get(path, 0)
        self._numbers[path] = number + 1
        call = Call(path, module, number, self._stack[-1] if self._stack else -1)
        ref = lambda t: Ref(self.node_of(t))  # noqa: E731
        call.args, call.kwargs = map_tensors(args, ref), map_tensors(dict(kwargs), ref)
        slots = [*enumerate(call.args), *call.kwargs.items()]
        call.inputs = {slot: value.node for slot, value in slots if isinstance(value, Ref)}
        call.first = len(self.nodes)
        self._stack.append(len(self.calls))
        self.calls.append(call)

    def _leave_call(self, module: nn.Module, args: tuple, output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        call = self.calls[self._stack.pop()]
        call.outputs = {slot: self.node_of(tensor) for slot, tensor in elements(output)}
        call.last = len(self.nodes)

    def point(self, call: int, side: Literal["in", "out"], slot: int | str | None) -> Point:
        """Where an argument or output of one module call passes by."""
        path = self.calls[call].path
        return Point(path, side, slot, self.calls[call].number if self._numbers[path] > 1 else None)

    def calls_before(self, call: int) -> dict[str, int]:
        """How often each module was called before one module call."""
        return dict(Counter(earlier.path for earlier in self.calls[:call]))

    def arguments(self, call: Call) -> tuple[tuple, dict[str, Any]]:
        """The call's arguments as they were, tensors as fresh copies."""
        restore = lambda ref: self.nodes[ref.node].value.clone()  # noqa: E731
        return map_tensors(call.args, restore, Ref), map_tensors(call.kwargs, restore, Ref)

    def descendants(self, source: int) -> set[int]:
        """All nodes that depend on one node, itself included."""
        found = {source}
        for node in self.nodes[source + 1 :]:
            if not found.isdisjoint(node.parents):
                found.add(node.index)
        return found

    def ancestors(self, index: int, *, without: Collection[int] = ()) -> Iterator[Node]:
        """The node and everything it was made from, latest first; not what is only behind nodes of `without`."""
        waiting = {index}
        while waiting:
            latest = max(waiting)
            waiting.discard(latest)
            waiting.update(p for p in self.nodes[latest].parents if p not in without)
            yield self.nodes[latest]

    def same_value(self, a: int, b: int) -> bool:
        """Whether two nodes hold the same numbers in the same order, whatever their shape."""
        x, y = self.nodes[a].value, self.nodes[b].value
        return x.numel() == y.numel() and x.dtype == y.dtype and torch.equal(x.flatten(), y.flatten())

    def source(self, index: int) -> int:
        """The earliest node with the same numbers, back through views, casts that change nothing, and idle dropout."""
        while (before := self.unchanged(index)) is not None:
            index = before
        return index

    def unchanged(self, index: int) -> int | None:
        """The one parent with the same numbers; None at products, whose factor may only happen to be one."""
        node = self.nodes[index]
        if node.op == "alias" or node.op in MULTIPLICATIONS | DIVISIONS:
            return None
        same = [p for p in node.parents if self.same_value(p, index)]
        return same[0] if len(same) == 1 else None

    def is_inside(self, call: int, outer: int) -> bool:
        """Whether one module call lies inside another, or is it."""
        while call not in (-1, outer):
            call = self.calls[call].parent
        return call == outer


class NoStorage(TypeError):
    """A tensor of the forward has no storage of its own, so views of it could not be told."""


def _storage_address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError as error:
        raise NoStorage(
            f"A {type(tensor).__name__} passes through the model; plain tensors were expected. Activations that are "
            "quantised between modules cannot be recorded: quantise the weights alone."
        ) from error


def _numbers(args: tuple, kwargs: dict) -> tuple[int | float, ...]:
    return tuple(x for x in (*args, *kwargs.values()) if isinstance(x, (int, float)) and not isinstance(x, bool))

"""How a site's value lies in the tensor that passes its point, and how a delta is written back there.

A layout presents the value (`batch position head d_head` for heads, `batch position d_model` for the stream) and adds a
delta of that shape to the tensor, out of place, so that gradients flow and nothing the model still holds is changed.
Four layouts: the tensor itself, heads as columns of its last axis (fused and interleaved projections, grouped
queries), heads as an axis at the attention seam, and two that stand for a value which is no tensor of the model: one
head's write `z_h W_O^h`, and the stream between mixer and MLP.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from microtome.capture.routers import router_map

# Order of the taps on one tensor: what is written through it, itself, what stands on it, copies for later.
PHASE_THROUGH, PHASE_VALUE, PHASE_ABOVE, PHASE_COPY = range(4)


@dataclass
class Passing:
    """The call in which a tensor passes a point.

    Attributes:
        module: the module that is called.
        args, kwargs: its arguments.
        call: the attention call, at the seam.
        head_deltas: what edits have added to single heads' writes (head, delta) or to all (None, delta) so far.
        row_deltas: what edits have added to pattern rows so far: heads, rows, delta.
    """

    module: nn.Module
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    call: Any = None
    head_deltas: list[tuple[int | None, Tensor]] = field(default_factory=list)
    row_deltas: list[tuple[list[int], Tensor, Tensor]] = field(default_factory=list)

    @property
    def input(self) -> Tensor:
        """The first argument."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()))


@runtime_checkable
class Layout(Protocol):
    """Presents a value and writes to it."""

    def present(self, tensor: Tensor, passing: Passing) -> Tensor:
        """The value, possibly a view of the tensor."""
        ...

    def add(self, tensor: Tensor, delta: Tensor, passing: Passing) -> Tensor:
        """The tensor with a delta of the value's shape added: a new tensor."""
        ...

    def put(self, tensor: Tensor, value: Tensor, passing: Passing) -> Tensor:
        """The tensor made anew from the value where it can be, so that gradients reach the value itself."""
        ...


@dataclass(frozen=True)
class Whole:
    """The tensor is the value."""

    def present(self, tensor: Tensor, passing: Passing) -> Tensor:
        return tensor

    def add(self, tensor: Tensor, delta: Tensor, passing: Passing) -> Tensor:
        return tensor + delta

    def put(self, tensor: Tensor, value: Tensor, passing: Passing) -> Tensor:
        return value.clone()


@dataclass(eq=False)
class RowsOf:
    """A tap that notes the `[batch, position]` of a tensor, for a module that then works on all tokens in one axis."""

    slot: int | str | None
    phase: int = PHASE_COPY
    call: int | None = None
    fired: int = 0
    rows: tuple[int, int] = (0, 0)

    def apply(self, tensor: Tensor, passing: Passing) -> Tensor:
        self.rows = (tensor.shape[0], tensor.shape[1])
        self.fired += 1
        return tensor


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tensor holds the value with batch and position in one axis.

    Attributes:
        of: notes how many of each there are.
    """

    of: RowsOf

    def present(self, tensor: Tensor, passing: Passing) -> Tensor:
        return tensor.unflatten(0, self.of.rows)

    def add(self, tensor: Tensor, delta: Tensor, passing: Passing) -> Tensor:
        return tensor + delta.flatten(0, 1)

    def put(self, tensor: Tensor, value: Tensor, passing: Passing) -> Tensor:
        return value.flatten(0, 1).clone()


@dataclass(frozen=True, eq=False)
class Columns:
    """Heads are columns of the tensor, once the axes after (batch, position) are flattened.

    Attributes:
        columns: `[head, d_head]` flat column numbers, of all heads.
        head: the only head wanted, or None.
        run: the wanted columns as a slice where they follow each other, so that a view does; else None.
    """

    columns: Int[Tensor, "head d_head"]
    head: int | None
    run: slice | None

    @classmethod
    def of(cls, columns: Int[Tensor, "head d_head"], head: int | None) -> "Columns":
        """The layout for given columns."""
        wanted = (columns if head is None else columns[head]).flatten().tolist()
        is_run = wanted == list(range(wanted[0], wanted[0] + len(wanted)))
        return cls(columns, head, slice(wanted[0], wanted[0] + len(wanted)) if is_run else None)

    def present(self, tensor: Tensor, passing: Passing) -> Tensor:
        flat = tensor.flatten(2)
        wanted = flat[..., self.run] if self.run else flat.index_select(2, self._wanted(tensor.device))
        return wanted if self.head is not None else wanted.unflatten(2, self.columns.shape)

    def add(self, tensor: Tensor, delta: Tensor, passing: Passing) -> Tensor:
        delta = delta if self.head is not None else delta.flatten(2)
        flat = tensor.flatten(2)
        is_all = self.run is not None and delta.shape[2] == flat.shape[2]
        flat = flat + delta if is_all else flat.index_add(2, self._wanted(tensor.device), delta)
        return flat.view_as(tensor)

    def put(self, tensor: Tensor, value: Tensor, passing: Passing) -> Tensor:
        value = value if self.head is not None else value.flatten(2)
        return tensor.flatten(2).index_copy(2, self._wanted(tensor.device), value).view_as(tensor)

    def _wanted(self, device: torch.device) -> Int[Tensor, " column"]:
        return (self.columns if self.head is None else self.columns[self.head]).flatten().to(device)


@dataclass(frozen=True)
class HeadAxis:
    """Heads are an axis of the tensor: 1 for q, k and v at the seam, 2 for its z.

    Attributes:
        axis: the head axis.
        head: the only head wanted, or None.
    """

    axis: int
    head: int | None

    def present(self, tensor: Tensor, passing: Passing) -> Tensor:
        if self.head is not None:
            return tensor.select(self.axis, self.head)
        return tensor.transpose(1, 2) if self.axis == 1 else tensor

    def add(self, tensor: Tensor, delta: Tensor, passing: Passing) -> Tensor:
        if self.head is not None:
            head = torch.tensor([self.head], device=tensor.device)
            return tensor.index_add(self.axis, head, delta.unsqueeze(self.axis))
        return tensor + (delta.transpose(1, 2) if self.axis == 1 else delta)

    def put(self, tensor: Tensor, value: Tensor, passing: Passing) -> Tensor:
        if self.head is not None:
            head = torch.tensor([self.head], device=tensor.device)
            return tensor.index_copy(self.axis, head, value.unsqueeze(self.axis))
        return (value.transpose(1, 2) if self.axis == 1 else value).clone()


@dataclass(eq=False)
class HeadWrite:
    """The tensor is the output of the projection that sums the heads' writes; the value is `z_h W_O^h`, without bias.

    Attributes:
        heads: how heads lie in the projection's input.
        weights: `[head, d_head, d_model]`, made at the first use, and at every one where they are part of a graph.
    """

    heads: Columns
    weights: Float[Tensor, "head d_head d_model"] | None = None

    def present(self, tensor: Tensor, passing: Passing) -> Tensor:
        return self.deferred(passing, keep_graph=True)()

    def deferred(self, passing: Passing, *, keep_graph: bool) -> Callable[[], Tensor]:
        """A function that computes the value when it is wanted; it holds z, `d_model / d_head` times smaller."""
        if self.weights is None or self.weights.requires_grad:
            self.weights = affine_weight(passing.module, passing.input)[self.heads.columns.to(passing.input.device)]
        z, weights, added = self.heads.present(passing.input, passing), self.weights, passing.head_deltas
        if not keep_graph:
            z, weights, added = z.detach().clone(), weights.detach(), [(h, d.detach()) for h, d in added]
        return partial(_written, z, weights, self.heads.head, tuple(added))

    def add(self, tensor: Tensor, delta: Tensor, passing: Passing) -> Tensor:
        passing.head_deltas.append((self.heads.head, delta))
        return tensor + (delta.sum(dim=2) if self.heads.head is None else delta)

    def put(self, tensor: Tensor, value: Tensor, passing: Passing) -> Tensor:
        return tensor


def _written(z: Tensor, weights: Tensor, head: int | None, added: tuple[tuple[int | None, Tensor], ...]) -> Tensor:
    if head is not None:
        write = z @ weights[head]
        for other, delta in added:
            if other in (None, head):
                write = write + (delta[:, :, head] if other is None else delta)
        return write
    write = einsum(z, weights, "batch position head d_head, head d_head d_model -> batch position head d_model")
    for other, delta in added:
        if other is None:
            write = write + delta
        else:
            write = write.index_add(2, torch.tensor([other], device=write.device), delta.unsqueeze(2))
    return write


def affine_weight(module: nn.Module, like: Tensor) -> Float[Tensor, "d_in d_model"]:
    """The matrix W of an affine map x W + b, read from its weight or, for any other map, off its images of the axes.

    Args:
        module: the map; quantised, adapted and offloaded linears are called without their hooks.
        like: an input of it, for width, dtype and device.

    Raises:
        ValueError: the map is in training mode and random (an adapter's dropout).
    """
    is_plain = "forward" not in vars(module) and type(module) in (nn.Linear, Conv1D)  # offloading replaces `forward`
    if is_plain and type(module.weight.data) is Tensor:
        return module.weight.T if isinstance(module, nn.Linear) else module.weight
    width = like.flatten(2).shape[2]
    axes = torch.cat([torch.zeros(1, 1, width), torch.eye(width)[None]], dim=1).to(like.device, like.dtype)
    images = module.forward(axes)
    if module.training and not torch.equal(images, module.forward(axes)):
        raise ValueError(
            f"{type(module).__name__} is in training mode and gives two results for one input (dropout), so what each "
            "head writes through it cannot be told. Call model.eval() first."
        )
    return rearrange(images[:, 1:] - images[:, :1], "1 d_in d_model -> d_in d_model")


@dataclass(frozen=True, eq=False)
class RouterInput:
    """The tensor is a router's input x, of which the module chooses experts by itself; the value is the logits W x + b.

    Attributes:
        slot: which element of the module's output the logits are.
        of: where the logits' tokens lie in one axis, notes the `[batch, position]` they are.
    """

    slot: int | str | None
    of: RowsOf | None

    def present(self, tensor: Tensor, passing: Passing) -> Tensor:
        weight, bias = router_map(passing.module, self.slot, tensor)
        logits = tensor @ weight + bias
        return logits if self.of is None else logits.reshape(*self.of.rows, -1)

    def add(self, tensor: Tensor, delta: Tensor, passing: Passing) -> Tensor:
        weight = router_map(passing.module, self.slot, tensor)[0].detach()
        inverse = torch.linalg.pinv(weight.float()).to(weight.dtype)
        return tensor + delta.reshape(*tensor.shape[:-1], -1) @ inverse

    def put(self, tensor: Tensor, value: Tensor, passing: Passing) -> Tensor:
        return tensor


@dataclass(eq=False)
class Remember:
    """A tap that keeps a copy of the tensor that last passed, for a layout that needs it later in the same forward."""

    slot: int | str | None
    phase: int = PHASE_COPY
    call: int | None = None
    fired: int = 0
    tensor: Tensor | None = None

    def apply(self, tensor: Tensor, passing: Passing) -> Tensor:
        self.tensor = tensor.clone()
        self.fired += 1
        return tensor


@dataclass(eq=False)
class StreamBetween:
    """The tensor is the mixer's contribution c; the value is the stream `s + factor c` from which the MLP branches.

    No tensor but c reaches both trunk and MLP, so a delta d of the stream is written as d / factor on c.

    Attributes:
        factor: factor of c in the stream: a number, or one for each coordinate.
        others: what else makes up the stream, remembered in the same forward, with factors.
        constant: what is added to it whatever the text.
    """

    factor: float | Tensor
    others: list[tuple[Remember, float | Tensor]]
    constant: float | Tensor = 0.0

    def present(self, tensor: Tensor, passing: Passing) -> Tensor:
        return self.factor * tensor + self._rest(tensor)

    def _rest(self, tensor: Tensor) -> Tensor | float:
        return sum((factor * other.tensor.view_as(tensor) for other, factor in self.others), start=self.constant)

    def add(self, tensor: Tensor, delta: Tensor, passing: Passing) -> Tensor:
        return tensor + delta / self.factor

    def put(self, tensor: Tensor, value: Tensor, passing: Passing) -> Tensor:
        return (value - self._rest(tensor)) / self.factor

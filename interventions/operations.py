"""What an edit does to a vector: add, project, affine, rotate, swap, feed back. Pure functions of x and strength.

Every operation gives the change `delta(x, weight, at)`; weight is the strength at each token, 0 where the edit does not
act. The change is exactly 0 where weight is 0, so that a strength of 0 is the unedited model to the bit. Vectors are
float32 and so is x where the model's own numbers are of half precision; only the change is rounded.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from microtome.capture.forward_call import ForwardCall
from microtome.capture.live_taps import EditContext
from microtome.kernels.residual_feedback import feedback_delta


@runtime_checkable
class Operation(Protocol):
    """What an edit does.

    Attributes:
        width: channels it acts on; None for any.
        directions: what the ledger projects x on before and after; None for nothing.
    """

    @property
    def width(self) -> int | None: ...

    @property
    def directions(self) -> Float[Tensor, "direction d"] | None: ...

    def delta(
        self,
        x: Float[Tensor, "batch token *head d"],
        weight: Float[Tensor, "batch token *ones 1"],
        at: EditContext | None,
    ) -> Float[Tensor, "batch token *head d"]:
        """What is added to x; 0 where weight is 0."""
        ...


def call_of(at: EditContext | None, name: str) -> ForwardCall:
    """The running forward. Raises ValueError where there is none, naming the operation that asks."""
    call = None if at is None else at.call
    if call is None:
        raise ValueError(f"{name} needs to know texts and positions: use it through Steering.")
    return call


def _vector(value: object, name: str, *, may_be_zero: bool = False) -> Tensor:
    """A float32 vector. Raises ValueError for another shape, NaN, or zero where that would do nothing."""
    tensor = torch.as_tensor(value).detach().to(torch.promote_types(torch.as_tensor(value).dtype, torch.float32))
    if tensor.ndim != 1:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected one vector [d].")
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name} holds NaN or infinity.")
    if not may_be_zero and not bool(tensor.any()):
        raise ValueError(f"{name} is zero: the edit would do nothing. Is the contrast between two equal sets of texts?")
    return tensor


def _rows(value: object, name: str) -> Tensor:
    tensor = torch.as_tensor(value).detach()
    tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    tensor = tensor[None] if tensor.ndim == 1 else tensor
    if tensor.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected [d] or [k, d].")
    for row in tensor:
        _vector(row, name)
    return tensor


def _unit(direction: Tensor) -> Tensor:
    return direction / direction.norm()


@dataclass(frozen=True, eq=False)
class Add:
    """delta = w vector; with `relative`, w |x| vector.

    Attributes:
        vector: what strength 1 adds.
        relative: in units of the stream's own norm at each token.
    """

    vector: Tensor
    relative: bool = False

    def __post_init__(self):
        object.__setattr__(self, "vector", _vector(self.vector, "vector"))

    @property
    def width(self) -> int:
        return len(self.vector)

    @cached_property
    def directions(self) -> Tensor:
        return _unit(self.vector)[None]

    def delta(self, x: Tensor, weight: Tensor, at: EditContext | None) -> Tensor:
        vector = _to(self.vector, x)
        if self.relative:
            weight = weight * torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return _over_heads(weight * vector, x)


@dataclass(frozen=True, eq=False)
class Project:
    """Set the coordinates on some directions: delta = w sum_j (value_j - u_j . x) u_j, with u orthonormal.

    Without values they are set to 0 (directional ablation, x - U'Ux). With one direction, values are in units of it.

    Attributes:
        basis: [d] or [k, d]; several directions are made orthonormal by QR, in which case values must be left out.
        values: for each direction; None is 0.
        keep_norm: scale the result to the norm of x.
    """

    basis: Tensor
    values: Tensor | float | None = None
    keep_norm: bool = False

    def __post_init__(self):
        rows = _rows(self.basis, "basis")
        values = None if self.values is None else torch.as_tensor(self.values, dtype=rows.dtype).reshape(-1)
        if values is not None and (len(rows) > 1 or len(values) != 1):
            raise ValueError(f"{len(rows)} directions and {len(values)} values: values are for a single direction.")
        if values is not None and not bool(torch.isfinite(values).all()):
            raise ValueError(f"values={values.tolist()}: give numbers.")
        basis = _unit(rows[0])[None] if len(rows) == 1 else torch.linalg.qr(rows.T.double()).Q.T.to(rows.dtype)
        if len(rows) > 1 and int(torch.linalg.matrix_rank(rows.double())) < len(rows):
            raise ValueError(f"The {len(rows)} directions are linearly dependent. Give independent ones.")
        object.__setattr__(self, "basis", basis)
        object.__setattr__(self, "values", values)

    @property
    def width(self) -> int:
        return self.basis.shape[1]

    @property
    def directions(self) -> Tensor:
        return self.basis

    def delta(self, x: Tensor, weight: Tensor, at: EditContext | None) -> Tensor:
        basis = _to(self.basis, x)
        there = x @ basis.T
        gap = -there if self.values is None else _to(self.values, x) - there
        delta = (weight * gap) @ basis
        return _norm_kept(x, delta) if self.keep_norm else delta


@dataclass(frozen=True, eq=False)
class Affine:
    """delta = w ((gain - 1) x + bias), channel by channel, where low <= x <= high (FiLM; Linear-AcT).

    Attributes:
        gain, bias: by channel.
        low, high: support by channel; None acts everywhere.
    """

    gain: Tensor
    bias: Tensor
    low: Tensor | None = None
    high: Tensor | None = None

    def __post_init__(self):
        for name in ("gain", "bias"):
            object.__setattr__(self, name, _vector(getattr(self, name), name, may_be_zero=True))
        for name in ("low", "high"):
            if getattr(self, name) is not None:
                bound = torch.as_tensor(getattr(self, name)).float()
                object.__setattr__(self, name, bound)
        shapes = {len(t) for t in (self.gain, self.bias, self.low, self.high) if t is not None}
        if len(shapes) > 1:
            raise ValueError(f"gain, bias and support have {sorted(shapes)} channels: give the same number of each.")

    @property
    def width(self) -> int:
        return len(self.gain)

    @property
    def directions(self) -> None:
        return None

    def delta(self, x: Tensor, weight: Tensor, at: EditContext | None) -> Tensor:
        change = (_to(self.gain, x) - 1) * x + _to(self.bias, x)
        if self.low is not None:
            change = torch.where(x >= _to(self.low, x), change, 0)
        if self.high is not None:
            change = torch.where(x <= _to(self.high, x), change, 0)
        return weight * change


@dataclass(frozen=True, eq=False)
class Rotate:
    """Turn x within a plane, its norm and the part outside the plane untouched.

        P x = |P x| (cos phi b1 + sin phi b2)   ->   |P x| (cos phi' b1 + sin phi' b2)
        by "to":  phi' = phi + w wrap(angle - phi)        by "by":  phi' = phi + w angle

    Attributes:
        plane: b1 and b2; b2 is made orthogonal to b1.
        angle: radians.
        mode: "to" sets the angle, "by" adds to it.
        adaptive: only tokens with b1 . x > 0.
    """

    plane: Tensor
    angle: float
    mode: Literal["to", "by"] = "to"
    adaptive: bool = False

    def __post_init__(self):
        rows = _rows(self.plane, "plane")
        if len(rows) != 2 or self.mode not in ("to", "by") or not math.isfinite(self.angle):
            raise ValueError(
                f"plane {tuple(rows.shape)}, angle={self.angle}, mode={self.mode!r}: give two directions, an angle in "
                "radians, and 'to' or 'by'."
            )
        first = _unit(rows[0].double())
        second = rows[1].double() - (rows[1].double() @ first) * first
        if float(second.norm()) < 1e-6 * float(rows[1].norm()):
            raise ValueError("The two directions of the plane are parallel. Give another second one.")
        object.__setattr__(self, "plane", torch.stack([first, _unit(second)]).to(rows.dtype))

    @property
    def width(self) -> int:
        return self.plane.shape[1]

    @property
    def directions(self) -> Tensor:
        return self.plane

    def delta(self, x: Tensor, weight: Tensor, at: EditContext | None) -> Tensor:
        plane = _to(self.plane, x)
        there = x @ plane.T
        a, b = there[..., :1], there[..., 1:]
        turn = torch.full_like(a, self.angle)
        if self.mode == "to":
            turn = torch.remainder(turn - torch.atan2(b, a) + math.pi, 2 * math.pi) - math.pi
        turn = weight * turn
        cos, sin = turn.cos() - 1, turn.sin()
        if self.adaptive:
            cos, sin = torch.where(a > 0, cos, 0), torch.where(a > 0, sin, 0)
        return torch.cat([cos * a - sin * b, sin * a + cos * b], -1) @ plane


@dataclass(frozen=True, eq=False)
class Swap:
    """Write what another run had here: delta = w (values - x), whole or on a few directions only.

    Attributes:
        values: by text (as numbered in the call) and absolute position.
        held: False where the other run had no such token; there nothing changes.
        basis: [k, d]: only this part is swapped, delta = w U'U (values - x). None swaps all.
    """

    values: Tensor
    held: Tensor | None = None
    basis: Tensor | None = None

    def __post_init__(self):
        if self.basis is not None:
            object.__setattr__(self, "basis", Project(self.basis).basis)

    @property
    def width(self) -> int:
        return self.values.shape[-1]

    @property
    def directions(self) -> Tensor | None:
        return self.basis

    def delta(self, x: Tensor, weight: Tensor, at: EditContext | None) -> Tensor:
        call = call_of(at, "Swap")
        texts, positions = call.texts[:, None].expand(x.shape[:2]), call.positions
        n_texts, n_positions = self.values.shape[:2]
        if int(texts.max()) >= n_texts:
            raise ValueError(f"Text {int(texts.max())} has nothing to swap in: values are of {n_texts} texts.")
        is_held = (positions >= 0) & (positions < n_positions)
        spots = positions.clamp(0, n_positions - 1)
        held = self.held
        if held is not None:
            is_held = is_held & held.to(x.device)[texts, spots]
        other = _to(self.values, x)[texts, spots]
        change = torch.where(is_held.view(*is_held.shape, *[1] * (x.ndim - 2)), other - x, 0)
        if self.basis is not None:
            basis = _to(self.basis, x)
            change = (change @ basis.T) @ basis
        return weight * change


@dataclass(frozen=True, eq=False)
class Feedback:
    """delta = w sum_j write_j (setpoint_j - read_j . x): low-rank feedback (`microtome.kernels.residual_feedback`).

    Attributes:
        read: directions; write: what is added per unit of gap; setpoint: wanted readings.
        one_sided: only readings below their setpoint are acted on.
        cap: largest |delta| in units of |x|.
    """

    read: Tensor
    write: Tensor
    setpoint: Tensor | float
    one_sided: bool = False
    cap: float | None = None

    def __post_init__(self):
        read, write = _rows(self.read, "read"), _rows(self.write, "write")
        setpoint = torch.as_tensor(self.setpoint, dtype=read.dtype).reshape(-1)
        if not read.shape == write.shape or len(setpoint) != len(read):
            raise ValueError(
                f"read {tuple(read.shape)}, write {tuple(write.shape)}, {len(setpoint)} setpoints: give as many each."
            )
        if not bool(torch.isfinite(setpoint).all()) or (self.cap is not None and not self.cap > 0):
            raise ValueError(f"setpoint={setpoint.tolist()}, cap={self.cap}: give numbers, and a cap above 0.")
        for name, value in (("read", read), ("write", write), ("setpoint", setpoint)):
            object.__setattr__(self, name, value)

    @property
    def width(self) -> int:
        return self.read.shape[-1]

    @property
    def directions(self) -> Tensor:
        return self.read

    def delta(self, x: Tensor, weight: Tensor, at: EditContext | None) -> Tensor:
        setpoint = _to(torch.as_tensor(self.setpoint), x)
        delta = feedback_delta(
            x, _to(self.read, x), _to(self.write, x), setpoint, _over_heads(weight, x, 1), one_sided=self.one_sided
        )
        return delta if self.cap is None else _capped(delta, x, self.cap)


@dataclass(frozen=True, eq=False)
class Function:
    """Any pure function (x, at) -> change at strength 1; delta = w function(x, at)."""

    function: Callable[[Tensor, EditContext], Tensor]
    width: int | None = None
    directions: Tensor | None = None

    def delta(self, x: Tensor, weight: Tensor, at: EditContext | None) -> Tensor:
        assert at is not None
        change = self.function(x, at)
        if change.shape != x.shape:
            raise ValueError(f"The function gave {tuple(change.shape)}; expected {tuple(x.shape)}, the shape of x.")
        return weight * change


def _to(tensor: Tensor, x: Tensor) -> Tensor:
    return tensor if tensor.dtype == x.dtype and tensor.device == x.device else tensor.to(x)


def _over_heads(weighted: Tensor, x: Tensor, width: int | None = None) -> Tensor:
    shape = x.shape if width is None else (*x.shape[:-1], width)
    return weighted if weighted.shape == shape else weighted.expand(shape)


def _norm_kept(x: Tensor, delta: Tensor) -> Tensor:
    new = x + delta
    before, after = (torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (x, new))
    return new * (before / after.clamp_min(torch.finfo(x.dtype).tiny)) - x


def _capped(delta: Tensor, x: Tensor, cap: float) -> Tensor:
    size, limit = (
        torch.linalg.vector_norm(delta, dim=-1, keepdim=True),
        cap * torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    )
    return delta * (limit / size.clamp_min(torch.finfo(x.dtype).tiny)).clamp(max=1)

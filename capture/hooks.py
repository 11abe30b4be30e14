"""The hooks themselves: set once per place, inert, and switched on for the running context by a `ContextVar`.

All hooks on all models are two functions, `_before` and `_after`, and the attention seam. They look up what is active
in this context (threads and tasks have their own) and do nothing when that is nothing, so nothing leaks into another
thread, past an exception, or into a copy of the model. `detach` takes every one of them out again.

Detach before `torch.compile`, which cannot trace a `ContextVar`, and before pickling a whole model.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from microtome.capture.anatomy import Anatomy
from microtome.capture.attention_seam import SeamCall, intercepted, seam_configs, switch_off, switch_on
from microtome.capture.forward_call import RunningForward
from microtome.capture.layouts import Passing
from microtome.capture.models import LoadedModel
from microtome.capture.opgraph import elements
from microtome.capture.plain_hooks import replaced
from microtome.capture.recurrent_state import state_in

Side = Literal["in", "out", "seam in", "seam out", "cache"]


@runtime_checkable
class LiveTap(Protocol):
    """A tap during one `with taps(...)`.

    Attributes:
        slot: which argument or output element, or which tensor at the seam.
        phase: order among the taps of one tensor: single heads' writes, the tensor itself, what stands on it, copies.
        call: the only call of the module in one forward at which it fires; None for all.
        fired: how often it has fired.
    """

    slot: int | str | None
    phase: int
    call: int | None
    fired: int

    def apply(self, tensor: Tensor, passing: Passing) -> Tensor:
        """The tensor with which the model goes on."""
        ...


class ForwardStopped(BaseException):
    """Raised inside a forward whose taps all have what they want. No `Exception`, so that no model code swallows it."""

    def __init__(self, taps: "ActiveTaps"):
        super().__init__("every tap has fired; the rest of the forward is not needed")
        self.taps = taps


@dataclass(eq=False)
class ActiveTaps:
    """The taps of one `with taps(...)`.

    Attributes:
        at: the live taps of each module, by side.
        required: those that must fire.
        stops: whether the forward ends once all required ones have fired.
        entrances: modules whose call begins a new forward, so that calls are counted from 0 again.
        calls: how often each module was called in the running forward, where a tap wants one call only.
        is_closed: whether the `with` has ended; a copy of its context (a task's, a generator's) may live longer.
        running: the running forward, known where the plan has entrances.
        owner: the thread and asyncio task that opened it, the only ones in which it acts.
    """

    at: dict[Side, dict[nn.Module, list[LiveTap]]]
    required: list[LiveTap]
    stops: bool = False
    entrances: frozenset[nn.Module] = frozenset()
    running: RunningForward = field(default_factory=RunningForward)
    calls: Counter[tuple[Side, nn.Module]] = field(default_factory=Counter)
    is_closed: bool = False
    owner: tuple[int, object] = field(default_factory=lambda: _here())

    def due(self, side: Side, module: nn.Module) -> list[LiveTap]:
        """The live taps of this call of this module."""
        taps = self.at[side].get(module, [])
        if any(tap.call is not None for tap in taps):
            number = self.calls[side, module]
            self.calls[side, module] += 1
            return [tap for tap in taps if tap.call in (None, number)]
        return taps

    def enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """A forward begins; or its trunk does, whose arguments say more."""
        self.calls.clear()
        self.running.enter(module, args, kwargs)

    @property
    def is_full(self) -> bool:
        """Whether every required tap has fired."""
        return all(tap.fired for tap in reversed(self.required))


ACTIVE: ContextVar[tuple[ActiveTaps, ...]] = ContextVar("microtome_taps", default=())
_installing = threading.Lock()


def _here() -> tuple[int, object]:
    """The running thread and asyncio task: contexts are copied into child tasks and threads, taps must not be."""
    loop = asyncio._get_running_loop()
    return threading.get_ident(), asyncio.current_task(loop) if loop is not None else None


def active_taps() -> tuple[ActiveTaps, ...]:
    """What is active here, outermost first."""
    if not (held := ACTIVE.get()):
        return held
    here = _here()
    return tuple(taps for taps in held if not taps.is_closed and taps.owner == here)


def open_taps(taps: ActiveTaps) -> None:
    """Make taps act in this thread and task."""
    ACTIVE.set((*active_taps(), taps))


def close_taps(taps: ActiveTaps) -> None:
    """End them wherever their context was copied to; others that were opened in between stay."""
    taps.is_closed = True
    ACTIVE.set(tuple(other for other in ACTIVE.get() if not other.is_closed))


def attach(model: nn.Module | LoadedModel, anatomy: Anatomy) -> None:
    """Set the hooks for every site of the anatomy and put the seam beside the attention implementation.

    `taps` does this for the sites it needs, each once, so there is no need to call it.
    """
    model = model.module if isinstance(model, LoadedModel) else model
    points = [tap.point for tap in anatomy.taps.values()]
    points += [point for block in anatomy.blocks for point in (block.entry, *(c.point for c in block.contributions))]
    install((model.get_submodule(p.module), "in" if p.side == "in" else "out") for p in points if p.side != "seam")
    if any(point.side == "seam" for point in points):
        switch_on(model)


def detach(model: nn.Module | LoadedModel) -> None:
    """Take every hook out of a model and the seam off its attention, leaving it exactly as it was before.

    Raises:
        RuntimeError: inside a `with taps(...)` on this model.
    """
    model = model.module if isinstance(model, LoadedModel) else model
    modules = set(model.modules())
    if any(module in modules for taps in active_taps() for side in taps.at.values() for module in side):
        raise RuntimeError("detach(model) inside `with taps(model, ...)`: leave the context first.")
    with _installing:
        for module in modules:
            for held, marks in (
                (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
                (module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
            ):
                for key in [key for key, hook in held.items() if hook in HOOKS]:
                    del held[key]
                    for mark in marks:
                        mark.pop(key, None)
    switch_off(seam_configs(model))


def install(places: Iterable[tuple[nn.Module, str]]) -> None:
    """Make sure of one hook on each module and side ("in" or "out")."""
    with _installing:
        for module, side in places:
            if side == "in" and _before not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_before, with_kwargs=True)
            elif side == "out" and _after not in module._forward_hooks.values():
                module.register_forward_hook(_after, with_kwargs=True)


def _due(active: tuple[ActiveTaps, ...], side: Side, module: nn.Module) -> list[LiveTap]:
    if len(active) == 1:
        return active[0].due(side, module)
    # A stable sort: within a phase outer taps come first, and within one `with` its edits before its reads.
    return sorted((tap for taps in active for tap in taps.due(side, module)), key=lambda tap: tap.phase)


def _stop_if_full(active: tuple[ActiveTaps, ...]) -> None:
    for taps in active:
        if taps.stops and taps.is_full:
            raise ForwardStopped(taps)


def _before(module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> tuple[tuple, dict] | None:
    active = active_taps()
    # Without kwargs another thread is just installing this hook: torch stores it before it marks it as wanting them.
    if not active or kwargs is None:
        return None
    for taps in active:
        if module in taps.entrances:
            taps.enter(module, args, kwargs)
    if not (due := _due(active, "in", module)):
        return None
    passing = Passing(module, args, kwargs)
    new_args, new_kwargs = list(args), dict(kwargs)
    for tap in due:
        held = new_kwargs if isinstance(tap.slot, str) else new_args
        if not (tap.slot in held if isinstance(tap.slot, str) else tap.slot < len(held)):
            raise KeyError(
                f"{type(module).__name__} was called with {len(args)} positional arguments and {sorted(kwargs)}; its "
                f"tap expects argument {tap.slot!r}. Call the model as when its anatomy was found, or dissect it again."
            )
        held[tap.slot] = tap.apply(held[tap.slot], passing)
    _stop_if_full(active)
    return tuple(new_args), new_kwargs


def _after(module: nn.Module, args: tuple, *kwargs_and_output: Any) -> Any:
    active = active_taps()
    if not active or len(kwargs_and_output) == 1:
        return None
    kwargs, output = kwargs_and_output
    passing = Passing(module, args, kwargs)
    _act_on_state(active, passing)
    if not (due := _due(active, "out", module)):
        return None
    for tap in due:
        tensor = output if tap.slot is None else dict(elements(output)).get(tap.slot)
        if not isinstance(tensor, Tensor):
            place = "" if tap.slot is None else f" as element {tap.slot!r}"
            raise TypeError(
                f"{type(module).__name__} returned a {type(output).__name__}; its tap expects a tensor{place}. "
                "Call the model as when its anatomy was found, or dissect it again."
            )
        new = tap.apply(tensor, passing)
        if new is not tensor:
            output = replaced(output, tap.slot, new)
    _stop_if_full(active)
    return output


def _act_on_state(active: tuple[ActiveTaps, ...], passing: Passing) -> None:
    """Pass the recurrent state that a call left in its cache through the taps, and write it back in place."""
    due = _due(active, "cache", passing.module)
    for tap in due:
        if (state := state_in(passing.args, passing.kwargs, tap.slot)) is not None:
            new = tap.apply(state, passing)
            if new is not state:
                state.copy_(new)
    if due:
        _stop_if_full(active)


HOOKS = (_before, _after)


class _TapsAtSeam:
    """Passes calls at the attention seam through the active taps."""

    def arguments(self, call: SeamCall) -> SeamCall:
        active = active_taps()
        held = {"q": call.query, "k": call.key, "v": call.value}
        if due := _due(active, "seam in", call.module):
            passing = Passing(call.module, call=call)
            for tap in due:
                held[tap.slot] = tap.apply(held[tap.slot], passing)
            _stop_if_full(active)
        return replace(call, query=held["q"], key=held["k"], value=held["v"])

    def result(self, call: SeamCall, z: Tensor) -> Tensor:
        active = active_taps()
        if due := _due(active, "seam out", call.module):
            passing = Passing(call.module, call=call)
            for tap in due:
                z = tap.apply(z, passing)
            _stop_if_full(active)
        return z


_AT_SEAM = _TapsAtSeam()


def at_seam() -> Any:
    """A context in which the active taps see the attention calls."""
    return intercepted(_AT_SEAM)

"""Ordinary forward hooks on a few points, for the proof: each point's function sees the tensor and may replace it.

These are deliberately not the taps of `microtome.capture.taps`: a proof by the mechanism it is to prove would
prove little. They are set, used for one or a few calls, and removed.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from microtome.capture.anatomy import Point
from microtome.capture.opgraph import elements


@contextmanager
def plain_hooks(
    model: nn.Module, hooks: dict[Point, Callable[[Tensor], Tensor | None]], *, calls_before: Mapping[str, int] = {}
) -> Iterator[None]:
    """Run each point's function on the tensor that passes there; a returned tensor replaces it, None leaves it.

    A point with a call number is met at that call alone, counted from `calls_before` (by module path; 0 if absent).

    Raises:
        KeyError: a point names an argument or output element that the module's call did not have.
        ValueError: a point that is neither.
    """
    with ExitStack() as handles:
        for point, function in hooks.items():
            module = model.get_submodule(point.module)
            if point.call is not None:
                function = _at_call(point.call - calls_before.get(point.module, 0), function)
            function = _in_this_thread(function)
            if point.side not in ("in", "out"):
                raise ValueError(f"{point} is no argument or output of a module.")
            if point.side == "in":
                hook = module.register_forward_pre_hook(_on_input(point, function), with_kwargs=True)
            else:
                hook = module.register_forward_hook(_on_output(point, function))
            handles.callback(hook.remove)
        yield


def _in_this_thread(function: Callable) -> Callable:
    thread = threading.get_ident()
    return lambda value: function(value) if threading.get_ident() == thread else None


def _at_call(wanted: int, function: Callable) -> Callable:
    numbers = itertools.count()
    return lambda value: function(value) if next(numbers) == wanted else None


def _on_input(point: Point, function: Callable) -> Callable:
    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        held = kwargs if isinstance(point.slot, str) else list(args)
        new = function(held[point.slot])
        if new is None:
            return None
        if isinstance(point.slot, str):
            return args, {**kwargs, point.slot: new}
        held[point.slot] = new
        return tuple(held), kwargs

    return hook


def _on_output(point: Point, function: Callable) -> Callable:
    def hook(module: nn.Module, args: tuple, output: Any) -> Any:
        found = dict(elements(output))
        if point.slot not in found:
            raise KeyError(f"{point.module!r} returned elements {list(found)}; {point.slot!r} was expected.")
        new = function(found[point.slot])
        return None if new is None else replaced(output, point.slot, new)

    return hook


def replaced(output: Any, slot: int | str | None, new: Tensor) -> Any:
    """A module output of the same type with one element replaced; `slot` None means the output is the tensor."""
    if slot is None:
        return new
    if isinstance(output, (tuple, list)):
        held = [*output]
        held[slot] = new
        return type(output)(*held) if hasattr(output, "_fields") else type(output)(held)
    changed = type(output)(**{**output}) if hasattr(output, "keys") else output
    changed[slot] = new
    return changed

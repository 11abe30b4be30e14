"""Blocks left out, and a range of blocks run several times over, in every forward inside a context.

    loop of [a, b):  z_0 the stream entering block a,   z_{i+1} = (1 - w_i) z_i + w_i Phi(z_i),   block b reads z_n

Phi is blocks a to b - 1 in order, with the arguments (masks, position embeddings) that each got in this forward.
Every repeat keeps keys and values in cache slots of its own, so that a cached step is the step of one forward; a
block that is left out leaves its slot empty, but for block 0, by whose slot transformers counts what a cache holds:
it runs, and its result is dropped.

`forward` of those blocks is replaced while the context is open, for this thread alone. Taps inside the range act in
every repeat; a tap at the range's last output sees only what leaves the loop.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from microtome.capture.anatomy import Anatomy, Block, Point
from microtome.capture.opgraph import elements
from microtome.capture.plain_hooks import replaced

OnState = Callable[[int, Tensor], object]


@contextmanager
def blocks_skipped(module: nn.Module, anatomy: Anatomy, layers: Sequence[int]) -> Iterator[None]:
    """Blocks that hand on what they are given.

    Raises:
        IndexError: a layer the model does not have.
        ValueError: a block that keeps a recurrent state, or whose output is more than the stream.
    """
    blocks = {layer: plain_block(anatomy, layer) for layer in layers}
    forwards = {}
    for layer, block in blocks.items():
        inner = module.get_submodule(block.path)
        forwards[inner] = _Skip(inner, block, runs_anyway=layer == 0)
    with _replaced_forwards(forwards):
        yield


@contextmanager
def blocks_looped(
    module: nn.Module,
    anatomy: Anatomy,
    first: int,
    stop: int,
    weights: Sequence[float],
    on_state: OnState | None = None,
) -> Iterator[None]:
    """Blocks first .. stop - 1, run once per weight. Of a model with encoder and decoder, neither loops.

    Args:
        weights: w_i of each repeat.
        on_state: told `(i, z_i)`, i from 0 on, in every forward.

    Raises:
        IndexError: layers the model does not have, an empty range.
        ValueError: no weights, or ones that are not finite; a block that keeps a recurrent state.
    """
    if not 0 <= first < stop <= anatomy.layers:
        raise IndexError(f"blocks {first} to {stop} (not included): this model has blocks 0 to {anatomy.layers - 1}.")
    if not weights or not all(torch.isfinite(torch.tensor(list(weights)))):
        raise ValueError(f"weights={list(weights)}: give a finite number for each repeat, at least one.")
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        raise ValueError(f"{type(module).__name__} has an encoder and a decoder: only one stack of blocks loops.")
    blocks = [plain_block(anatomy, layer) for layer in range(first, stop)]
    inner = [module.get_submodule(block.path) for block in blocks]
    loop = _Loop(inner, blocks, list(weights), anatomy.layers, on_state)
    with _replaced_forwards({one: _Looped(one, number, loop) for number, one in enumerate(inner)}):
        yield


def plain_block(anatomy: Anatomy, layer: int) -> Block:
    """The block of that layer of the main stack.

    Raises:
        IndexError: no such layer.
        ValueError: a block that runs several times in a forward already, or keeps a recurrent state.
    """
    found = [block for block in anatomy.blocks if block.layer == layer and not block.stack]
    if not found:
        raise IndexError(f"block {layer}: this model has blocks 0 to {anatomy.layers - 1} in its main stack.")
    block = found[0]
    if len(found) > 1 or block.call is not None:
        raise ValueError(f"block {layer} runs several times in a forward already: it cannot be looped or left out.")
    if any(one.role == "mixer" for one in block.contributions):
        raise ValueError(f"block {layer} keeps a recurrent state, which a repeat would move on: only attention loops.")
    if not block.contributions:
        raise ValueError(f"block {layer} could not be taken apart ({anatomy.model_class}): its stream is not known.")
    return block


class _Dispatch:
    """In place of a block's `forward`: the thread that asked for it gets it, others run the block as it is."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.by_thread: dict[int, list[Callable[..., Any]]] = {}

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        mine = self.by_thread.get(threading.get_ident())
        if not mine:
            return type(self.module).forward(self.module, *inputs, **named)
        return mine[-1](*inputs, **named)


_LOCK = threading.Lock()


@contextmanager
def _replaced_forwards(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    thread = threading.get_ident()
    put: list[tuple[nn.Module, Callable[..., Any]]] = []
    try:
        for module, forward in forwards.items():
            with _LOCK:
                held = vars(module).get("forward")
                if held is not None and not isinstance(held, _Dispatch):
                    raise ValueError(
                        f"{type(module).__name__}: its forward is replaced already (standing still, or by another "
                        "library). Leave that first."
                    )
                if held is not None and held.by_thread.get(thread):
                    raise ValueError("These blocks are looped or left out already: contexts of block ranges overlap.")
                if held is None:
                    held = module.forward = _Dispatch(module)
                held.by_thread.setdefault(thread, []).append(forward)
            put.append((module, forward))
        yield
    finally:
        for module, forward in put:
            with _LOCK:
                held = vars(module)["forward"]
                held.by_thread[thread].remove(forward)
                if not held.by_thread[thread]:
                    del held.by_thread[thread]
                if not held.by_thread:
                    del module.forward


class _Skip:
    def __init__(self, module: nn.Module, block: Block, *, runs_anyway: bool) -> None:
        self.module, self.block, self.runs_anyway = module, block, runs_anyway

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        stream = _given(self.block.entry, inputs, named)
        slot = self.block.exit.slot
        if self.runs_anyway:
            output = type(self.module).forward(self.module, *inputs, **named)
            return replaced(output, slot, stream)
        if slot is not None:
            raise ValueError(
                f"{self.block.path} returns more than the stream, which is not known where it is left out."
            )
        return stream.clone()  # a later block may add to it in place


class _Loop:
    """What the blocks of a range share: this forward's arguments and entry, by thread."""

    def __init__(
        self,
        modules: list[nn.Module],
        blocks: list[Block],
        weights: list[float],
        layers: int,
        on_state: OnState | None,
    ) -> None:
        self.modules, self.blocks, self.weights, self.layers = modules, blocks, weights, layers
        self.on_state = on_state
        self.entry: Tensor | None = None
        self.calls: list[tuple[tuple, dict]] = [((), {})] * len(modules)
        self.is_repeat = False

    def run(self, number: int, inputs: tuple, named: dict) -> Any:
        module = self.modules[number]
        if self.is_repeat:
            return type(module).forward(module, *inputs, **named)
        if number == 0:
            self.entry = _given(self.blocks[0].entry, inputs, named).clone()
            if self.on_state is not None:
                self.on_state(0, self.entry)
        self.calls[number] = (inputs, named)
        output = type(module).forward(module, *inputs, **named)
        return output if number + 1 < len(self.modules) else self._repeated(output)

    def _repeated(self, output: Any) -> Any:
        assert self.entry is not None
        slot, state = self.blocks[-1].exit.slot, self.entry
        self.is_repeat = True
        try:
            for i, weight in enumerate(self.weights):
                image = _stream(output, slot) if i == 0 else self._phi(state, i)
                state = image if weight == 1 else torch.lerp(state, image, weight)
                if self.on_state is not None:
                    self.on_state(i + 1, state)
        finally:
            self.is_repeat = False
            self.entry = None
        return replaced(output, slot, state)

    def _phi(self, state: Tensor, repeat: int) -> Tensor:
        last = len(self.modules) - 1
        for number, (module, block, (inputs, named)) in enumerate(
            zip(self.modules, self.blocks, self.calls, strict=True)
        ):
            inputs, named = _with_stream(block.entry, inputs, named, state)
            inputs = tuple(_slots(value, repeat, self.layers) for value in inputs)
            named = {name: _slots(value, repeat, self.layers) for name, value in named.items()}
            run = module if number < last else lambda *a, m=module, **k: type(m).forward(m, *a, **k)
            state = _stream(run(*inputs, **named), block.exit.slot)
        return state


class _Looped:
    def __init__(self, module: nn.Module, number: int, loop: _Loop) -> None:
        self.module, self.number, self.loop = module, number, loop

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.loop.run(self.number, inputs, named)


def _given(entry: Point, inputs: tuple, named: dict) -> Tensor:
    return named[entry.slot] if isinstance(entry.slot, str) else inputs[entry.slot or 0]


def _with_stream(entry: Point, inputs: tuple, named: dict, state: Tensor) -> tuple[tuple, dict]:
    if isinstance(entry.slot, str):
        return inputs, named | {entry.slot: state}
    place = entry.slot or 0
    return (*inputs[:place], state, *inputs[place + 1 :]), named


def _stream(output: Any, slot: int | str | None) -> Tensor:
    return output if slot is None else dict(elements(output))[slot]


def _slots(value: Any, repeat: int, layers: int) -> Any:
    """A cache as one repeat sees it; anything else as it is. Raises ValueError for a cache that cannot be divided."""
    if not (hasattr(value, "update") and hasattr(value, "get_seq_length")):
        return value
    if type(value) is not DynamicCache:
        raise ValueError(
            f"A {type(value).__name__} has no further slots for a loop's repeats. Give a DynamicCache (the default of "
            "`generate`), or none (use_cache=False)."
        )
    return _RepeatCache(value, repeat, layers)


class _RepeatCache:
    """A cache whose layer k is the slot of layer k's repeat: a further layer of the same kind behind all others."""

    def __init__(self, cache: Any, repeat: int, layers: int) -> None:
        self._cache, self._repeat, self._layers = cache, repeat, layers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def _slot(self, layer: int) -> int:
        cache = self._cache
        known: dict[tuple[int, int], int] = cache.__dict__.setdefault("_microtome_repeats", {})
        if (layer, self._repeat) not in known:
            own = cache.layers[layer]
            if type(own) not in (DynamicLayer, DynamicSlidingWindowLayer):
                raise ValueError(
                    f"Layer {layer} keeps its past in a {type(own).__name__}, of which a repeat can have none of its "
                    "own. Only attention with a dynamic cache loops."
                )
            # Block `layer` has run once in this forward: its slot holds this forward's tokens and no more, or else
            # the cache was filled without the loop.
            while len(cache.layers) < self._layers:
                cache.layers.append(cache.layer_class_to_replicate())
            window = {"sliding_window": own.sliding_window} if hasattr(own, "sliding_window") else {}
            cache.layers.append(type(own)(**window))
            known[layer, self._repeat] = len(cache.layers) - 1
        return known[layer, self._repeat]

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        slot = self._slot(layer_idx)
        keys, values = self._cache.layers[slot].update(key, value, *args, **kwargs)
        held, own = self._cache.layers[slot].get_seq_length(), self._cache.layers[layer_idx].get_seq_length()
        if held != own:
            raise ValueError(
                f"The cache holds {own} tokens of layer {layer_idx} and {held} of its repeat: it was filled without "
                "the loop. Start from an empty cache inside the context."
            )
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._cache.layers[self._slot(layer_idx)].get_seq_length()

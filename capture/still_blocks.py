"""Blocks that stand still: the first ones of a forward return what they returned in another one of the same batch.

An edit changes nothing before its site, so that only blocks behind it need run again. While the context is open,
`forward` of those blocks is replaced, for this thread alone; hooks of the blocks run as ever. Only outputs that are
read need be kept; other blocks hand on something of the right kind.

Beware: that a model passes nothing from block to block beside the stream is the caller's to check, by running one
forward both ways.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from microtome.capture.anatomy import Anatomy


@contextmanager
def outputs_kept(module: nn.Module, anatomy: Anatomy, layers: tuple[int, ...]) -> Iterator[dict[int, Any]]:
    """What blocks return in the forward inside, by layer."""
    held: dict[int, Any] = {}
    thread = threading.get_ident()

    def keep(layer: int) -> Any:
        def hook(_block: nn.Module, _inputs: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                held[layer] = _fresh(output)

        return hook

    blocks = _blocks(module, anatomy)
    handles = [blocks[layer].register_forward_hook(keep(layer)) for layer in layers]
    try:
        yield held
    finally:
        for handle in handles:
            handle.remove()


class _Still:
    """In place of a block's `forward`: what each thread holds of it; threads that hold nothing run the block."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.outputs: dict[int, Any] = {}

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        thread = threading.get_ident()
        if thread not in self.outputs:
            return type(self.block).forward(self.block, *inputs, **named)
        return _fresh(self.outputs[thread])


_LOCK = threading.Lock()  # of putting one on a block and taking it off


@contextmanager
def blocks_standing_still(module: nn.Module, anatomy: Anatomy, held: Mapping[int, Any], count: int) -> Iterator[None]:
    """The first `count` blocks return what is held of them; none if it is 0. held: must hold the last of them.

    Threads may run one model at once, each with blocks of its own standing still.
    """
    thread, blocks = threading.get_ident(), _blocks(module, anatomy)[:count]
    stood: list[nn.Module] = []
    try:
        for layer, block in enumerate(blocks):
            output = held.get(layer, held[count - 1])
            with _LOCK:
                still = vars(block).get("forward")
                if not isinstance(still, _Still):
                    still = block.forward = _Still(block)
                still.outputs[thread] = output
            stood.append(block)
        yield
    finally:
        for block in stood:
            with _LOCK:
                still = vars(block).get("forward")
                if isinstance(still, _Still):
                    still.outputs.pop(thread, None)
                    if not still.outputs:
                        vars(block).pop("forward", None)


def _fresh(output: Any) -> Any:
    """Copies, since a block may add to its input in place."""
    if isinstance(output, tuple):
        return tuple(_fresh(one) for one in output)
    return output.clone() if isinstance(output, Tensor) else output


def _blocks(module: nn.Module, anatomy: Anatomy) -> list[nn.Module]:
    return [module.get_submodule(block.path) for block in anatomy.blocks if not block.stack]

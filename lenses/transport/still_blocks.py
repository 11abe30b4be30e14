"""Blocks that stand still: in a spliced forward, those before the target return what they returned in the clean one.

A splice changes nothing before its target, so that only the blocks behind it need run again: of a model of L blocks
with a target at depth l, a share l / L of the work is saved. While the context is open, `forward` of those blocks is
replaced, for this thread alone; hooks of the blocks run as ever. Only what is read is kept: the output of the block
at the source and of the last one that stands still; the others hand on something of the right kind that nobody reads.

That a model passes nothing from block to block beside the stream is not assumed: `SplicePass` runs every
operator's first splice both ways, and lets all blocks run from then on if any bit differs.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from microtome.capture.anatomy import Anatomy
from microtome.capture.sites import Site
from microtome.lenses.transport.operator import TransportOperator

_AT_THE_EDGE = ("resid_pre", "resid_post")


def still_layers(operator: TransportOperator, anatomy: Anatomy, module: nn.Module) -> tuple[tuple[int, ...], int]:
    """The layers whose output is needed, and how many layers from the first may stand still; none if it is unsure."""
    source, target, head = Site.parse(operator.source), Site.parse(operator.target), operator.route.head
    layers = [block.layer for block in anatomy.blocks if not block.stack]
    paths = [block.path for block in anatomy.blocks if not block.stack]
    is_plain = layers == list(range(len(layers))) and len(set(paths)) == len(paths)
    sites = [source, target, *([head] if head is not None else [])]
    if not is_plain or any(site.layer is None or site.stack or site.call is not None for site in sites):
        return (), 0
    if any("forward" in vars(module.get_submodule(path)) for path in paths):  # somebody else has replaced it
        return (), 0
    assert source.layer is not None
    assert target.layer is not None
    count = target.layer + (target.kind == "resid_post")
    if source.kind not in _AT_THE_EDGE:
        count = min(count, source.layer)
    if head is not None and head.layer is not None:
        count = min(count, head.layer)
    before_source = source.layer - (source.kind == "resid_pre")
    return tuple(layer for layer in {before_source, count - 1} if 0 <= layer < count), count


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


@contextmanager
def blocks_standing_still(module: nn.Module, anatomy: Anatomy, held: Mapping[int, Any], count: int) -> Iterator[None]:
    """The first `count` blocks return what is held of them; none if it is 0. held: must hold the last of them."""
    thread = threading.get_ident()

    def still(block: nn.Module, output: Any) -> Any:
        def forward(*inputs: Any, **named: Any) -> Any:
            if threading.get_ident() != thread:
                return type(block).forward(block, *inputs, **named)
            return _fresh(output)

        return forward

    blocks = _blocks(module, anatomy)[:count]
    try:
        for layer, block in enumerate(blocks):
            block.forward = still(block, held.get(layer, held[count - 1]))
        yield
    finally:
        for block in blocks:
            vars(block).pop("forward", None)


def _fresh(output: Any) -> Any:
    """Copies, since a block may add to its input in place."""
    if isinstance(output, tuple):
        return tuple(_fresh(one) for one in output)
    return output.clone() if isinstance(output, Tensor) else output


def _blocks(module: nn.Module, anatomy: Anatomy) -> list[nn.Module]:
    return [module.get_submodule(block.path) for block in anatomy.blocks if not block.stack]

"""Which blocks need not run again in a spliced forward: those before the target, of which two outputs are read.

Of a model of L blocks with a target at depth l, a share l / L of the work is saved. `SplicePass` runs every operator's
first splice both ways, and lets all blocks run from then on if any bit differs.
"""

from torch import nn

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

"""What was found of one block before anything is proved, and how a recorded block is run again."""

from dataclasses import dataclass, field

from microtome.capture.anatomy import Block, Point, Tap
from microtome.capture.causality import Hooks, Run
from microtome.capture.opgraph import OpGraph
from microtome.capture.plain_hooks import plain_hooks
from microtome.capture.sites import Site


@dataclass
class BlockParts:
    """One block's description, the taps it could offer, and what it could not.

    `linears` are the outputs of linear maps behind its heads, `mid_readers` where modules take the stream before the
    MLP.
    """

    block: Block
    linears: list[Point] = field(default_factory=list)
    mid_readers: list[Point] = field(default_factory=list)
    taps: list[Tap] = field(default_factory=list)
    unavailable: dict[Site, str] = field(default_factory=dict)

    def inside(self, module: str) -> str:
        """A module's path from the block."""
        return module.removeprefix(f"{self.block.path}.")

    def refuse(self, kind: str, reason: str) -> None:
        """Note why a kind of site is not offered in this block."""
        self.unavailable[self.block.site(kind)] = reason


def replay(graph: OpGraph, block: int) -> Run:
    """A function that runs one recorded block call again, with hooks."""

    def run(hooks: Hooks) -> None:
        args, kwargs = graph.arguments(graph.calls[block])
        with plain_hooks(graph.model, hooks, calls_before=graph.calls_before(block)):
            graph.calls[block].module(*args, **kwargs)

    return run

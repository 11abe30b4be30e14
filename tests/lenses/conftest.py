"""Moments of a made-up stream, for tests of linear maps: no model, no corpus."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from microtome.lenses.pair_moments import PairMoments


class RowMoments:
    """Moments of rows in memory, by site, shard and stratum, as `Moments` would give them."""

    def __init__(self, values: Mapping[str, Tensor], masks: Mapping[tuple[str, str], Tensor]) -> None:
        self.values, self.masks = values, masks
        self.sites = list(values)

    def pair(self, source: str, target: str, shard="fit", stratum="rest", *, shuffled=False) -> PairMoments:
        names = [shard] if isinstance(shard, str) else list(shard)
        rows = sum(self.masks[name, stratum] for name in names).bool()
        x, y = self.values[str(source)][rows], self.values[str(target)][rows]
        return PairMoments.from_rows(x, y.roll(7, 0) if shuffled else y)


@pytest.fixture
def row_moments() -> Callable[..., RowMoments]:
    """`row_moments(values, is_sink=None)`: 60, 20 and 20 % of the rows for fit, validation and test."""

    def build(values: Mapping[str, Tensor], is_sink: Tensor | None = None) -> RowMoments:
        count = len(next(iter(values.values())))
        is_sink = torch.zeros(count, dtype=torch.bool) if is_sink is None else is_sink
        ends, masks = [0, count * 6 // 10, count * 8 // 10, count], {}
        for number, shard in enumerate(("fit", "validation", "test")):
            inside = torch.zeros(count, dtype=torch.bool)
            inside[ends[number] : ends[number + 1]] = True
            masks[shard, "rest"], masks[shard, "sinks"] = inside & ~is_sink, inside & is_sink
            masks[shard, "all"] = inside
        return RowMoments(values, masks)

    return build


@pytest.fixture
def stream_moments(row_moments) -> RowMoments:
    """Four depths of a stream of 8 channels, each block adding something linear, something not, and noise; no sinks."""
    generator = torch.Generator().manual_seed(0)
    stream = torch.randn(1000, 8, generator=generator).double() * torch.logspace(0.5, -0.5, 8).double() + 1
    values = {"resid_pre.0": stream}
    for layer in range(3):
        mix, other = torch.randn(2, 8, 8, generator=generator).double() / 8**0.5
        noise = torch.randn(1000, 8, generator=generator).double()
        stream = stream + 0.5 * stream @ mix + 0.5 * torch.tanh(stream @ other) + 0.3 * noise
        values[f"resid_post.{layer}"] = stream
    return row_moments(values)

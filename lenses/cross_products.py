"""Sums and cross-products of rows about a pilot mean: matrix products in the rows' precision, sums in float64.

    p: pilot, the mean of the first rows;  n,   s_i = sum (x_i - p_i),   S_ij = sum (x_i - p_i)^T (x_j - p_j)
    scatter about the mean = S_ij - s_i^T s_j / n
    about a pilot e lower:   S_ij + s_i^T e_j + e_i^T s_j + n e_i^T e_j

Uncentred float32 sums lose a channel of mean 500 and deviation 1 (measured on the methods sheet: a variance of 1 came
out as 6); about a pilot the float32 product of at most some thousand rows keeps six digits of sqrt(S_ii S_jj), and the
sums over products keep what float64 keeps. TF32 and autocast are off during the products and as they were after.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.site_pairs import SitePairs


@dataclass(eq=False)
class CrossProducts:
    """An accumulator: `add` and `join` change it. Activation units.

    Attributes:
        pilot: what rows are centred at; float64 that the rows' dtype holds exactly.
        count: rows.
        sums: of the centred rows.
        blocks: per site, its cross-products with its targets, `[d_site, all targets' widths]`.
        own: with another row paired to each (the shuffled control), each site's product with itself; else empty.
    """

    pairs: SitePairs
    pilot: Float64[Tensor, " column"]
    count: int
    sums: Float64[Tensor, " column"]
    blocks: list[Tensor]
    own: list[Tensor]

    @classmethod
    def empty(
        cls, pairs: SitePairs, pilot: Float64[Tensor, " column"], *, is_shuffled: bool = False
    ) -> "CrossProducts":
        """Of no rows, on the pilot's device."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=pilot.device)

        blocks = [zeros(width, pairs.block_width(i)) for i, width in enumerate(pairs.widths)]
        own = [zeros(width, width) for width in pairs.widths] if is_shuffled else []
        return cls(pairs, pilot, 0, zeros(pairs.columns), blocks, own)

    def to(self, device: torch.device) -> "CrossProducts":
        """The same on a device."""
        blocks, own = ([tensor.to(device) for tensor in each] for each in (self.blocks, self.own))
        return CrossProducts(self.pairs, self.pilot.to(device), self.count, self.sums.to(device), blocks, own)

    def add(
        self, centred: Float[Tensor, "token column"], partners: Float[Tensor, "token column"] | None = None
    ) -> None:
        """Count in rows that are centred at the pilot already.

        partners: the same rows in another order; products are then of each row with its partner.
        """
        if not len(centred):
            return
        right = centred if partners is None else partners
        self.count += len(centred)
        self.sums += centred.sum(0, dtype=torch.float64)
        with exact_products(centred.device):
            for source, block in enumerate(self.blocks):
                left = centred[:, self.pairs.span(source)].T
                start = 0
                for run in self.pairs.runs(source):
                    width = run.stop - run.start
                    block[:, start : start + width] += left @ right[:, run]
                    start += width
            for source, own in enumerate(self.own):
                rows = centred[:, self.pairs.span(source)]
                own += rows.T @ rows

    def join(self, other: "CrossProducts") -> None:
        """Count in the rows of `other`, whatever its pilot."""
        step = (other.pilot.to(self.pilot.device) - self.pilot) if other.count else torch.zeros_like(self.pilot)
        sums = other.sums.to(self.sums.device)
        for source, block in enumerate(self.blocks):
            span = self.pairs.span(source)
            block += other.blocks[source].to(block.device)
            start = 0
            for run in self.pairs.runs(source):
                width = run.stop - run.start
                _shift(block[:, start : start + width], other.count, sums[span], step[span], sums[run], step[run])
                start += width
        for source, own in enumerate(self.own):
            span = self.pairs.span(source)
            own += other.own[source].to(own.device)
            _shift(own, other.count, sums[span], step[span], sums[span], step[span])
        self.sums += sums + other.count * step
        self.count += other.count

    def pair(self, source: int, target: int, rounding: float = 0.0) -> PairMoments:
        """Moments of a pair about its own means, in copies.

        rounding: of an entry, in sqrt(S_ii S_jj) about the pilot; kept as the noise of channels.

        Raises:
            KeyError: the pair is not held.
        """
        first, last = self.pairs.block_of(source, target)
        block = self.blocks[first][:, self.pairs.place_in_block(first, last)]
        xy = block if source == first else block.T
        x, y = self.pairs.span(source), self.pairs.span(target)
        n = max(self.count, 1)
        xx = self._own(source) - torch.outer(self.sums[x], self.sums[x]) / n
        noise = [self._own(site).diagonal() * rounding if rounding else None for site in (source, target)]
        yy = self._own(target) - torch.outer(self.sums[y], self.sums[y]) / n
        return PairMoments(
            self.count,
            self.pilot[x] + self.sums[x] / n if self.count else torch.zeros_like(self.pilot[x]),
            self.pilot[y] + self.sums[y] / n if self.count else torch.zeros_like(self.pilot[y]),
            (xx + xx.T) / 2,
            xy - torch.outer(self.sums[x], self.sums[y]) / n,
            (yy + yy.T) / 2,
            noise_x=noise[0],
            noise_y=noise[1],
        )

    def _own(self, site: int) -> Tensor:
        return self.own[site] if self.own else self.blocks[site][:, self.pairs.place_in_block(site, site)]


def _shift(block: Tensor, count: int, s_x: Tensor, e_x: Tensor, s_y: Tensor, e_y: Tensor) -> None:
    """Products about one pilot become those about another that is e lower."""
    block.addr_(s_x, e_y)
    block.addr_(e_x, s_y + count * e_y)


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Products in full float32: TF32, bfloat16 shortcuts and autocast off inside, and as they were afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)

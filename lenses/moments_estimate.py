"""What moments take, before anything runs: bytes, operations per token, and the widest band that would fit.

products: 8 bytes x entries of all blocks x shards (x 2 with the shuffled control, and a block per site more)
rows that wait: chunk x columns x bytes x shards;   one product at a time: widest block x (bytes + 8)
sinks: their rows, never more than products of their own would take

operations per token: 2 x entries of all blocks (each entry one multiplication and one addition)
"""

from dataclasses import dataclass

import torch

from microtome.data.free_memory import free_memory
from microtome.data.spoken import spoken_bytes
from microtome.lenses.site_pairs import SitePairs

_LEFT_FREE = 0.9  # share of the free memory that may be asked for


@dataclass(frozen=True)
class MomentsEstimate:
    """`str` says it in a line.

    Attributes:
        pairs, shards: how many.
        products, waiting, working, sinks: bytes (module docstring); sinks is the expected number of them.
        flops_per_token: of the products.
        free: bytes of memory, None where the system does not say.
        band: the widest band that fits into it, None where none does; only looked for if this does not fit.
    """

    pairs: int
    shards: int
    products: int
    waiting: int
    working: int
    sinks: int
    flops_per_token: int
    free: int | None
    band: int | None = None

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.products + self.waiting + self.working + self.sinks

    @property
    def fits(self) -> bool:
        """Whether it fits into nine tenths of the free memory (or that is not known)."""
        return self.free is None or self.nbytes <= _LEFT_FREE * self.free

    def require_memory(self) -> None:
        """Raise ValueError, saying what would fit, if this does not."""
        if self.fits:
            return
        advice = (
            f"pairs={self.band} (sites at most {self.band} apart) would fit"
            if self.band is not None
            else "not even pairs=0 (each site with itself) would fit: take fewer sites or shards"
        )
        raise ValueError(
            f"Moments of {self.pairs:,} pairs of sites in {self.shards} shards take {spoken_bytes(self.nbytes)}; "
            f"{spoken_bytes(self.free)} of memory are free. {advice}. Or name one target: pairs='final_norm' keeps "
            "each site with itself and with that one."
        )

    def __str__(self) -> str:
        return (
            f"{self.pairs:,} pairs of sites in {self.shards} shards: {spoken_bytes(self.nbytes)} (products "
            f"{spoken_bytes(self.products)}), {self.flops_per_token / 1e9:.2g} GFLOP per token"
        )


def estimate_moments(
    pairs: SitePairs,
    shards: int,
    *,
    shuffled: bool = False,
    chunk: int = 2048,
    dtype: torch.dtype = torch.float32,
    sinks: int = 0,
    device: torch.device | None = None,
) -> MomentsEstimate:
    """The estimate. sinks: how many tokens will be set apart, such as one per text. device: where the sums lie."""
    free = _free(device)
    found = _estimate(pairs, shards, shuffled, chunk, dtype, sinks, free)
    if found.fits:
        return found
    widths = dict(zip(pairs.names, pairs.widths, strict=True))
    for band in range(len(widths) - 2, -1, -1):
        banded = SitePairs.of(widths, band)
        if _estimate(banded, shards, shuffled, chunk, dtype, sinks, free).fits:
            return _estimate(pairs, shards, shuffled, chunk, dtype, sinks, free, band)
    return found


def products_bytes(pairs: SitePairs, *, shuffled: bool) -> int:
    """Bytes of one shard's cross-products."""
    own = sum(width * width for width in pairs.widths)
    return 8 * (pairs.numbers * (2 if shuffled else 1) + (own if shuffled else 0))


def _estimate(
    pairs: SitePairs,
    shards: int,
    shuffled: bool,
    chunk: int,
    dtype: torch.dtype,
    sinks: int,
    free: int | None,
    band: int | None = None,
) -> MomentsEstimate:
    row = pairs.columns * dtype.itemsize
    products = products_bytes(pairs, shuffled=shuffled)
    widest = max(width * pairs.block_width(i) for i, width in enumerate(pairs.widths))
    return MomentsEstimate(
        pairs.pairs,
        shards,
        products * shards,
        chunk * row * (shards + (2 if shuffled else 0)),  # two copies in another order for the control
        widest * (dtype.itemsize + 8),
        min(sinks * row, products * shards),
        2 * (products // 8),
        free,
        band,
    )


def _free(device: torch.device | None) -> int | None:
    if device is not None and device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_memory() if device is None or device.type == "cpu" else None

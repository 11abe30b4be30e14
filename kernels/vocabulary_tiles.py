"""Logits of some rows for a block of the vocabulary: the tile that every streamed read-out of a vocabulary works on.

    z = cap tanh(factor (h W_b + b_b) / cap),   float32 for half-precision and float32 input, float64 for float64

The factor is folded into the states and the bias, so that it costs nothing per tile. Products of float32 go through
oneDNN where the processor has AVX-512: on an AMD EPYC (Zen 5, one thread) the usual path of torch (MKL) reaches 109
GFLOP/s, oneDNN 215 (products of 512 x 576 with 576 x 1,024; 30 November 2026, torch 2.13.0). Elsewhere it is
`torch.mm`.

Beware: products of a few rows or columns may differ from those of many in the last bit, so that equal tokens would
look unequal. Products are therefore made of at least 16 rows and 64 columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

FEWEST_ROWS, FEWEST_COLUMNS = 16, 64


def wide_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any tensor is, else float32: in what the sums run."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def spans(length: int, step: int) -> Iterator[tuple[int, int]]:
    """Start and stop of consecutive pieces, the last one shorter where it must be."""
    return ((start, min(start + step, length)) for start in range(0, length, step))


def uses_onednn(like: Tensor) -> bool:
    """Whether products go through oneDNN (Intel's library, part of torch): float32 on a CPU with AVX-512."""
    return (
        like.dtype == torch.float32
        and like.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
    )


@dataclass(frozen=True, eq=False)
class Rows:
    """States of a tile in the layout that products read, made once per sweep over the vocabulary.

    Attributes:
        dense: the states, with rows of zeros up to the fewest that a product is made of.
        packed: the same for oneDNN, None where products do not go through it.
        count: how many rows are states.
    """

    dense: Float[Tensor, "row d_model"]
    packed: Shaped[Tensor, "..."] | None
    count: int

    @classmethod
    def of(cls, states: Float[Tensor, "count d_model"]) -> "Rows":
        """Of states that are already in the dtype of the sums."""
        dense = _at_least(states, FEWEST_ROWS).contiguous()
        return cls(dense, dense.to_mkldnn() if uses_onednn(states) else None, len(states))

    def times(self, columns: Float[Tensor, "column d_model"]) -> Float[Tensor, "count column"]:
        """states @ columns^T, a new tensor in the dtype of both, an autocast around the call notwithstanding."""
        enough = _at_least(columns, FEWEST_COLUMNS)
        with torch.autocast(self.dense.device.type, enabled=False):
            if self.packed is None:
                product = torch.mm(self.dense, enough.T)
            else:
                product = torch.nn.functional.linear(self.packed, enough.contiguous().to_mkldnn()).to_dense()
        return product[: self.count, : len(columns)].contiguous()


def _at_least(rows: Float[Tensor, "row d_model"], fewest: int) -> Float[Tensor, "more d_model"]:
    missing = fewest - len(rows)
    return rows if missing <= 0 else torch.nn.functional.pad(rows, (0, 0, 0, missing))


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """An unembedding that is read in blocks.

    Attributes:
        weight, bias, factor, cap: as of `vocabulary_statistics`.
        dtype: of the sums.
    """

    weight: Float[Tensor, "vocab d_model"]
    bias: Float[Tensor, " vocab"] | None
    factor: float
    cap: float | None
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.weight)

    def rows(self, states: Shaped[Tensor, "row d_model"]) -> Rows:
        """States made ready for `logits`, the factor folded in."""
        wide = states.to(self.dtype)
        return Rows.of(wide if self.factor == 1 else wide * self.factor)

    def columns(self, start: int, stop: int) -> Float[Tensor, "block d_model"]:
        """A block of the weight in the dtype of the sums."""
        return self.weight[start:stop].to(self.dtype)

    def logits(self, rows: Rows, start: int, stop: int) -> Float[Tensor, "row block"]:
        """Logits of one block, a new tensor that the caller may overwrite."""
        return self._finished(rows.times(self.columns(start, stop)), slice(start, stop))

    def logits_of(self, rows: Rows, ids: Shaped[Tensor, " id"]) -> Float[Tensor, "row id"]:
        """Logits of chosen tokens, by a product like those of the blocks."""
        return self._finished(rows.times(self.weight[ids].to(self.dtype)), ids)

    def _finished(self, z: Tensor, tokens: slice | Tensor) -> Tensor:
        if self.bias is not None:
            z.add_(self.bias[tokens].to(self.dtype) * self.factor)
        return z if self.cap is None else z.div_(self.cap).tanh_().mul_(self.cap)

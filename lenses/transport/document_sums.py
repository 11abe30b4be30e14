"""Sums over the rows of each document, column by column, and what a bootstrap over documents says of ratios of them.

    R2 = 1 - sum_doc E / sum_doc S,     S = sum (a - m)^2, m fixed;   or  S = A2 - A1^2 / n about the mean of the rows

A draw counts document g c_g times, (c_1..c_G) ~ Multinomial(G, 1/G); sums of a draw are c @ sums, so rows are gone by
then: columns are done some at a time, and 16,000 columns of 200 documents are one product of 1,000 x 200 x 16,000.
Rows of one document are alike; intervals that draw tokens would be too narrow by the square root of that likeness. The
interval is the percentile one (Efron and Tibshirani 1993, ch. 13).
"""

from collections.abc import Hashable

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

_COLUMNS = 2048


class DocumentSums:
    """An accumulator by key: `[document, column]`, float64 on the CPU; 0 where nothing came."""

    def __init__(self, documents: int) -> None:
        self.documents = documents
        self._sums: dict[Hashable, Tensor] = {}

    def add(self, key: Hashable, rows: Float[Tensor, "row column"], document: Int64[Tensor, " row"]) -> None:
        """Count in some rows; their products are summed in their own dtype, some hundred at a time."""
        if key not in self._sums:
            self._sums[key] = torch.zeros(self.documents, rows.shape[1], dtype=torch.float64)
        there, place = document.unique(return_inverse=True)
        is_of = torch.nn.functional.one_hot(place, len(there)).to(rows)
        self._sums[key].index_add_(0, there, (is_of.T @ rows).to("cpu", torch.float64))

    def __getitem__(self, key: Hashable) -> Float64[Tensor, "document column"]:
        return self._sums[key]

    def __contains__(self, key: Hashable) -> bool:
        return key in self._sums


def document_draws(documents: int, draws: int, seed: int) -> Float64[Tensor, "draw document"]:
    """How often each document counts in each draw."""
    shares = np.full(documents, 1 / documents)
    return torch.from_numpy(np.random.default_rng(seed).multinomial(documents, shares, size=draws).astype(float))


def total_squares(
    counts: Float64[Tensor, "*draw 1"],
    sums: Float64[Tensor, "*draw column"],
    squares: Float64[Tensor, "*draw column"],
    is_mean_known: bool,
) -> Float64[Tensor, "*draw column"]:
    """S: the squares as they are where they are about the known mean, else about the mean of the same rows."""
    return squares if is_mean_known else squares - sums.square() / counts.clamp_min(1)


def r2_draws(
    weights: Float64[Tensor, "draw document"],
    errors: Float64[Tensor, "document column"],
    counts: Float64[Tensor, "document 1"],
    sums: Float64[Tensor, "document column"],
    squares: Float64[Tensor, "document column"],
    is_mean_known: bool,
) -> Float64[Tensor, "draw column"]:
    """R2 of each draw; NaN where nothing varies in it."""
    total = total_squares(weights @ counts, weights @ sums, weights @ squares, is_mean_known)
    return torch.where(total > 0, 1 - (weights @ errors) / total, torch.nan)


def r2_interval(
    weights: Float64[Tensor, "draw document"],
    errors: Float64[Tensor, "document column"],
    counts: Float64[Tensor, "document 1"],
    sums: Float64[Tensor, "document column"],
    squares: Float64[Tensor, "document column"],
    is_mean_known: bool,
    level: float = 0.95,
) -> tuple[Float64[Tensor, " column"], Float64[Tensor, " column"]]:
    """Low and high end of R2 of every column; NaN with fewer than two documents, of which nothing can be said."""
    n_columns = errors.shape[1]
    if weights.shape[1] < 2:
        empty = torch.full((n_columns,), torch.nan, dtype=torch.float64)
        return empty, empty.clone()
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    ends = []
    for start in range(0, n_columns, _COLUMNS):
        some = slice(start, start + _COLUMNS)
        drawn = r2_draws(weights, errors[:, some], counts, sums[:, some], squares[:, some], is_mean_known)
        ends.append(torch.nanquantile(drawn.T.contiguous(), tails, dim=1))
    low, high = torch.cat(ends, dim=1)
    return low, high

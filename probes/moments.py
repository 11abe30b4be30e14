"""First and second moments of many sites' rows and their targets, chunk by chunk: all that closed-form probes need.

Per site and cell (a cell is a fold, or all rows): Σw, mean, Σw (x-m)(x-m)ᵀ, and for every target column ȳ, Σw (y-ȳ)²,
Σw (x-m)(y-ȳ)ᵀ. A class is a target column of 0 and 1, whose cross-product is n_k (m_k - m): total moments and class
sums give ridge, LDA (within = total - between), differences of means, PCA. Cells and chunks join by Chan's rule,

    δ = m_B - m_A,  m += δ n_B/n,  S = S_A + S_B + δ δᵀ n_A n_B/n      (Chan, Golub & LeVeque 1983, eq. 2.1),

in float64, each chunk about its own mean: no large numbers are subtracted, so a channel of mean 3000 and variance 1
keeps its variance. Moments of a training set are its cells' joined, never a total less a cell: what a cell left out
holds cannot change a bit of them.

Beware: d² numbers per site and cell.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from microtome.probes.problem_checks import LARGEST

_BLOCK_BYTES = 2**25  # float64 rows worked on at a time


@dataclass(eq=False)
class Moments:
    """An accumulator: `update` changes it, everything else leaves it as it is. Activation units, target units."""

    count: Float64[Tensor, " cell"]  # rows, or the sum of their weights
    mean: Float64[Tensor, "site cell feature"]
    scatter: Float64[Tensor, "site cell feature feature"]  # about the cell's mean
    target_mean: Float64[Tensor, "cell output"]
    target_scatter: Float64[Tensor, "cell output"]  # about the cell's mean, each column with itself
    cross: Float64[Tensor, "site cell feature output"]

    @classmethod
    def empty(cls, sites: int, width: int, outputs: int, *, cells: int = 1) -> "Moments":
        """Moments of no rows."""
        shapes = ((cells,), (sites, cells, width), (sites, cells, width, width), (cells, outputs), (cells, outputs))
        return cls(*(torch.zeros(shape, dtype=torch.float64) for shape in (*shapes, (sites, cells, width, outputs))))

    def update(
        self,
        features: Float[Tensor, "site example feature"],
        targets: Float[Tensor, "example output"],
        cells: Int64[Tensor, " example"] | None = None,
        weights: Float[Tensor, " example"] | None = None,
    ) -> None:
        """Count in a chunk of rows. cells: the cell of each row, all 0 if None. weights: of each row, 1 if None.

        Raises ValueError for other numbers of sites, features or targets than before, and for NaN, infinity or numbers
        past 1e100.
        """
        n_sites, n_rows, width = features.shape
        expected = (*self.mean.shape[::2], *self.target_mean.shape[1:])
        if (found := (n_sites, width, targets.shape[1])) != expected:
            raise ValueError(
                f"A chunk of {found[0]} sites, {found[1]} features, {found[2]} targets; expected {expected[0]}, "
                f"{expected[1]}, {expected[2]}, as these moments hold."
            )
        if not (fits := features.abs() < LARGEST).all():  # nor is NaN
            site, row, column = (~fits).nonzero()[0].tolist()
            raise ValueError(
                f"Site {site}, row {row} of the chunk has {features[site, row, column].item()} in feature {column}. "
                f"Drop the row, or capture in float32 if it overflowed; squares of numbers past {LARGEST:g} would."
            )
        cells = torch.zeros(n_rows, dtype=torch.int64) if cells is None else cells
        at_once = max(1, _BLOCK_BYTES // (8 * n_sites * width))
        for cell in cells.unique().tolist():
            for rows in (cells == cell).nonzero()[:, 0].split(at_once):
                w = None if weights is None else weights[rows].double()
                self._join(cell, _of_block(features[:, rows].double(), targets[rows].double(), w))

    def merged(self, other: "Moments") -> "Moments":
        """The moments of both ones' rows, cell by cell."""
        result = Moments(*(getattr(self, field.name).clone() for field in fields(self)))
        for cell in range(len(self.count)):
            result._join(cell, other.of([cell]))
        return result

    def of(self, cells: Sequence[int]) -> "Moments":
        """One cell that holds the rows of these."""
        first, *others = cells
        result = Moments(
            count=self.count[[first]],
            mean=self.mean[:, [first]],
            scatter=self.scatter[:, [first]],
            target_mean=self.target_mean[[first]],
            target_scatter=self.target_scatter[[first]],
            cross=self.cross[:, [first]],
        )
        for cell in others:
            result._join(0, self.of([cell]))
        return result

    def with_outputs(self, places: Sequence[int | None]) -> "Moments":
        """The same rows with these target columns: numbers of present ones, None for one that was 0 in every row so far
        (a class that comes later)."""
        width = self.target_mean.shape[1]
        pad = torch.nn.functional.pad
        order = torch.tensor([width if place is None else place for place in places])
        columns = {
            name: pad(getattr(self, name), (0, 1))[..., order] for name in ("target_mean", "target_scatter", "cross")
        }
        kept = {name: getattr(self, name).clone() for name in ("count", "mean", "scatter")}
        return Moments(**kept, **columns)

    def _join(self, cell: int, other: "Moments") -> None:
        """Count in the one cell of `other`."""
        n_a, n_b = self.count[cell].clone(), other.count[0]
        n = n_a + n_b
        if n == 0:
            return
        step, target_step = other.mean[:, 0] - self.mean[:, cell], other.target_mean[0] - self.target_mean[cell]
        between = n_a * (n_b / n)
        self.scatter[:, cell] += other.scatter[:, 0]
        self.scatter[:, cell].addcmul_(step[:, :, None] * between, step[:, None])
        self.cross[:, cell] += other.cross[:, 0] + between * step[..., None] * target_step
        self.target_scatter[cell] += other.target_scatter[0] + between * target_step.square()
        self.mean[:, cell] += step * (n_b / n)
        self.target_mean[cell] += target_step * (n_b / n)
        self.count[cell] = n


def _of_block(rows: Tensor, targets: Tensor, weights: Tensor | None) -> Moments:
    """Moments of rows `[site, example, feature]` in two passes; `rows` is the block's own and is overwritten."""
    share = torch.full((len(targets),), 1 / len(targets), dtype=torch.float64)
    count = torch.tensor(float(len(targets)), dtype=torch.float64)
    if weights is not None:
        count = weights.sum()
        share = weights / count if count > 0 else torch.zeros_like(weights)
    # about the first row, so that a mean loses no digits to the sum
    first, first_target = rows[:, :1].clone(), targets[:1]
    rows -= first
    step, target_step = share @ rows, share @ (targets - first_target)
    rows -= step[:, None]
    centred = targets - first_target - target_step
    weighted = rows if weights is None else rows * weights[:, None]
    return Moments(
        count=count[None],
        mean=(first[:, 0] + step)[:, None],
        scatter=(weighted.mT @ rows)[:, None],
        target_mean=(first_target + target_step),
        target_scatter=(count * (share @ centred.square()))[None],
        cross=(weighted.mT @ centred)[:, None],
    )

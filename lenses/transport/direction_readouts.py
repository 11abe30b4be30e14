"""How much of some directions of a target a source explains: a ridge readout of each, from moments.

    b = argmin sum (a - x b - c)^2 + λ |b|^2,   a = y.u:   b = T diag(1/(w+λ)) C u      in the axes of the source

Each direction takes its own strength, chosen on the validation shard (by generalised cross-validation without one): a
weak direction wants a stronger one than the whole target does. O(d^2) per direction and strength; the axes are shared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from microtome.lenses.linear_map import LinearMap
from microtome.lenses.map_scores import map_scores
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.pair_splits import PairSplits
from microtome.lenses.source_basis import SourceBasis, source_basis
from microtome.lenses.strength_path import checked_strengths, squared_errors


@dataclass(frozen=True, eq=False)
class Readouts:
    """Readouts of K directions.

    Attributes:
        map: x to the K values a.
        r2: of each on the test shard, about the fit mean of a.
        strengths: ρ taken for each.
    """

    map: LinearMap
    r2: Float64[Tensor, " direction"]
    strengths: Float64[Tensor, " direction"]


@dataclass(frozen=True, eq=False)
class ReadoutSource:
    """What readouts from one source share.

    Attributes:
        basis: its axes in the fit shard.
        gram: moments of its validation rows in them, about the fit mean; None without validation.
    """

    basis: SourceBasis
    gram: Float64[Tensor, "d_in d_in"] | None

    @classmethod
    def of(cls, splits: PairSplits) -> "ReadoutSource":
        """Of these moments; their target is not looked at."""
        basis, held = source_basis(splits.fit), splits.validation
        if held is None:
            return cls(basis, None)
        shift = held.mean_x - splits.fit.mean_x
        return cls(basis, basis.gram(torch.addr(held.xx, shift, shift, alpha=held.count)))

    def readouts(self, splits: PairSplits, strengths: Sequence[int | float] | None = None) -> Readouts:
        """Fit, choose and score.

        Args:
            splits: of this source and of projected targets (`projected`).
            strengths: ρ to choose from; 25 from 1e-9 to 10 if None.
        """
        fit, basis, test = splits.fit, self.basis, splits.test
        values = checked_strengths(strengths)
        loadings, damping = basis.rotated(fit.xy), basis.damping(values * basis.unit)
        errors = self._errors(splits, loadings, damping)
        chosen = errors.argmin(0)
        weight = basis.transform @ (damping[chosen].T * loadings)
        found = LinearMap(weight, fit.mean_y - fit.mean_x @ weight, "ridge readouts")
        each = torch.eye(weight.shape[1], dtype=torch.float64)
        return Readouts(found, map_scores(found, test, fit, directions=each).r2_directions, values[chosen])

    def _errors(self, splits: PairSplits, loadings: Tensor, damping: Tensor) -> Float64[Tensor, "strength direction"]:
        """What the strength is chosen by: squared error on validation rows, or GCV."""
        fit, held = splits.fit, splits.validation
        if held is None or self.gram is None:
            squares = loadings.square()
            fitted = fit.yy.diagonal() - 2 * damping @ squares
            fitted = fitted + damping.square() @ (squares * self.basis.variances[:, None])
            free = 1 - (damping @ self.basis.variances + 1) / fit.count
            return torch.where(free[:, None] > 0, fitted / free[:, None].square(), torch.inf)
        shift_x, shift_y = held.mean_x - fit.mean_x, held.mean_y - fit.mean_y
        cross = self.basis.transform.T @ torch.addr(held.xy, shift_x, shift_y, alpha=held.count)
        totals = held.yy.diagonal() + held.count * shift_y.square()
        columns = []
        for number, total in enumerate(totals):
            one = loadings[:, number : number + 1]
            columns.append(squared_errors(damping, one, one @ one.T, self.gram, cross[:, number : number + 1], total))
        return torch.stack(columns, dim=1)


def projected(splits: PairSplits, rows: Float64[Tensor, "direction width"]) -> PairSplits:
    """The same sources with y.u of each direction in place of y.

    Raises:
        ValueError: directions of another width than y.
    """
    if rows.shape[1] != splits.fit.d_out:
        raise ValueError(f"directions have {rows.shape[1]} channels, the target {splits.fit.d_out}.")

    def of(part: PairMoments) -> PairMoments:
        noise = None if part.noise_y is None else rows.square() @ part.noise_y
        return PairMoments(
            part.count,
            part.mean_x,
            rows @ part.mean_y,
            part.xx,
            part.xy @ rows.T,
            rows @ part.yy @ rows.T,
            part.is_recentred,
            part.noise_x,
            noise,
        )

    validation = None if splits.validation is None else of(splits.validation)
    return PairSplits(of(splits.fit), validation, of(splits.test))

"""What every strength of a ridge map would do, and which one is taken.

    SSE(λ) = tr S_yy - 2 D.q + D^T P D,   D_i = 1/(w_i+λ),   q_i = sum_j C_ij Cv_ij,   P = (C C^T) o Gv

with the shard's moments about the fit means, in the axes of the source (`source_basis`): exact, O(d^2) per strength and
no second look at the data. Without a validation shard generalised cross-validation decides (Golub, Heath, Wahba 1979):

    GCV(λ) = (SSE_fit / N) / (1 - (dof + 1)/N)^2,   dof = sum w_i/(w_i+λ);   the 1 is the intercept

Beware: the penalty acts on sums, so λ = ρ tr(S_xx)/d grows with the rows and ρ does not; scikit-learn's alpha is λ. A
strength at the edge of the grid means the grid was too short, or that least squares needs no help (weakest).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.short_repr import short_repr
from microtome.lenses.source_basis import SourceBasis

DEFAULT_STRENGTHS: tuple[float, ...] = tuple(10 ** (-9 + 10 * step / 24) for step in range(25))


@dataclass(frozen=True, eq=False)
class StrengthPath:
    """The path of one pair, strengths ascending.

    Attributes:
        strengths: ρ, in units of the mean variance of the source's channels.
        penalties: λ, scikit-learn's alpha.
        dof: effective degrees of freedom per target channel, without the intercept.
        fit_r2, validation_r2: 1 - SSE / tr S_yy of the shard, about the fit means; NaN without validation.
        gcv: generalised cross-validation error per row; infinite where there are as many dof as rows.
        selected_by: "validation", "gcv" or "given".
        chosen: number of the strength taken.
        condition: largest over smallest variance of the source's axes.
        kept_rank: axes with variance, of `width`.
        count: rows of the fit shard.
    """

    strengths: Float64[Tensor, " strength"]
    penalties: Float64[Tensor, " strength"]
    dof: Float64[Tensor, " strength"]
    fit_r2: Float64[Tensor, " strength"]
    validation_r2: Float64[Tensor, " strength"]
    gcv: Float64[Tensor, " strength"]
    selected_by: str
    chosen: int
    condition: float
    kept_rank: int
    width: int
    count: int

    __repr__ = short_repr

    @property
    def strength(self) -> float:
        """ρ taken."""
        return float(self.strengths[self.chosen])

    @property
    def penalty(self) -> float:
        """λ taken."""
        return float(self.penalties[self.chosen])

    @property
    def edge(self) -> str:
        """ "weakest" or "strongest" where the strength taken is at the end of a grid of several, else ""."""
        if len(self.strengths) == 1:
            return ""
        return {0: "weakest", len(self.strengths) - 1: "strongest"}.get(self.chosen, "")

    def to_frame(self) -> pd.DataFrame:
        """One row per strength."""
        names = ("strengths", "penalties", "dof", "fit_r2", "validation_r2", "gcv")
        table = pd.DataFrame({name: getattr(self, name).cpu().numpy() for name in names})
        table = table.rename(columns={"strengths": "strength", "penalties": "penalty"})
        return table.assign(chosen=[i == self.chosen for i in range(len(table))])


def checked_strengths(strengths: Sequence[int | float] | None) -> Float64[Tensor, " strength"]:
    """Strengths ascending; 25 from 1e-9 to 10 if None.

    Raises:
        ValueError: none, or one that is negative or not finite.
    """
    values = torch.tensor(list(DEFAULT_STRENGTHS if strengths is None else strengths), dtype=torch.float64)
    if not len(values) or not bool((torch.isfinite(values) & (values >= 0)).all()):
        raise ValueError(f"strengths={strengths!r}; give finite ρ of 0 or more (0 is least squares).")
    return values.sort().values


def squared_errors(
    damping: Float64[Tensor, "strength d_in"],
    loadings: Float64[Tensor, "d_in d_out"],
    overlap: Float64[Tensor, "d_in d_in"],
    gram: Float64[Tensor, "d_in d_in"],
    cross: Float64[Tensor, "d_in d_out"],
    total: float | Float64[Tensor, ""],
) -> Float64[Tensor, " strength"]:
    """SSE of every strength on a shard. loadings: C of the fit shard; overlap: C C^T; gram, cross, total: Gv, Cv and
    tr S_yy of the shard, about the fit means."""
    shared = damping @ (overlap * gram)
    return total - 2 * damping @ (loadings * cross).sum(1) + (shared * damping).sum(1)


def strength_path(
    basis: SourceBasis,
    fit: PairMoments,
    loadings: Float64[Tensor, "d_in d_out"],
    validation_errors: Float64[Tensor, " strength"] | None,
    validation_total: float,
    strengths: Float64[Tensor, " strength"],
    select: str | None = None,
) -> StrengthPath:
    """Put together a path and choose from it.

    Args:
        basis: of the source.
        fit: moments of the pair.
        loadings: C = T^T S_xy of the fit shard.
        validation_errors: SSE on the validation shard, None without one.
        validation_total: tr S_yy of that shard about the fit means.
        select: "validation", "gcv", or None for the first that can be.
    Raises:
        ValueError: another `select`, or "validation" without a shard.
    """
    select = select or ("gcv" if validation_errors is None else "validation")
    if select not in ("validation", "gcv"):
        raise ValueError(f"select is {select!r}; there are 'validation' and 'gcv'.")
    if select == "validation" and validation_errors is None:
        raise ValueError("there is no validation shard to choose by. Give one, or select='gcv'.")
    penalties = strengths.to(loadings) * basis.unit
    damping = basis.damping(penalties)
    squares = loadings.square().sum(1)
    total = float(fit.yy.trace())
    fitted = total - 2 * damping @ squares + damping.square() @ (squares * basis.variances)
    dof = damping @ basis.variances
    free = 1 - (dof + 1) / fit.count
    gcv = torch.where(free > 0, fitted.clamp_min(0) / fit.count / free.clamp_min(1e-300).square(), torch.inf)
    unknown = torch.full_like(dof, torch.nan)
    errors = unknown if validation_errors is None else validation_errors
    decides = gcv if select == "gcv" else errors
    return StrengthPath(
        strengths,
        penalties,
        dof,
        1 - fitted / total if total > 0 else unknown,
        1 - errors / validation_total if validation_total > 0 else unknown,
        gcv,
        "given" if len(strengths) == 1 else select,
        int(decides.argmin()),
        basis.condition,
        basis.kept_rank,
        fit.d_in,
        fit.count,
    )

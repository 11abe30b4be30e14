"""Newton's method with conjugate gradients for many penalised logistic regressions, side by side.

Each fit minimises J(v) = ½ Σ_j ridge_j v_j² + C Σ_i s_i [softplus(z_i) - y_i z_i], z_i = v·row_i. Gradients are
measured by the fold's own standardised features, entries of ∇J over √ridge_j. Two stages:

`approach`: nonlinear conjugate gradients (Hager & Zhang 2005, eq. 1.3) in float32, preconditioned as `preconditioner`
says. The step is Newton's along the direction, which needs no further product; an overshoot is cut by the secant. After
the first step, where p(1-p) = ¼ ends, step and preconditioner take the curvature found there.
`refine`: inexact damped Newton (Nocedal & Wright, Numerical Optimization, alg. 7.1) on float64 gradients. The Newton
equation is solved by conjugate gradients on float32 Hessian products, as iterative refinement does. A step is kept
when it lowers the preconditioned gradient norm, else halved. Fits on which conjugate gradients run out of iterations
get exact directions from a float64 Cholesky factor.

A pass is one product with all rows and one back, [fit, width] x [width, example] for every site: near the machine's
speed for many fits, bound by reading the rows for few. Hence the layout [site, strength, task, ...] with ascending
strengths, where a task is a label set in a fold. A fit that is done stops moving; strengths at which all tasks are
done leave the front of the block (small C needs the fewest passes), finished sites leave too. Warm starts in ascending
C were measured to save a tenth of the passes while making the products narrow, so all strengths start at 0.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from microtome.probes.fold_basis import FoldBasis
from microtome.probes.open_fits import open_block, within
from microtome.probes.preconditioner import Axes, Preconditioner, passes_before_refreshing, refreshed, uniform

MAX_CUTS = 20  # of a step that overshoots
SELDOM = 150  # passes from which a preconditioner is not worth refreshing for a few Newton steps
APPROACH = 5e-7  # where float32 hands over: its gradients are good to about 1e-7 of C Σs


@dataclass(frozen=True)
class Tasks:
    """Label sets in folds, at every strength, for every site."""

    weight: Float[Tensor, "task example"]  # s_i, 0 outside the training fold
    target: Float[Tensor, "task example"]  # s_i y_i
    ridge: Float[Tensor, "site 1 task width"]
    strength: Float[Tensor, "strength 1 1"]  # C, ascending

    def kept(self, sites: Tensor, strengths: slice) -> "Tasks":
        """These sites and strengths only."""
        return replace(self, ridge=self.ridge[sites], strength=self.strength[strengths])

    def to(self, dtype: torch.dtype) -> "Tasks":
        return Tasks(*(getattr(self, name).to(dtype) for name in self.__dataclass_fields__))

    def unit(self) -> Float[Tensor, "strength task"]:
        """C Σs, the unit of the gradient."""
        return self.strength[..., 0] * self.weight.sum(1)


@dataclass(frozen=True)
class Solution:
    """Where each fit ended."""

    point: Float[Tensor, "site strength task width"]  # v, float64
    gradient: Float[Tensor, "site strength task"]  # largest absolute entry of ∇J over C Σs
    margin: Float[Tensor, "site strength task"]  # smallest (2y-1) z of the training rows
    passes: Int[Tensor, "site strength task"]


def approach(
    rows: Float[Tensor, "site width example"], axes: Axes, tasks: Tasks, *, tolerance: float, max_passes: int
) -> tuple[Float[Tensor, "site strength task width"], Int[Tensor, "site strength task"]]:
    """float32 points whose largest gradient entry is about `tolerance` times C Σs, and the passes each took."""
    tasks = tasks.to(torch.float32)
    grid = (len(tasks.ridge), len(tasks.strength), len(tasks.weight))
    found = rows.new_zeros(*grid, rows.shape[1])
    passes = torch.zeros(grid, dtype=torch.long, device=found.device)
    here = (torch.arange(grid[0], device=found.device), slice(0, None))  # what of the grid is still in the block

    point = torch.zeros_like(found)
    score = found.new_zeros(*grid, rows.shape[2])
    slope, curvature = _gradient(rows, tasks, point, score)
    lower = uniform(axes, weight=tasks.weight, ridge=tasks.ridge, strength=tasks.strength)
    next_refresh = passes_before_refreshing(lower, grid[2])
    lowered = lower(slope)
    direction = -lowered
    is_open = torch.ones_like(passes, dtype=torch.bool)
    for number in range(max_passes):
        if number >= next_refresh:
            lower = refreshed(lower, rows, strength=tasks.strength, curvature=curvature)
            next_refresh *= 2
        change = _times(direction, rows)
        descent = _dot(slope, direction)
        bend = _dot(tasks.ridge * direction, direction) + tasks.strength[..., 0] * _dot(curvature * change, change)
        step = torch.where(is_open & (bend > 0), -descent / bend, 0.0)[..., None]
        if number == 0:  # all p are ½: the curvature is about to change most, so a second step in one dimension
            residual, bent = _residual(tasks, torch.addcmul(score, change, step))
            stiff = tasks.ridge * direction
            rise = _dot(stiff, direction) * step[..., 0] + tasks.strength[..., 0] * _dot(residual, change)
            bend = _dot(stiff, direction) + tasks.strength[..., 0] * _dot(bent * change, change)
            step = step - torch.where(is_open & (bend > 0), rise / bend, 0.0)[..., None]
        point.addcmul_(direction, step)
        score.addcmul_(change, step)
        new_slope, curvature = _gradient(rows, tasks, point, score)
        rise = _dot(new_slope, direction)
        passes[here] += is_open
        has_overshot = is_open
        for _ in range(MAX_CUTS):
            has_overshot = is_open & (rise > -0.5 * descent)
            if not has_overshot.any():
                break
            # J is convex along the direction: the root of the secant lies before the overshoot
            cut = torch.where(has_overshot, rise / (descent - rise), 0.0)[..., None] * step
            step = step + cut
            point.addcmul_(direction, cut)
            score.addcmul_(change, cut)
            new_slope, curvature = _gradient(rows, tasks, point, score)
            rise = _dot(new_slope, direction)
            passes[here] += has_overshot
        else:
            is_open &= ~has_overshot  # float32 cannot tell downhill from uphill here: left to `refine`

        is_open &= (new_slope * lower.scale).abs_().amax(-1) > tolerance * tasks.unit()
        if not is_open.any():
            break
        if number == 0:  # the first step was Newton's own for p(1-p) = ¼; now that is known better
            measured = curvature.sum((2, 3)) / tasks.weight.sum()
            lower = uniform(
                axes,
                weight=tasks.weight,
                ridge=tasks.ridge,
                strength=tasks.strength,
                variance=measured[..., None],
            )
        new_lowered = lower(new_slope)
        turn = new_slope - slope
        along = _dot(direction, turn)
        beta = _dot(turn, new_lowered) - 2 * _dot(turn, new_lowered - lowered) * rise / along
        beta = torch.where(along > 0, beta / along, 0.0).clamp(min=0)[..., None]
        direction = torch.addcmul(-new_lowered, beta, direction)
        slope, lowered = new_slope, new_lowered

        keep = open_block(is_open)
        if keep is not None:
            found[here] = point
            here = within(here, keep)
            rows, tasks, lower = rows[keep[0]], tasks.kept(*keep), lower.kept(*keep)
            point, score, curvature = point[keep], score[keep], curvature[keep]
            slope, lowered, direction, is_open = slope[keep], lowered[keep], direction[keep], is_open[keep]
    found[here] = point
    return found, passes


def refine(
    basis: FoldBasis,
    axes: Axes,
    tasks: Tasks,
    start: Float[Tensor, "site strength task width"],
    passes: Int[Tensor, "site strength task"],
    *,
    tolerance: float,
    max_steps: int,
    max_passes: int,
) -> Solution:
    """Newton steps from `start` until no float64 gradient entry exceeds `tolerance` C Σs, or `max_steps` are spent."""
    passes = passes.clone()
    found = torch.where(start.isfinite().all(-1, keepdim=True), start, 0.0).double()
    gradient = found.new_full(found.shape[:3], torch.inf)
    margin = torch.full_like(gradient, -torch.inf)
    here = (torch.arange(len(found), device=found.device), slice(0, None))
    single = tasks.to(torch.float32)
    lower = uniform(axes, weight=single.weight, ridge=single.ridge, strength=single.strength)
    base, step = found, torch.zeros_like(found)
    length, base_norm = torch.ones_like(gradient), torch.full_like(gradient, torch.inf)
    is_hard = torch.zeros_like(gradient, dtype=torch.bool)
    for number in range(max_steps):
        point = torch.addcmul(base, length[..., None], step)
        score = _times(point, basis.double)
        slope, curvature = _gradient(basis.double, tasks, point, score)
        passes[here] += length > 0
        largest = (slope * lower.scale).abs_().amax(-1) / tasks.unit()
        slope = slope.float()
        is_done = largest <= tolerance
        norm = base_norm if is_done.all() else _dot(slope, lower(slope)).double().sqrt()
        is_kept = is_done | (norm <= (1 - 1e-4 * length) * base_norm)
        base = torch.where(is_kept[..., None], point, base)
        base_norm = torch.where(is_kept, norm, base_norm)
        # a step of length 1e-9 that lowers nothing: rounding, the fit stays where it is
        is_open = ~is_done & (length >= 1e-9)
        length = torch.where(is_open, torch.where(is_kept, 1.0, length / 2), 0.0)
        found[here] = base
        gradient[here] = torch.where(is_kept, largest, gradient[here])
        signed = torch.where(tasks.target > 0, score, -score)
        margin[here] = signed.masked_fill_(tasks.weight == 0, torch.inf).amin(-1)

        keep = open_block(is_open)
        if keep is not None:
            here = within(here, keep)
            if len(here[0]) == 0:
                break
            basis, tasks, single, lower = basis.of(keep[0]), tasks.kept(*keep), single.kept(*keep), lower.kept(*keep)
            base, base_norm, length, is_hard = base[keep], base_norm[keep], length[keep], is_hard[keep]
            slope, curvature, step, largest = slope[keep], curvature[keep], step[keep], largest[keep]
            is_kept, is_open = is_kept[keep], is_open[keep]
        if number == 0 and passes_before_refreshing(lower, len(tasks.weight)) < SELDOM:
            lower = refreshed(lower, basis.single, strength=single.strength, curvature=curvature.float())
            base_norm = _dot(slope, lower(slope)).double().sqrt()

        # the next gradient should land at a fifth of the tolerance; float32 products cannot gain more than 1e-4 at once
        accuracy = (0.2 * tolerance / largest).clamp(1e-4, 0.1).float()
        is_easy = is_kept & is_open & ~is_hard
        right = torch.where(is_easy[..., None], -slope, 0.0)
        newton, spent, is_late = _conjugate_gradients(
            basis.single, single, lower, curvature.float(), right, accuracy, max_passes
        )
        step = torch.where(is_easy[..., None], newton, step)
        passes[here] += spent
        for site, strength, task in (is_kept & is_open & is_hard).nonzero().tolist():
            step[site, strength, task] = _newton_direction(
                basis.double[site],
                tasks.ridge[site, 0, task],
                tasks.strength[strength, 0] * curvature[site, strength, task],
                slope[site, strength, task].double(),
            )
        is_hard = is_hard | is_late
    return Solution(found, gradient, margin, passes)


def _gradient(rows: Tensor, tasks: Tasks, point: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
    """∇J and s p(1-p) at `point`, whose scores are given."""
    residual, curvature = _residual(tasks, score)
    pull = _times(residual, rows.mT)
    return torch.addcmul(tasks.ridge * point, tasks.strength, pull), curvature


def _residual(tasks: Tasks, score: Tensor) -> tuple[Tensor, Tensor]:
    """s (p - y) and s p(1-p) of every row."""
    share = torch.sigmoid(score)
    weighted = tasks.weight * share
    curvature = torch.addcmul(weighted, weighted, share, value=-1, out=share)
    return weighted.sub_(tasks.target), curvature


def _conjugate_gradients(
    rows: Tensor,
    tasks: Tasks,
    lower: Preconditioner,
    curvature: Tensor,
    right: Tensor,
    accuracy: Tensor,
    max_passes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """H⁻¹ right to each fit's preconditioned accuracy (float64), the passes spent, and which fits did not get there."""
    answer = torch.zeros_like(right)
    spent = torch.zeros(right.shape[:3], dtype=torch.long, device=right.device)
    is_late = torch.zeros_like(spent, dtype=torch.bool)
    here = (torch.arange(len(right), device=right.device), slice(0, None))
    x, residual = torch.zeros_like(right), right
    direction = lower(residual)
    size = _dot(residual, direction)
    enough = accuracy**2 * size
    is_open = size > enough
    for _ in range(max_passes):
        pull = _times(_times(direction, rows).mul_(curvature), rows.mT)
        image = torch.addcmul(tasks.ridge * direction, tasks.strength, pull)
        step = torch.where(is_open, size / _dot(direction, image), 0.0)[..., None]
        x = torch.addcmul(x, step, direction)
        residual = torch.addcmul(residual, step, image, value=-1)
        spent[here] += is_open
        lowered = lower(residual)
        new_size = _dot(residual, lowered)
        direction = torch.addcmul(lowered, torch.where(is_open, new_size / size, 0.0)[..., None], direction)
        size = new_size

        is_open &= size > enough
        keep = open_block(is_open)
        if keep is not None:
            answer[here] = x
            is_late[here] = is_open
            here = within(here, keep)
            if len(here[0]) == 0:
                return answer.double(), spent, is_late
            rows, tasks, lower = rows[keep[0]], tasks.kept(*keep), lower.kept(*keep)
            curvature, enough, is_open, size = curvature[keep], enough[keep], is_open[keep], size[keep]
            x, residual, direction = x[keep], residual[keep], direction[keep]
    answer[here] = x
    is_late[here] = is_open
    return answer.double(), spent, is_late


def _newton_direction(rows: Tensor, ridge: Tensor, curvature: Tensor, slope: Tensor) -> Tensor:
    """-H⁻¹ slope of one fit in float64; rows whose curvature is rounding noise are left out."""
    is_live = curvature > 1e-14 * curvature.amax()
    live = rows[:, is_live]
    hessian = (live * curvature[is_live]) @ live.T
    # the intercept has no penalty: when every row is far from the boundary its curvature underflows
    hessian.diagonal().add_(ridge + 1e-12)
    return -torch.cholesky_solve(slope[:, None], torch.linalg.cholesky(hessian))[:, 0]


def _times(
    block: Float[Tensor, "site strength task inner"], matrix: Float[Tensor, "site inner outer"]
) -> Float[Tensor, "site strength task outer"]:
    """One product per site for all its fits."""
    return torch.bmm(block.flatten(1, 2), matrix).unflatten(1, block.shape[1:3])


def _dot(left: Tensor, right: Tensor) -> Float[Tensor, "site strength task"]:
    """Fit by fit."""
    return (left * right).sum(-1)

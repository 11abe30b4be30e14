"""Newton's method with conjugate gradients for many multinomial logistic regressions, side by side.

Each fit minimises J(V) = ½ Σ_kj ridge_j v_kj² + C Σ_i s_i [logsumexp(z_i) - z_i,y_i], z_ik = v_k·row_i, over K classes.
The loss does not see a vector added to all v_k and the penalty wants their sum at zero, so every point, gradient and
direction sums to zero over the classes. There the Hessian at p_ik = 1/K is ridge + (C/K) Σ s_i row_i row_iᵀ for each
class alone, and in general at most ridge + (C/2) Σ s_i row_i row_iᵀ (Böhning 1992): one preconditioner serves all
classes, label sets and folds of a site (`preconditioner`), with the mean curvature Σ_k p_k(1-p_k)/(K-1) of a row.

Inexact damped Newton (Nocedal & Wright, Numerical Optimization, alg. 7.1) as `newton_cg.refine`: gradients in float64,
the Newton equation by conjugate gradients on float32 products; where these run out of passes, on float64 products. A
step is kept when it lowers the preconditioned gradient norm, else halved.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from microtome.probes.fold_basis import FoldBasis
from microtome.probes.open_fits import open_block, within
from microtome.probes.preconditioner import Axes, Preconditioner, refreshed, uniform

LOOSEST = 0.3  # accuracy of the Newton equation


@dataclass(frozen=True)
class ClassTasks:
    """Label sets in folds, at every strength, for every site."""

    weight: Float[Tensor, "task 1 example"]  # s_i, 0 outside the training fold
    target: Float[Tensor, "task class example"]  # s_i where the row is of the class
    ridge: Float[Tensor, "site 1 task 1 width"]
    strength: Float[Tensor, "strength 1 1 1"]  # C, ascending

    def kept(self, sites: Tensor, strengths: slice) -> "ClassTasks":
        """These sites and strengths only."""
        return replace(self, ridge=self.ridge[sites], strength=self.strength[strengths])

    def to(self, dtype: torch.dtype) -> "ClassTasks":
        return ClassTasks(*(getattr(self, name).to(dtype) for name in self.__dataclass_fields__))

    def unit(self) -> Float[Tensor, "strength task"]:
        """C Σs, the unit of the gradient."""
        return self.strength[..., 0, 0] * self.weight.sum((1, 2))


@dataclass(frozen=True)
class ClassSolution:
    """Where each fit ended."""

    point: Float[Tensor, "site strength task class width"]  # v, float64
    gradient: Float[Tensor, "site strength task"]  # largest absolute entry of ∇J over C Σs
    margin: Float[Tensor, "site strength task"]  # smallest lead of a training row's class over the next
    passes: Int[Tensor, "site strength task"]


def minimise(
    basis: FoldBasis, axes: Axes, tasks: ClassTasks, *, tolerance: float, max_steps: int, max_passes: int
) -> ClassSolution:
    """Newton steps until no float64 gradient entry exceeds `tolerance` C Σs, or `max_steps` are spent.

    `max_passes` bounds the conjugate gradients of one step in float32; in float64 they may take four times as many.
    """
    all_rows, all_tasks = basis.double, tasks
    n_classes, width = tasks.target.shape[1], basis.single.shape[1]
    grid = (len(tasks.ridge), len(tasks.strength), len(tasks.weight))
    found = basis.double.new_zeros(*grid, n_classes, width)
    share = tasks.target.sum(2) / tasks.weight.sum(2)
    log_share = share.log()
    found[..., basis.centre.shape[1]] = log_share - log_share.mean(1, keepdim=True)
    gradient = found.new_full(grid, torch.inf)
    passes = torch.zeros(grid, dtype=torch.long, device=found.device)
    here = (torch.arange(grid[0], device=found.device), slice(0, None))  # what of the grid is still in the block
    single = tasks.to(torch.float32)
    variance = float((1 - share.square().sum(1)).mean()) / (n_classes - 1)
    lower = uniform(
        axes,
        weight=single.weight[:, 0],
        ridge=single.ridge.expand(-1, -1, -1, n_classes, -1).flatten(2, 3),
        strength=single.strength[..., 0],
        variance=variance,
    )
    base, step = found, torch.zeros_like(found)
    length, base_norm = torch.ones_like(gradient), torch.full_like(gradient, torch.inf)
    is_hard = torch.zeros_like(gradient, dtype=torch.bool)
    for number in range(max_steps):
        point = torch.addcmul(base, length[..., None, None], step)
        score = _times(point, basis.double)
        chance = torch.softmax(score, -2)
        slope = _slope(basis.double, tasks, point, chance)
        passes[here] += length > 0
        largest = (slope * lower.scale.unflatten(2, slope.shape[2:4])).abs_().amax((-1, -2)) / tasks.unit()
        single_slope = slope.float()
        norm = _dot(single_slope, _lowered(lower, single_slope)).double().sqrt()
        is_done = largest <= tolerance
        is_kept = is_done | (norm <= (1 - 1e-4 * length) * base_norm)
        base = torch.where(is_kept[..., None, None], point, base)
        base_norm = torch.where(is_kept, norm, base_norm)
        # a step of length 1e-9 that lowers nothing: rounding, the fit stays where it is
        is_open = ~is_done & (length >= 1e-9)
        length = torch.where(is_open, torch.where(is_kept, 1.0, length / 2), 0.0)
        found[here] = base
        gradient[here] = torch.where(is_kept, largest, gradient[here])

        keep = open_block(is_open)
        if keep is not None:
            here = within(here, keep)
            if len(here[0]) == 0:
                break
            basis, tasks, single, lower = basis.of(keep[0]), tasks.kept(*keep), single.kept(*keep), lower.kept(*keep)
            base, base_norm, length, is_hard = base[keep], base_norm[keep], length[keep], is_hard[keep]
            slope, chance, step, largest = slope[keep], chance[keep], step[keep], largest[keep]
            single_slope, is_kept, is_open = single_slope[keep], is_kept[keep], is_open[keep]
        single_chance = chance.float()
        if number in (1, 3):  # at the start the shares of the classes are all there is
            curvature = single.weight[:, 0] * (1 - single_chance.square().sum(-2)) / (n_classes - 1)
            lower = refreshed(lower, basis.single, strength=single.strength[..., 0], curvature=curvature)
            base_norm = _dot(single_slope, _lowered(lower, single_slope)).double().sqrt()

        # the Newton equation to about the error of the Newton step, and no further than the next gradient has to go;
        # float32 products cannot gain more than 1e-4 at once
        accuracy = largest.maximum(0.2 * tolerance / largest).clamp(1e-4, LOOSEST).float()
        is_easy = is_kept & is_open & ~is_hard
        right = torch.where(is_easy[..., None, None], -single_slope, 0.0)
        newton, spent, is_late = _conjugate_gradients(
            basis.single, single, lower, single_chance, right, accuracy, max_passes
        )
        passes[here] += spent
        is_exact = is_kept & is_open & (is_hard | is_late)
        if is_exact.any():
            right = torch.where(is_exact[..., None, None], -slope, 0.0)
            better, spent, _ = _conjugate_gradients(
                basis.double, tasks, lower.to(torch.float64), chance, right, accuracy.double(), 4 * max_passes
            )
            newton = torch.where(is_exact[..., None, None], better, newton)
            passes[here] += spent
        is_hard = is_hard | is_late
        step = torch.where((is_kept & is_open)[..., None, None], newton, step)
    found -= found.mean(-2, keepdim=True)
    return ClassSolution(found, gradient, _margin(_times(found, all_rows), all_tasks), passes)


def _slope(rows: Tensor, tasks: ClassTasks, point: Tensor, chance: Tensor) -> Tensor:
    """∇J at `point`, whose probabilities are given."""
    pull = _times(torch.addcmul(-tasks.target, tasks.weight, chance), rows.mT)
    return torch.addcmul(tasks.ridge * point, tasks.strength, pull)


def _margin(score: Tensor, tasks: ClassTasks) -> Float[Tensor, "site strength task"]:
    is_own = tasks.target > 0
    own = score.masked_fill(~is_own, -torch.inf).amax(-2)
    other = score.masked_fill(is_own, -torch.inf).amax(-2)
    return (own - other).masked_fill_(tasks.weight[:, 0] == 0, torch.inf).amin(-1)


def _conjugate_gradients(
    rows: Tensor,
    tasks: ClassTasks,
    lower: Preconditioner,
    chance: Tensor,
    right: Tensor,
    accuracy: Tensor,
    max_passes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """H⁻¹ right to each fit's preconditioned accuracy (float64), the passes spent, and which fits did not get there."""
    answer = torch.zeros_like(right)
    spent = torch.zeros(right.shape[:3], dtype=torch.long, device=right.device)
    is_late = torch.zeros_like(spent, dtype=torch.bool)
    here = (torch.arange(len(right), device=right.device), slice(0, None))
    heavy = tasks.weight * chance
    x, residual = torch.zeros_like(right), right
    direction = _lowered(lower, residual)
    size = _dot(residual, direction)
    enough = accuracy**2 * size
    is_open = size > enough
    for _ in range(max_passes):
        change = _times(direction, rows)
        change -= (change * chance).sum(-2, keepdim=True)
        pull = _times(change.mul_(heavy), rows.mT)
        image = torch.addcmul(tasks.ridge * direction, tasks.strength, pull)
        step = torch.where(is_open, size / _dot(direction, image), 0.0)[..., None, None]
        x = torch.addcmul(x, step, direction)
        residual = torch.addcmul(residual, step, image, value=-1)
        spent[here] += is_open
        lowered = _lowered(lower, residual)
        new_size = _dot(residual, lowered)
        direction = torch.addcmul(lowered, torch.where(is_open, new_size / size, 0.0)[..., None, None], direction)
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
            chance, heavy, enough = chance[keep], heavy[keep], enough[keep]
            is_open, size = is_open[keep], size[keep]
            x, residual, direction = x[keep], residual[keep], direction[keep]
    answer[here] = x
    is_late[here] = is_open
    return answer.double(), spent, is_late


def _lowered(lower: Preconditioner, slope: Tensor) -> Tensor:
    """About H⁻¹ slope. One preconditioner for all classes keeps sums over the classes at zero."""
    return lower(slope.flatten(2, 3)).unflatten(2, slope.shape[2:4])


def _times(
    block: Float[Tensor, "site strength task class inner"], matrix: Float[Tensor, "site inner outer"]
) -> Float[Tensor, "site strength task class outer"]:
    """One product per site for all its fits."""
    return torch.bmm(block.flatten(1, 3), matrix).unflatten(1, block.shape[1:4])


def _dot(left: Tensor, right: Tensor) -> Float[Tensor, "site strength task"]:
    """Fit by fit, without storing the elementwise product."""
    products = torch.bmm(left.flatten(0, 2).flatten(1)[:, None], right.flatten(0, 2).flatten(1)[:, :, None])
    return products.reshape(left.shape[:3])

"""Ridge regression of many sites for a whole path of penalties, with left-out residuals in closed form.

With rows centred and an eigendecomposition X = Z Vᵀ (Z = US), a penalty λ has fitted values H y and residuals e,

    H = 11ᵀ/n + Z diag(1/(S²+λ)) Zᵀ,   e = y - H y,   w = V diag(1/(S²+λ)) Zᵀ y,

and leaving out the rows G of a group, refitting (intercept and all) and predicting them leaves the residuals

    e_-G = (I - H_GG)⁻¹ e_G = e_G + A_G (D - A_Gᵀ A_G)⁻¹ A_Gᵀ e_G,   A = [Z, 1],  D = diag(S²+λ, n);

for a single row e_i / (1 - h_ii) (Allen 1974's PRESS; the group form is the same identity for blocks). One
decomposition per site serves every penalty, target and group. The first form is used for groups of fewer rows than
features, groups of one size solved together, the second for larger ones. Weighted rows enter times √w.

Penalties are scikit-learn's alpha: on the sum of squares, the same for every left-out fit although those have fewer
rows. Penalty 0 is least squares, by minimum norm where rows are fewer than features.

Beware: features are taken as they come. Scaled by all rows' deviation, left-out fits have seen the left-out rows'
share of that scale (not their labels). Left-out residuals of least squares with as many features as rows do not exist:
what comes is NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from microtome.probes.site_threads import side_by_side

_BLOCK_BYTES = 2**24  # of what is worked on at a time: memory of more is new, and zeroed, at every use
_SINGULAR = 1e-12  # share of a pivot that is left
_LARGE = 24  # rows of a block from which float32 is worth its refinement
_REFINEMENTS = 12
_REFINED = 1e-13  # largest residual of a solution over the largest right-hand side


@dataclass(frozen=True)
class RidgePath:
    """Fits of every penalty. Residuals are target less prediction, in target units."""

    weights: Float64[Tensor, "site penalty output feature"]
    intercepts: Float64[Tensor, "site penalty output"]
    left_out_residuals: Float64[Tensor, "site penalty output example"]  # of each row by the fit without its group


def ridge_path(
    features: Float[Tensor, "site example feature"],
    targets: Float[Tensor, "example output"],
    penalties: Sequence[float],
    groups: Int64[Tensor, " example"] | None = None,
    *,
    sample_weight: Float[Tensor, " example"] | None = None,
) -> RidgePath:
    """Fit every site, penalty and target, and leave out every group.

    Args:
        penalties: λ, 0 or more.
        groups: a group number per row (folds of a cross-validation, too); None leaves out single rows.
        sample_weight: of each row, above 0.

    Raises ValueError for other numbers of rows, a negative penalty, fewer than two groups, weights that are not above
    0, NaN or infinity.
    """
    values = torch.as_tensor(list(penalties), dtype=torch.float64)
    _check(features, targets, values, groups, sample_weight)
    n_rows = features.shape[1]
    codes = torch.arange(n_rows) if groups is None else torch.unique(groups, return_inverse=True)[1]
    root = torch.ones(n_rows, dtype=torch.float64) if sample_weight is None else sample_weight.double().sqrt()
    members, width = _by_size(codes), min(features.shape[1:])
    per_site = 8 * max(len(values) * members[-1].shape[1] * width, 3 * features[0].numel())
    blocks = features.split(max(1, _BLOCK_BYTES // per_site))
    parts = side_by_side(lambda block: _of_sites(block, targets.double(), values, members, root), blocks)
    return RidgePath(*(torch.cat(some) for some in zip(*parts, strict=True)))


def _of_sites(
    x: Float[Tensor, "site example feature"],
    y: Float64[Tensor, "example output"],
    penalties: Float64[Tensor, " penalty"],
    members: list[Tensor],
    root: Float64[Tensor, " example"],
) -> tuple[Tensor, Tensor, Tensor]:
    count = root.square().sum()
    share = root.square() / count
    mean, target_mean = share @ x.double(), share @ y
    rows, target = (x.double() - mean[:, None]) * root[:, None], (y - target_mean) * root[:, None]
    scores, basis, squares = _decomposed(rows)
    damped = torch.where(squares[:, None] > 0, squares[:, None] + penalties[:, None], torch.inf)
    loadings = scores.mT @ target  # [site, component, output]
    weights = (loadings.mT[:, None] / damped[:, :, None]) @ basis.mT[:, None]
    intercepts = target_mean - torch.einsum("spof,sf->spo", weights, mean)
    residuals = target - scores[:, None] @ (loadings[:, None] / damped[..., None])
    left_out = torch.empty_like(residuals)  # [site, penalty, example, output]
    augmented = torch.cat([scores, root[:, None].expand(len(x), -1, 1)], dim=2)
    damped = torch.cat([damped, count.expand(*damped.shape[:2], 1)], dim=2)
    for groups in members:
        at_once = max(1, _BLOCK_BYTES // (8 * len(x) * len(penalties) * groups.shape[1] * augmented.shape[2]))
        for some in groups.split(at_once):
            left_out[:, :, some] = _left_out(augmented[:, some], damped, residuals[:, :, some])
    return weights, intercepts, (left_out / root[:, None]).mT


def _decomposed(rows: Float64[Tensor, "site example feature"]) -> tuple[Tensor, Tensor, Tensor]:
    """Z, V and S² by component; all 0 where S is rounding noise."""
    is_wide = rows.shape[2] > rows.shape[1]
    squares, vectors = torch.linalg.eigh(rows @ rows.mT if is_wide else rows.mT @ rows)
    noise = squares[:, -1:] * max(rows.shape[1:]) * torch.finfo(torch.float64).eps
    squares = torch.where(squares > noise, squares, 0.0)
    vectors = torch.where(squares[:, None] > 0, vectors, 0.0)
    if not is_wide:
        return rows @ vectors, vectors, squares
    length = squares.sqrt()[:, None]
    return vectors * length, rows.mT @ (vectors / torch.where(length > 0, length, 1.0)), squares


def _left_out(
    rows: Float64[Tensor, "site group row component"],
    damped: Float64[Tensor, "site penalty component"],
    residuals: Float64[Tensor, "site penalty group row output"],
) -> Float64[Tensor, "site penalty group row output"]:
    """Residuals of groups of one size; `damped` is D, infinite for components that are noise."""
    n_members, n_components = rows.shape[2:]
    if n_members == 1:
        kept = 1 - (1 / damped) @ rows[:, :, 0].square().mT  # [site, penalty, group]
        return residuals / torch.where(kept > _SINGULAR, kept, torch.nan)[..., None, None]
    if n_members < n_components:
        return _block_solved(rows, 1 / damped, residuals)
    finite = torch.where(damped.isinf(), 1.0, damped)
    kept = torch.diag_embed(finite)[:, :, None] - (rows.mT @ rows)[:, None]
    return residuals + rows[:, None] @ _solved(kept, rows[:, None].mT @ residuals)


def _block_solved(rows: Tensor, inverse: Tensor, residuals: Tensor) -> Tensor:
    """(I - H_GG)⁻¹ e_G for blocks `[site, penalty, group]`.

    H_GG and its factor, which is where the time goes, are in float32 for large blocks, and the solution is refined with
    float64 products (Higham 2002, ch. 12) until its residual is rounding noise; what does not get there is solved in
    float64.
    """
    is_large = rows.shape[2] > _LARGE
    factor, info = torch.linalg.cholesky_ex(_kept(rows, inverse, torch.float32 if is_large else torch.float64))
    if not is_large:
        return _by_factor(factor, info, residuals)
    solution, wrong = torch.zeros_like(residuals), residuals
    bound = _REFINED * residuals.abs().amax(dim=(3, 4)) + torch.finfo(torch.float64).tiny
    for _ in range(_REFINEMENTS):
        solution = solution + torch.cholesky_solve(wrong.float(), factor)
        wrong = residuals - solution + _hat(rows, inverse, solution)
        size = wrong.abs().amax(dim=(3, 4))
        if (size <= bound).all():
            break
    fails = ~(size <= bound) | (info > 0)
    for site, penalty, group in fails.nonzero().tolist():
        at = slice(site, site + 1), slice(penalty, penalty + 1), slice(group, group + 1)
        factor, info = torch.linalg.cholesky_ex(_kept(rows[at[::2]], inverse[at[:2]], torch.float64))
        solution[at] = _by_factor(factor, info, residuals[at])
    return solution


def _kept(rows: Tensor, inverse: Tensor, dtype: torch.dtype) -> Float[Tensor, "site penalty group row row"]:
    """The lower triangle of I - H_GG, a strip of rows at a time; penalties join a strip's rows in one product."""
    n_members = rows.shape[2]
    rows, inverse = rows.to(dtype), inverse.to(dtype)
    kept = rows.new_zeros(*inverse.shape[:2], rows.shape[1], n_members, n_members)
    height = max(_LARGE, -(-n_members // 4))
    for start in range(0, n_members, height):
        stop = min(start + height, n_members)
        strip = (rows[:, :, None, start:stop] * -inverse[:, None, :, None]).flatten(2, 3)
        product = (strip @ rows[:, :, :stop].mT).unflatten(2, (-1, stop - start))
        kept[..., start:stop, :stop] = product.transpose(1, 2)
    kept.diagonal(dim1=-2, dim2=-1).add_(1)
    return kept


def _hat(rows: Tensor, inverse: Tensor, values: Tensor) -> Tensor:
    """H_GG times values, without H_GG."""
    n_penalties, n_outputs = values.shape[1], values.shape[4]
    columns = values.movedim(1, 3).flatten(3)  # [site, group, row, penalty output]
    loadings = (rows.mT @ columns).unflatten(3, (n_penalties, n_outputs)) * inverse.mT[:, None, ..., None]
    return (rows @ loadings.flatten(3)).unflatten(3, (n_penalties, n_outputs)).movedim(3, 1)


def _solved(matrix: Tensor, right: Tensor) -> Tensor:
    """matrix⁻¹ right, NaN where the matrix is singular: the left-out fit is not determined."""
    scale = matrix.diagonal(dim1=-2, dim2=-1).rsqrt()
    factor, info = torch.linalg.cholesky_ex(matrix * scale[..., None] * scale[..., None, :])
    return scale[..., None] * _by_factor(factor, info, scale[..., None] * right)


def _by_factor(factor: Tensor, info: Tensor, right: Tensor) -> Tensor:
    fails = (info > 0) | (factor.diagonal(dim1=-2, dim2=-1).square().amin(dim=-1) < _SINGULAR)
    return torch.where(fails[..., None, None], torch.nan, torch.cholesky_solve(right, factor))


def _by_size(codes: Int64[Tensor, " example"]) -> list[Tensor]:
    """Rows of each group, `[group, row]`, one table per group size, ascending."""
    counts = codes.bincount()
    order = codes.argsort(stable=True)
    starts = counts.cumsum(0) - counts
    return [
        order[starts[counts == size][:, None] + torch.arange(size)] for size in counts.unique().tolist() if size > 0
    ]


def _check(features: Tensor, targets: Tensor, penalties: Tensor, groups: Tensor | None, weights: Tensor | None) -> None:
    if len(penalties) == 0 or not (penalties.isfinite() & (penalties >= 0)).all():
        raise ValueError(f"penalties={penalties.tolist()}; give finite values of 0 or more, such as (1.0, 10.0).")
    n_rows = features.shape[1]
    for name, values, axes in (
        ("targets", targets, "[example, output]"),
        ("groups", groups, "[example]"),
        ("sample_weight", weights, "[example]"),
    ):
        if values is not None and (values.dim() != axes.count(",") + 1 or len(values) != n_rows):
            raise ValueError(f"{name} has shape {list(values.shape)} for {n_rows} rows of features; give {axes}.")
    for name, values in (("features", features), ("targets", targets)):
        if not values.isfinite().all():
            where = tuple((~values.isfinite()).nonzero()[0].tolist())
            raise ValueError(f"{name} holds NaN or infinity (first at index {where}). Drop the row.")
    if weights is not None and not (weights.isfinite() & (weights > 0)).all():
        raise ValueError("sample_weight holds values that are not above 0. Drop rows without weight.")
    if groups is not None and (groups == groups[0]).all():
        raise ValueError("All rows are in one group, so nothing can be left out. Give groups, or None for single rows.")

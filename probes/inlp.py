"""INLP: iterated null-space projection with batched logistic probes, at many sites.

A probe is fitted, the row space of its weights is taken out, the next is fitted on what is left (Ravfogel et al. 2020,
arXiv 2004.07667). The projection is the null space of the SUM of the row spaces, x' = x - Q Q'(x - m) with Q an
orthonormal basis of all weights so far, which stays a projection however often it is extended (a product of
projections does not). Each iteration takes out one dimension for two classes, up to K for K > 2.

Beware: it takes out more than it must (LEACE needs K - 1 dimensions and changes x less), and its authors' code does not
keep the mean; here the mean stays, which no linear probe with an intercept can tell.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from microtome.probes.erasure_maps import Erasures
from microtome.probes.logistic_solver import fit_logistic
from microtome.probes.metrics import auroc

ONE_SIDED = 1.645  # standard errors above 0.5 at which an AUROC is no chance, at 5 %


@dataclass(frozen=True, eq=False)
class InlpFit:
    """INLP of every site. directions: the unit weights of each iteration, zeros once a site had stopped."""

    erasures: Erasures
    directions: Float64[Tensor, "site iteration output feature"]
    held_out_auroc: Float64[Tensor, "site iteration"]  # of the probe of each iteration; NaN where none was fitted
    iterations: Int[Tensor, " site"]  # whose directions are taken out


def inlp(
    features: Float[Tensor, "site example feature"],
    codes: Int[Tensor, " example"],
    *,
    iterations: int = 10,
    C: int | float = 1.0,
    held_out: int | float = 0.25,
    groups: np.ndarray | None = None,
    seed: int = 0,
) -> InlpFit:
    """INLP of every site: probes are fitted on erased rows until one is at chance, or `iterations` times.

    The probe of an iteration is at chance when its AUROC on held-out rows (a share `held_out` of every class, whole
    groups where they are given) is within 1.645 standard errors of 0.5 (rank test, one-sided 5 %; with several classes
    the mean over one-against-the-rest probes, each of which takes a direction). Without held-out rows, or where none
    of a class could be spared, all iterations are made.

    Args:
        C: inverse strength of the penalty, on standardised features.

    Raises ValueError for one class, iterations below 1, held_out outside [0, 1), and what `fit_logistic` refuses.
    """
    if codes.shape != features.shape[1:2] or codes.is_floating_point():
        said = f"codes are {codes.dtype} {list(codes.shape)} for {features.shape[1]} rows"
        raise ValueError(f"{said}; give class numbers.")
    codes = codes.long()
    classes = int(codes.max()) + 1 if len(codes) else 0
    if classes < 2 or len(codes.unique()) < 2:
        raise ValueError(f"codes hold one class only ({codes.unique().tolist()}); erasure needs two classes.")
    if iterations < 1 or not 0 <= held_out < 1:
        raise ValueError(f"iterations={iterations}, held_out={held_out}; give at least 1, and a share in [0, 1).")
    labels = (codes == 1)[None] if classes == 2 else (codes[None] == torch.arange(classes)[:, None])
    judged = _spared_rows(codes.numpy(), held_out, groups, seed)
    train = torch.from_numpy(~judged)
    judged = torch.from_numpy(judged)
    rows = features.double()
    mean = rows[:, train].mean(1)
    centred = rows - mean[:, None]
    deviation = centred[:, train].square().mean(1).sqrt()
    basis = centred.new_zeros(len(rows), rows.shape[2], 0)
    directions = centred.new_zeros(len(rows), iterations, len(labels), rows.shape[2])
    seen = torch.full((len(rows), iterations), torch.nan, dtype=torch.float64)
    active = torch.ones(len(rows), dtype=torch.bool)
    for iteration in range(iterations):
        some = active.nonzero()[:, 0]
        left = centred[some] - centred[some] @ basis[some] @ basis[some].mT
        # a column that is gone but for rounding would be blown up by standardisation
        is_gone = left[:, train].square().mean(1).sqrt() <= 1e-7 * deviation[some]
        left = torch.where(is_gone[:, None], 0.0, left)
        fits = fit_logistic(left, labels, train, [C], class_weight="balanced")
        weights = torch.where(is_gone[:, None], 0.0, fits.raw_weights[:, :, 0, 0])
        if judged.any():
            scores = torch.einsum("sod,sed->soe", weights, left[:, judged])
            scores = torch.where(scores.abs() > 1e-9 * scores.abs().amax(-1, keepdim=True), scores, 0.0)
            found = auroc(scores, labels[:, judged]).mean(1)
            positive = labels[:, judged].sum(1).double()
            total = float(judged.sum())
            error = ((total + 1) / (12 * positive * (total - positive))).sqrt().mean()
            seen[some, iteration] = found
            is_found = found - 0.5 > ONE_SIDED * error
            some, weights = some[is_found], weights[is_found]
            active[:] = False
            active[some] = True
        directions[some, iteration] = weights / _nonzero(weights.norm(dim=-1, keepdim=True))
        basis = _row_space(directions[:, : iteration + 1].flatten(1, 2))
        if not active.any():
            break
    used = (directions != 0).any(-1).any(-1).sum(1)
    return InlpFit(Erasures(mean, basis, basis.mT.contiguous()), directions, seen, used)


def _nonzero(values: Tensor) -> Tensor:
    return torch.where(values > 0, values, 1.0)


def _row_space(directions: Float64[Tensor, "site direction feature"]) -> Float64[Tensor, "site feature rank"]:
    """Orthonormal columns that span the directions; columns of zeros for what they lack."""
    _, size, axes = torch.linalg.svd(directions, full_matrices=False)
    is_kept = size > 1e-9 * size[:, :1].clamp(min=1e-300)
    return (axes * is_kept[..., None]).mT.contiguous()


def _spared_rows(codes: np.ndarray, share: int | float, groups: np.ndarray | None, seed: int) -> np.ndarray:
    """Rows to judge by: about this share of every class, in whole groups.

    None if a class would be missing from them or from the others.
    """
    keys = np.arange(len(codes)) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    if len(keys) != len(codes):
        raise ValueError(f"groups has {len(keys)} entries for {len(codes)} rows. Pass one key per row.")
    content = np.zeros((keys.max() + 1, codes.max() + 1), dtype=np.int64)
    np.add.at(content, (keys, codes), 1)
    room = (share * content.sum(0)).astype(np.int64)
    is_spared = np.zeros(len(content), dtype=bool)
    for group in np.random.default_rng(seed).permutation(len(content)):
        if (content[group] <= room).all():
            is_spared[group] = True
            room -= content[group]
    present = content.sum(0) > 0
    is_whole = (content[is_spared].sum(0)[present] > 0).all() and (content[~is_spared].sum(0)[present] > 0).all()
    return is_spared[keys] & is_whole

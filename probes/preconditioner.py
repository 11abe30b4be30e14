"""What conjugate gradients of `newton_cg` are preconditioned with: an inverse Hessian on the leading axes of the rows.

With x̂ = y/√ridge, a fold's own standardisation, the Hessian of a fit is √ridge (I + C Σ_i s_i p_i(1-p_i) x̂_i x̂_iᵀ)
√ridge. All fits of a site share the principal axes of its rows. Between them the sum is taken as it is, with p(1-p)
averaged over the fits of a strength; all directions beside them share one average eigenvalue. At the start p(1-p) = ¼,
and after a step its mean, makes the sum diagonal. This steers the iterations; nothing fitted depends on it.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from microtome.probes.fold_basis import FoldBasis

AXES = 128  # of wider rows only the leading ones: the rest costs more to find and apply than it saves in products
# All axes of wider rows cost about width³ to find and width² a pass to apply, a pass width x rows: worth it from this
# many fits x rows / width² (576 features, 2,000 rows: 45 fits took 0.8 of the time), while rows are more than twice the
# width. Beware: found on one processor with one thread.
MANY = 0.2
ROUNDS = 2  # of subspace iteration
# float32 axes are not quite orthonormal; as much of `beside` is left on them, so that nothing turns negative
LEAK = 1e-5


@dataclass(frozen=True)
class Axes:
    """Principal axes of the rows of some sites; the last one is the intercept."""

    axes: Float[Tensor, "site width axis"]  # float32, orthonormal columns
    spectrum: Float[Tensor, "site axis"]  # mean square of the rows along each; 1 for the intercept
    rest: Float[Tensor, " site"]  # mean over all directions beside them


def principal_axes(basis: FoldBasis, *, n_fits: int = 1) -> Axes:
    """Of rows divided by the folds' average deviation; exact up to 128 features, then by subspace iteration.

    Where a site has `n_fits` enough, all axes are found: the passes saved in every fit repay them.

    Rows far out (five times the median length) count as if they were no farther: an outlier in one fold would otherwise
    be all that the axes of the others see.
    """
    width = basis.centre.shape[1]
    scale = basis.ridge[..., :width].log().mean(1).mul(-0.5).exp().float()
    rows = basis.single[:, :width] * scale[..., None]
    length = rows.square().sum(1).sqrt()
    rows *= (5 * length.median(1, keepdim=True).values / length).clamp(max=1.0).nan_to_num(1.0)[:, None]
    moments = rows @ rows.mT / rows.shape[2]
    n_rows = rows.shape[2]
    if width <= AXES or (n_fits * n_rows >= MANY * width**2 and n_rows >= 2 * width):
        spectrum, vectors = torch.linalg.eigh(moments)
        rest = spectrum[:, 0]
    else:
        generator = torch.Generator().manual_seed(0)
        vectors = torch.randn(width, AXES, generator=generator).to(rows.device).expand(len(rows), -1, -1)
        for _ in range(ROUNDS):
            vectors = torch.linalg.qr(moments @ vectors)[0]
        spectrum, turn = torch.linalg.eigh(vectors.mT @ moments @ vectors)
        vectors = vectors @ turn
        trace = moments.diagonal(dim1=1, dim2=2).sum(1)
        rest = (trace - spectrum.sum(1)) / (width - AXES)
    # what float32 leaves of a leading axis must not look like a direction without curvature
    rest = rest.maximum(1e-6 * spectrum[:, -1])
    n_axes = spectrum.shape[1]
    axes = rows.new_zeros(len(rows), basis.single.shape[1], n_axes + 1)
    axes[:, :width, :n_axes] = vectors
    axes[:, width, n_axes] = 1.0
    return Axes(axes, torch.cat([spectrum.clamp(min=0), spectrum.new_ones(len(spectrum), 1)], 1), rest)


@dataclass(frozen=True)
class Preconditioner:
    """Approximate inverse Hessians of a block of fits."""

    axes: Float[Tensor, "site width axis"]
    scale: Float[Tensor, "site 1 task width"]  # 1/√ridge; 1 for the intercept
    along: Float[Tensor, "site strength 1 axis"]  # inverse curvature along each axis, where they do not mix
    root: Float[Tensor, "site strength axis axis"] | None  # else W, where WᵀW is the inverse curvature between the axes
    beside: Float[Tensor, "site strength 1 1"]  # inverse curvature of all other directions

    def __call__(self, slope: Float[Tensor, "site strength task width"]) -> Float[Tensor, "site strength task width"]:
        """About H⁻¹ slope."""
        scaled = slope * self.scale
        shape = scaled.shape[1:3]
        on_axes = torch.bmm(scaled.flatten(1, 2), self.axes).unflatten(1, shape)
        curved = on_axes * self.along if self.root is None else on_axes @ self.root.mT @ self.root
        on_axes = curved - (1 - LEAK) * self.beside * on_axes
        spread = torch.bmm(on_axes.flatten(1, 2), self.axes.mT).unflatten(1, shape)
        return spread.addcmul_(self.beside, scaled).mul_(self.scale)

    def kept(self, sites: Tensor, strengths: slice) -> "Preconditioner":
        """For these sites and strengths only."""
        root = None if self.root is None else self.root[sites, strengths]
        at = (sites, strengths)
        return Preconditioner(self.axes[sites], self.scale[sites], self.along[at], root, self.beside[at])

    def to(self, dtype: torch.dtype) -> "Preconditioner":
        """In another precision."""
        parts = (getattr(self, name) for name in self.__dataclass_fields__)
        return Preconditioner(*(None if part is None else part.to(dtype) for part in parts))


def uniform(
    axes: Axes,
    *,
    weight: Float[Tensor, "weighting example"],
    ridge: Float[Tensor, "site 1 task width"],
    strength: Float[Tensor, "strength 1 1"],
    variance: float | Float[Tensor, "site strength 1"] = 0.25,
) -> Preconditioner:
    """For p(1-p) = ¼, or another variance, in every row, as at the start. Tasks may be several per weighting."""
    heft = variance * strength[:, :, 0] * weight.sum(1).mean()  # C Σ s p(1-p), mean over tasks
    along = heft * axes.spectrum[:, None]
    along[..., :-1] += 1
    return Preconditioner(
        axes=axes.axes,
        scale=torch.where(ridge > 0, ridge, 1.0).rsqrt(),
        along=along.reciprocal()[:, :, None],
        root=None,
        beside=(heft[..., None] * axes.rest[:, None, None, None] + 1).reciprocal(),
    )


def refreshed(
    old: Preconditioner,
    rows: Float[Tensor, "site width example"],
    *,
    strength: Float[Tensor, "strength 1 1"],
    curvature: Float[Tensor, "site strength task example"],
) -> Preconditioner:
    """With the curvature s p(1-p) each strength has come to, mean over its tasks; where that is singular, as it was."""
    scores = old.axes.mT @ (rows * old.scale.mean(2)[:, 0, :, None])
    inside = torch.stack([(scores * mean[:, None]) @ scores.mT for mean in curvature.mean(2).unbind(1)], 1)
    inside = inside.double() * strength.double()
    inside.diagonal(dim1=2, dim2=3)[..., :-1].add_(1)
    factor, failed = torch.linalg.cholesky_ex(inside)
    is_sound = (failed == 0)[..., None, None]
    one = torch.eye(inside.shape[-1], dtype=inside.dtype, device=inside.device)
    root = torch.linalg.solve_triangular(torch.where(is_sound, factor, one), one, upper=False).to(old.along.dtype)
    before = torch.diag_embed(old.along[:, :, 0].sqrt()) if old.root is None else old.root
    return replace(old, root=torch.where(is_sound, root, before))


def passes_before_refreshing(old: Preconditioner, n_tasks: int) -> float:
    """Passes after which refreshing is worth what it costs: some times as many as it takes itself.

    It takes [axis, example] x [example, axis] per strength, where a pass is two products per fit. With all axes of wide
    rows the preconditioner is close as it stands.
    """
    n_axes, width = old.axes.shape[2], old.axes.shape[1]
    times = 2 if n_axes <= AXES + 1 else 6
    return times * n_axes**2 / (2 * width * n_tasks)

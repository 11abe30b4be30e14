"""LEACE: the least change of features after which no linear probe finds a concept, in closed form, at many sites.

    x' = x - A B (x - m),  A = C V / s,  B = U' W  with  Sigma = Cov(x), C = Cov(x, z), W' W = Sigma^+, W C = U s V'

(Belrose et al. 2023, arXiv 2306.03819, theorem 4.3). So (I - A B) C = 0, I - A B is a projection, the mean m stays, and
no other affine map with that property changes x less, in any quadratic norm. No linear probe on erased rows beats a
constant under any convex loss, on the rows that were fitted. Cov(x') = Sigma - A A', so no direction's variance grows,
and a constraint on its trace has nothing to do.

Why our own and not `concept-erasure` 0.2.4 (January 2024), with which the closed form agrees (the test compares): it
erases one site at a time, keeps a concept whose covariance is small (an absolute tolerance of 0.01: prevalence 1e-4),
does not import where warnings are errors (torch.jit.script), and its trace constraint, where it acts, mixes in a
projection that is orthogonal in the whitened space, which leaves part of the concept in.

Beware: guardedness is linear, and on the fitting rows; other rows keep what the estimate missed, and a non-linear probe
may still find the concept.
"""

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from microtome.probes.concept_moments import ConceptMoments, concept_moments
from microtome.probes.erasure_maps import Erasures

# of eigenvalues of the correlation matrix against the largest, and of correlations: below is rounding
EIGENVALUE_CUTOFF, CORRELATION_CUTOFF = 1e-12, 1e-9
SITE_BYTES = 2**28  # float64 rows that are worked on at once


def one_hot(codes: Int[Tensor, " example"], classes: int) -> Float64[Tensor, "example class"]:
    """Classes as the concept of erasure: one column for each."""
    return torch.nn.functional.one_hot(codes.long(), classes).double()


def leace(features: Float[Tensor, "site example feature"], concept: Float[Tensor, "_ concept"]) -> Erasures:
    """LEACE of every site, from rows. Classes are given as `one_hot(codes, classes)`, numbers as columns.

    Raises ValueError for what `concept_moments` and `leace_from_moments` refuse.
    """
    if features.ndim != 3 or features.shape[1] != len(concept):
        raise ValueError(
            f"features have shape {tuple(features.shape)}, the concept {len(concept)} rows; expected [site, row, d]."
        )
    together = max(1, SITE_BYTES // (8 * features[0].numel() + 24 * features.shape[2] ** 2))
    parts = [leace_from_moments(concept_moments(some, concept)) for some in features.split(together)]
    rank = max(part.left.shape[2] for part in parts)
    assert all(part.left.shape[2] == rank for part in parts), "the padded rank depends on the concept alone"
    return Erasures(*(torch.cat([getattr(part, name) for part in parts]) for name in ("mean", "left", "right")))


def leace_from_moments(moments: ConceptMoments) -> Erasures:
    """LEACE of every site, from moments (the module has the formula).

    Features and concept are standardised first, so neither their units nor the prevalence of a class decides what
    counts as zero: directions with less than 1e-12 of the largest eigenvalue of the correlation matrix are not
    whitened, and correlations under 1e-9 are rounding.

    Raises ValueError for fewer than two rows and for a concept that is the same in every row.
    """
    if moments.count < 2 or not (moments.concept_scatter > 0).any():
        raise ValueError(
            f"The concept has one value in all {moments.count} rows (one class?). Erasure needs rows that differ in it."
        )
    covariance = moments.scatter / moments.count
    deviation = covariance.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
    divisor = torch.where(deviation > 0, deviation, 1.0)
    spread = (moments.concept_scatter / moments.count).sqrt()
    cross = moments.cross / moments.count / divisor[:, :, None]
    cross = torch.where(spread > 0, cross / torch.where(spread > 0, spread, 1.0), 0.0)
    values, vectors = torch.linalg.eigh(covariance / divisor[:, :, None] / divisor[:, None, :])
    is_kept = values > EIGENVALUE_CUTOFF * values[:, -1:]
    whitening = torch.where(is_kept, values, 1.0).rsqrt() * is_kept
    whiten = whitening[:, :, None] * vectors.mT
    left, size, right = torch.linalg.svd(whiten @ cross, full_matrices=False)
    is_found = size > CORRELATION_CUTOFF
    size = torch.where(is_found, size, torch.inf)
    # C V / s and not W^+ U: what the whitening leaves out of C is erased as well
    a = divisor[:, :, None] * (cross @ (right.mT / size[:, None]))
    b = (left * is_found[:, None]).mT @ whiten / divisor[:, None]
    for site in (~is_kept).any(1).nonzero()[:, 0].tolist():
        # rows of B lie in the span of the fitted rows: what no fitted row has is left as it is
        outside = vectors[site] * ~is_kept[site] / divisor[site, :, None]
        b[site] -= b[site] @ outside @ torch.linalg.pinv(outside)
    return Erasures(moments.mean, a, b)

"""Direction finders: one unit vector per site from features and two classes, at all sites at once.

    mass_mean       m1 - m0
    lda             S^{-1} (m1 - m0), S the within-class covariance shrunk towards a multiple of 1 (Ledoit & Wolf 2004)
    logistic        weights of the penalised logistic probe, of the features as given
    pca             first principal component of all rows; no labels
    svd             first right singular vector of the rows as they are, the mean in; no labels
    kmeans          difference of the two centroids of K-means; no labels
    pca_difference  first eigenvector of the mean of d d', d = x(1) - x(0): over the given pairs, else over all pairs of
                    rows of the two classes, which is Cov_1 + Cov_0 + (m1 - m0)(m1 - m0)'
    random          a draw from the sphere

Names after Tigges et al. 2023 (arXiv 2310.15154), Marks & Tegmark 2023 (arXiv 2310.06824), Zou et al. 2023 (differences
of pairs). The sign of each is fixed by the labels of the same rows: the mean of class 1 lies on the positive side.

Beware: mass_mean is no upper bound for accuracy: on anisotropic Gaussians (the fixture of the test) Bayes is 0.933, lda
0.93, mass_mean 0.79 = Phi(|mu|^2 / sqrt(mu' Sigma mu)). K-means is scikit-learn's, site by site; all else is batched.
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from microtome.probes.logistic_solver import fit_logistic

Finder = Callable[[Tensor, Tensor, Tensor | None, int], Tensor]


def find_directions(
    features: Float[Tensor, "site example feature"],
    positive: Bool[Tensor, " _"],
    *,
    finders: tuple[str, ...] | None = None,
    own: Mapping[str, Finder] | None = None,
    pairs: Int[Tensor, "pair 2"] | None = None,
    seed: int = 0,
) -> dict[str, Float64[Tensor, "site feature"]]:
    """Unit vectors by finder. A direction that does not exist (equal means, no variance) is zeros.

    Args:
        finders: names; None for all of the module's list.
        own: further finders by name, functions of (features [site, example, feature] in float64, positive, pairs,
            seed) to `[site, feature]`; length and sign are seen to here.
        pairs: rows (of class 0, of class 1) that differ in the class alone.
        seed: of K-means and random.

    Raises ValueError for an unknown finder, one class, other lengths, NaN, and pairs whose rows are not of class 0, 1.
    """
    known = {**FINDERS, **(own or {})}
    wanted = tuple(known) if finders is None else (*finders, *(own or {}))
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"unknown finders {unknown}; there are {list(known)}.")
    if len(positive) != features.shape[1]:
        raise ValueError(f"{len(positive)} labels for {features.shape[1]} rows. Pass one label per row.")
    if positive.all() or not positive.any():
        raise ValueError("All rows are of one class. A direction between classes needs rows of both.")
    if not features.isfinite().all():
        raise ValueError("features hold NaN or infinity. Drop those rows, or fix the capture.")
    if pairs is not None and (positive[pairs[:, 0]].any() or not positive[pairs[:, 1]].all() or len(pairs) == 0):
        raise ValueError("pairs are (row of class 0, row of class 1), at least one; some are not.")
    rows = features.double()
    return {name: signed(known[name](rows, positive, pairs, seed), rows, positive) for name in wanted}


def signed(
    directions: Float[Tensor, "site feature"],
    features: Float[Tensor, "site example feature"],
    positive: Bool[Tensor, " example"],
) -> Float64[Tensor, "site feature"]:
    """The directions at length 1, class 1 on the positive side."""
    gap = features[:, positive].double().mean(1) - features[:, ~positive].double().mean(1)
    norm = directions.double().norm(dim=1, keepdim=True)
    sign = torch.where((directions * gap).sum(1, keepdim=True) < 0, -1.0, 1.0)
    return sign * directions.double() / torch.where(norm > 0, norm, 1.0)


def ledoit_wolf(
    centred: Float64[Tensor, "site example feature"],
) -> tuple[Float64[Tensor, "site feature feature"], Float64[Tensor, " site"]]:
    """Shrunk covariance (1 - a) S + a (tr S / d) 1 of centred rows, and a (Ledoit & Wolf 2004, eq. 14)."""
    n, width = centred.shape[1:]
    covariance = centred.mT @ centred / n
    mean_variance = covariance.diagonal(dim1=1, dim2=2).mean(1)
    spread = covariance.square().sum((1, 2)) - width * mean_variance.square()
    noise = (centred.square().sum(2).square().sum(1) / n - covariance.square().sum((1, 2))) / n
    amount = torch.where(spread > 0, noise / torch.where(spread > 0, spread, 1.0), 0.0).clamp(0, 1)
    eye = torch.eye(width, dtype=torch.float64) * mean_variance[:, None, None]
    return covariance + amount[:, None, None] * (eye - covariance), amount


def _gap(rows: Tensor, positive: Tensor) -> Tensor:
    return rows[:, positive].mean(1) - rows[:, ~positive].mean(1)


def _mass_mean(rows: Tensor, positive: Tensor, pairs: Tensor | None, seed: int) -> Tensor:
    return _gap(rows, positive)


def _lda(rows: Tensor, positive: Tensor, pairs: Tensor | None, seed: int) -> Tensor:
    centred = rows.clone()
    for some in (positive, ~positive):
        centred[:, some] -= rows[:, some].mean(1, keepdim=True)
    shrunk, _ = ledoit_wolf(centred)
    return (torch.linalg.pinv(shrunk, hermitian=True) @ _gap(rows, positive)[:, :, None])[:, :, 0]


def _logistic(rows: Tensor, positive: Tensor, pairs: Tensor | None, seed: int) -> Tensor:
    everywhere = torch.ones(1, rows.shape[1], dtype=torch.bool)
    # the middle of the strengths that inner folds choose on real models (`default_strengths`)
    fits = fit_logistic(rows, positive[None], everywhere, [1 / rows.shape[2]], class_weight="balanced")
    return fits.raw_weights[:, 0, 0, 0]


def _top(rows: Tensor) -> Tensor:
    """First right singular vector, by the smaller Gram matrix."""
    if rows.shape[1] >= rows.shape[2]:
        return torch.linalg.eigh(rows.mT @ rows)[1][:, :, -1]
    return (rows.mT @ torch.linalg.eigh(rows @ rows.mT)[1][:, :, -1:])[:, :, 0]


def _pca(rows: Tensor, positive: Tensor, pairs: Tensor | None, seed: int) -> Tensor:
    return _top(rows - rows.mean(1, keepdim=True))


def _svd(rows: Tensor, positive: Tensor, pairs: Tensor | None, seed: int) -> Tensor:
    return _top(rows)


def _pca_difference(rows: Tensor, positive: Tensor, pairs: Tensor | None, seed: int) -> Tensor:
    if pairs is not None:
        return _top(rows[:, pairs[:, 1]] - rows[:, pairs[:, 0]])
    parts = [_gap(rows, positive)[:, None]]
    for some in (positive, ~positive):
        centred = rows[:, some] - rows[:, some].mean(1, keepdim=True)
        parts.append(centred / centred.shape[1] ** 0.5)
    return _top(torch.cat(parts, 1))


def _kmeans(rows: Tensor, positive: Tensor, pairs: Tensor | None, seed: int) -> Tensor:
    from sklearn.cluster import KMeans  # late: importing it draws from Python's random state

    found = []
    for site in rows.numpy():
        if (site == site[:1]).all():
            found.append(torch.zeros(site.shape[1], dtype=torch.float64))
            continue
        centres = KMeans(2, n_init=10, random_state=seed).fit(site).cluster_centers_
        found.append(torch.from_numpy(centres[1] - centres[0]))
    return torch.stack(found)


def _random(rows: Tensor, positive: Tensor, pairs: Tensor | None, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(rows), rows.shape[2], generator=generator, dtype=torch.float64)


FINDERS: dict[str, Finder] = {
    "mass_mean": _mass_mean,
    "lda": _lda,
    "logistic": _logistic,
    "pca": _pca,
    "pca_difference": _pca_difference,
    "svd": _svd,
    "kmeans": _kmeans,
    "random": _random,
}

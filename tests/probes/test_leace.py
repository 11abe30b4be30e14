"""LEACE in closed form: its identities, the trace constraint, and agreement with the package `concept-erasure`."""

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from microtome.probes.leace import leace, one_hot


def rows(sites: int = 3, n: int = 400, width: int = 20, classes: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    y = rng.integers(classes, size=n)
    mixing = rng.normal(size=(sites, width, width)) * np.logspace(-2, 2, width)
    moved = rng.normal(size=(sites, classes, width))
    return torch.tensor(rng.normal(size=(sites, n, width)) @ mixing + moved[:, y] + 3), torch.tensor(y)


def covariance(features: Tensor, concept: Tensor) -> Tensor:
    return (features - features.mean(1, keepdim=True)).mT @ (concept - concept.mean(0)) / len(concept)


@pytest.mark.parametrize("classes", [2, 5])
def test_projection_erases_and_keeps_the_mean(classes: int) -> None:
    X, y = rows(classes=classes)
    z = one_hot(y, classes)
    erasures = leace(X, z)
    for site in range(len(X)):
        P = erasures[site].matrix
        assert float((P @ covariance(X, z)[site]).abs().max()) < 1e-10
        torch.testing.assert_close(P @ P, P, rtol=0, atol=1e-9 * float(P.abs().max()))
        assert erasures[site].rank == classes - 1
    erased = erasures.apply(X)
    torch.testing.assert_close(erased.mean(1), X.mean(1))
    # twice equals once, also where the second eraser is fitted on what the first has left
    torch.testing.assert_close(erasures.apply(erased), erased)
    again = leace(erased, z)
    assert [again[site].rank for site in range(len(X))] == [0] * len(X)


@pytest.mark.parametrize("positives", [1, 7])
@pytest.mark.parametrize("unit", [1.0, 1e-4])
def test_rare_concepts_and_small_features_are_erased(positives: int, unit: float) -> None:
    X, _ = rows(sites=1, n=7000)
    y = torch.zeros(7000, dtype=torch.int64)
    y[:positives] = 1
    z = one_hot(y, 2)
    erasures = leace(X * unit, z)
    assert erasures[0].rank == 1
    after = covariance(erasures.apply(X * unit), z).abs().max()
    assert float(after) < 1e-10 * float(covariance(X * unit, z).abs().max()) + 1e-14 * unit


def test_a_weak_concept_is_no_rounding() -> None:
    X, _ = rows(sites=1, n=2000)
    noise = torch.tensor(np.random.default_rng(3).normal(size=2000))
    centred = X[0] - X[0].mean(0)
    z = noise - noise.mean()
    z = z - centred @ torch.linalg.lstsq(centred, z).solution  # nothing of it is linear in the features
    weak = (z + 1e-5 * centred[:, 0] / centred[:, 0].std())[:, None]
    erasures = leace(X, weak)
    assert erasures[0].rank == 1
    assert float(covariance(erasures.apply(X), weak).abs().max()) < 1e-12


def test_no_other_projection_that_erases_changes_less() -> None:
    X, y = rows(sites=1)
    z = one_hot(y, 2)
    fitted = leace(X, z)[0]
    change = (X[0] - fitted.mean) @ fitted.right.T @ fitted.left.T
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        # another B with B A = 1 erases as well
        other = fitted.right + 0.01 * torch.randn(fitted.right.shape, generator=generator, dtype=torch.float64)
        other[0] /= (other[0] @ fitted.left)[0]
        other[1] = 0  # of rank one, as fitted
        assert float(((X[0] - fitted.mean) @ other.T @ fitted.left.T).square().sum()) > float(change.square().sum())


def test_no_variance_grows() -> None:
    X, y = rows(classes=4)
    z = one_hot(y, 4)
    erasures = leace(X, z)
    before, after = (torch.stack([site.T.cov(correction=0) for site in some]) for some in (X, erasures.apply(X)))
    gone = erasures.left @ erasures.left.mT
    torch.testing.assert_close(before - after, gone, rtol=1e-7, atol=1e-8)


def test_fewer_rows_than_features() -> None:
    X, y = rows(sites=2, n=30, width=50)
    z = one_hot(y, 2)
    erasures = leace(X, z)
    assert float(covariance(erasures.apply(X), z).abs().max()) < 1e-10
    outside = torch.linalg.svd(X - X.mean(1, keepdim=True))[2][:, 29:]  # directions in which no row differs
    assert float((erasures.right @ outside.mT).abs().max()) < 1e-6


def test_agrees_with_the_package() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit.script
        package = pytest.importorskip("concept_erasure")
    X, y = rows(classes=3)
    z = one_hot(y, 3)
    ours = leace(X, z)
    for site in range(len(X)):
        options = {"constrain_cov_trace": False, "shrinkage": False, "svd_tol": 1e-8}
        theirs = package.LeaceEraser.fit(X[site], (z - z.mean(0)) / z.std(0), **options)
        torch.testing.assert_close(ours[site].matrix, theirs.P, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.apply(X)[site], theirs(X[site]), rtol=1e-7, atol=1e-7)


def test_constant_features_stay() -> None:
    X, y = rows(sites=1)
    X[:, :, 4] = 7.0
    torch.testing.assert_close(leace(X, one_hot(y, 2)).apply(X)[:, :, 4], X[:, :, 4])


def test_bad_input_says_what_is_wrong() -> None:
    X, y = rows()
    with pytest.raises(ValueError, match="one value in all 400 rows"):
        leace(X, torch.ones(400, 1))
    with pytest.raises(ValueError, match=r"expected \[site, row, d\]"):
        leace(X, one_hot(y[:-1], 2))
    with pytest.raises(ValueError, match="features hold NaN"):
        leace(X.index_fill(1, torch.tensor([5]), torch.nan), one_hot(y, 2))
    with pytest.raises(ValueError, match="2 names for 3 sites"):
        leace(X, one_hot(y, 2)).edits(["resid_post.1", "resid_post.2"])

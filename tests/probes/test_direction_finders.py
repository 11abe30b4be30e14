"""Direction finders: the planted anisotropic Gaussian, scikit-learn's answers, signs, pairs, bad input."""

import numpy as np
import pytest
import torch
from scipy.stats import norm
from sklearn.cluster import KMeans
from sklearn.covariance import ledoit_wolf as sklearn_ledoit_wolf
from sklearn.decomposition import PCA, TruncatedSVD
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from microtome.probes.direction_finders import FINDERS, find_directions, ledoit_wolf


def rows(sites: int = 2, n: int = 300, width: int = 10, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    y = rng.integers(2, size=n) == 1
    mixing = rng.normal(size=(sites, width, width))
    moved = 6 * rng.normal(size=(sites, 1, width)) * y[:, None]
    return torch.tensor(rng.normal(size=(sites, n, width)) @ mixing + moved + 2), torch.tensor(y)


def anisotropic(n: int, seed: int) -> tuple[Tensor, Tensor, np.ndarray, np.ndarray]:
    """Two Gaussians of 64 dimensions at -mu and mu, Bayes accuracy 0.933, mass-mean 0.795 (sheet 7.1)."""
    basis = np.linalg.qr(np.random.default_rng(7).normal(size=(64, 64)))[0]
    variance = np.exp(np.linspace(-2, 2, 64))
    mu = np.full(64, 1.5 / np.sqrt((1 / variance).sum()))
    rng = np.random.default_rng(seed)
    y = rng.integers(2, size=n) == 1
    X = rng.normal(size=(n, 64)) * np.sqrt(variance) + np.where(y[:, None], mu, -mu)
    return torch.tensor(X @ basis.T)[None], torch.tensor(y), mu, variance


def test_planted_directions_have_the_accuracy_that_theory_gives_them() -> None:
    X, y, mu, variance = anisotropic(6000, seed=0)
    T, t, _, _ = anisotropic(20000, seed=1)
    found = find_directions(X, y, finders=("mass_mean", "lda", "logistic", "random"))
    got = {name: float(((T[0] @ direction[0] > 0) == t).double().mean()) for name, direction in found.items()}
    bayes = norm.cdf(np.sqrt((mu**2 / variance).sum()))
    mass_mean = norm.cdf((mu @ mu) / np.sqrt((mu**2 * variance).sum()))
    assert (bayes, mass_mean) == (pytest.approx(0.933, abs=0.001), pytest.approx(0.795, abs=0.005))
    assert got["mass_mean"] == pytest.approx(mass_mean, abs=0.01)
    assert got["lda"] == pytest.approx(bayes, abs=0.01)
    assert got["logistic"] == pytest.approx(bayes, abs=0.015)
    assert got["random"] < 0.75


def test_agrees_with_scikit_learn() -> None:
    X, y = rows()
    found = find_directions(X, y, seed=3)
    for site, values in enumerate(X.numpy()):
        gap = values[y].mean(0) - values[~y].mean(0)
        kmeans = KMeans(2, n_init=10, random_state=3).fit(values).cluster_centers_
        scaled = (values - values.mean(0)) / values.std(0)
        logistic = LogisticRegression(C=0.1, class_weight="balanced", solver="newton-cholesky", tol=1e-12)
        differences = (values[y][:, None] - values[~y][None]).reshape(-1, values.shape[1])
        expected = {
            "mass_mean": gap,
            "pca": PCA(1).fit(values).components_[0],
            "svd": TruncatedSVD(1, algorithm="arpack", random_state=0).fit(values).components_[0],
            "kmeans": kmeans[1] - kmeans[0],
            "logistic": logistic.fit(scaled, y).coef_[0] / values.std(0),
            "pca_difference": np.linalg.eigh(differences.T @ differences)[1][:, -1],
        }
        for name, direction in expected.items():
            unit = direction / np.linalg.norm(direction) * np.sign(direction @ gap)
            np.testing.assert_allclose(found[name][site], unit, atol=1e-5, err_msg=name)


def test_lda_is_shrunk_as_ledoit_and_wolf_shrink() -> None:
    X, y = rows(n=30)
    centred = X - X.mean(1, keepdim=True)
    shrunk, amount = ledoit_wolf(centred)
    for site in range(2):
        matrix, shrinkage = sklearn_ledoit_wolf(centred[site].numpy(), assume_centered=True)
        np.testing.assert_allclose(shrunk[site], matrix, atol=1e-12)
        assert float(amount[site]) == pytest.approx(shrinkage)
    found = find_directions(X, y, finders=("lda",))["lda"]
    for site, values in enumerate(X.numpy()):
        means = values[y].mean(0), values[~y].mean(0)
        within = np.where(y[:, None], values - means[0], values - means[1])
        direction = np.linalg.solve(sklearn_ledoit_wolf(within, assume_centered=True)[0], means[0] - means[1])
        np.testing.assert_allclose(found[site], direction / np.linalg.norm(direction), atol=1e-10)


def test_signs_follow_the_labels_and_lengths_are_one() -> None:
    X, y = rows()
    found, swapped = find_directions(X, y), find_directions(X, ~y)
    gap = X[:, y].mean(1) - X[:, ~y].mean(1)
    for name in FINDERS:
        assert bool(((found[name] * gap).sum(1) >= 0).all()), name
        torch.testing.assert_close(found[name].norm(dim=1), torch.ones(2, dtype=torch.float64))
        torch.testing.assert_close(found[name], -swapped[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("width", [5, 40])  # both Gram matrices
def test_pairs_take_out_what_they_share(width: int) -> None:
    rng = np.random.default_rng(0)
    shared = 20 * rng.normal(size=(12, width))
    planted = np.eye(width)[0]
    X = torch.tensor(np.concatenate([shared, shared + 3 * planted]) + 0.1 * rng.normal(size=(24, width)))[None]
    y = torch.arange(24) >= 12
    pairs = torch.stack([torch.arange(12), torch.arange(12, 24)], 1)
    paired = find_directions(X, y, finders=("pca_difference",), pairs=pairs)["pca_difference"]
    unpaired = find_directions(X, y, finders=("pca_difference",))["pca_difference"]
    assert float(paired[0, 0]) > 0.99
    assert float(unpaired[0, 0]) < 0.9


def test_own_finders_and_directions_that_do_not_exist() -> None:
    X, y = rows()
    X[1] = 1.5  # every row the same
    found = find_directions(X, y, finders=("mass_mean", "kmeans", "lda"), own={"first": lambda rows, *_: -rows[:, 0]})
    assert list(found) == ["mass_mean", "kmeans", "lda", "first"]
    assert all(bool((found[name][1] == 0).all()) for name in ("mass_mean", "kmeans", "lda"))
    assert float(found["first"][0].norm()) == pytest.approx(1)


def test_bad_input_says_what_is_wrong() -> None:
    X, y = rows(n=20)
    with pytest.raises(ValueError, match=r"unknown finders \['dom'\]"):
        find_directions(X, y, finders=("dom",))
    with pytest.raises(ValueError, match="19 labels for 20 rows"):
        find_directions(X, y[:-1])
    with pytest.raises(ValueError, match="of one class"):
        find_directions(X, torch.ones(20, dtype=torch.bool))
    with pytest.raises(ValueError, match="NaN or infinity"):
        find_directions(torch.where(X[0, 3, 3] == X, torch.nan, X), y)
    wrong = torch.tensor([[int(y.int().argmax()), int(y.int().argmin())]])  # the rows the wrong way round
    with pytest.raises(ValueError, match="row of class 0, row of class 1"):
        find_directions(X, y, pairs=wrong)

"""PCADirection and KMeansDirection: scikit-learn's contract, planted directions, what labels may decide."""

import numpy as np
import pytest
from sklearn.decomposition import PCA
from sklearn.utils.estimator_checks import parametrize_with_checks

from microtome.probes.direction_probes import KMeansDirection, PCADirection


@parametrize_with_checks([PCADirection(), PCADirection("differences"), KMeansDirection()])
def test_scikit_learns_contract(estimator, check) -> None:
    check(estimator)


def planted(gap: float = 4.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.integers(2, size=300)
    X = rng.normal(size=(300, 10)) + 5
    X[:, 3] += gap * (2 * y - 1)
    return X, y


@pytest.mark.parametrize("probe", [PCADirection(), PCADirection("differences"), KMeansDirection()])
def test_finds_the_planted_axis_and_points_to_the_second_class(probe) -> None:
    X, y = planted()
    probe.fit(X, np.where(y == 1, "b", "a"))
    assert probe.direction_[3] > 0.95
    assert probe.score(X, np.where(y == 1, "b", "a")) > 0.99
    assert probe.fit(X, np.where(y == 1, "a", "b")).direction_[3] < -0.95


def test_labels_decide_sign_and_threshold_alone() -> None:
    X, y = planted()
    shuffled = np.random.default_rng(1).permutation(y)
    component = PCA(1).fit(X).components_[0]
    for labels in (y, shuffled):
        found = PCADirection().fit(X, labels).direction_
        np.testing.assert_allclose(np.abs(found @ component), 1)


def test_pairs_take_out_what_they_share() -> None:
    rng = np.random.default_rng(0)
    shared = 20 * rng.normal(size=(30, 6))
    X = np.concatenate([shared, shared + 3 * np.eye(6)[2]]) + 0.1 * rng.normal(size=(60, 6))
    y, pairs = np.arange(60) // 30, np.stack([np.arange(30), np.arange(30, 60)], 1)
    assert PCADirection("differences").fit(X, y, pairs=pairs).direction_[2] > 0.99
    assert PCADirection("differences").fit(X, y).direction_[2] < 0.9


def test_bad_input_says_what_to_do() -> None:
    X, y = planted()
    with pytest.raises(ValueError, match="one class only"):
        KMeansDirection().fit(X, np.zeros(300))
    with pytest.raises(ValueError, match="y has 3 classes"):
        PCADirection().fit(X, np.arange(300) % 3)
    with pytest.raises(ValueError, match="give 'rows' or 'differences'"):
        PCADirection("pairs").fit(X, y)
    with pytest.raises(ValueError, match="of='differences' only"):
        PCADirection().fit(X, y, pairs=[[0, 1]])

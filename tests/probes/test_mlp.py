"""MLPProbe: scikit-learn's contract, and its answers."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.utils.estimator_checks import parametrize_with_checks

from microtome.probes.mlp import MLPProbe


@parametrize_with_checks([MLPProbe(learning_rate=0.02, epochs=20)])
def test_scikit_learns_contract(estimator, check) -> None:
    check(estimator)


def xor(rows: int = 600, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    X = np.random.default_rng(seed).normal(size=(rows, 5))
    return X, X[:, 0] * X[:, 1] > 0


def test_tells_what_a_linear_probe_cannot() -> None:
    X, y = xor()
    probe = MLPProbe(learning_rate=0.02, epochs=30).fit(X[:400], y[:400])
    linear = LogisticRegression().fit(X[:400], y[:400])
    assert probe.score(X[400:], y[400:]) > 0.9
    assert abs(roc_auc_score(y[400:], linear.decision_function(X[400:])) - 0.5) < 0.1


def test_many_classes_have_a_probability_each() -> None:
    X, y = xor()
    names = np.array(["left", "right", "top"])[np.where(X[:, 2] > 0.5, 2, y.astype(int))]
    probe = MLPProbe(hidden=(16, 8), learning_rate=0.02, epochs=40).fit(X[:400], names[:400])
    assert list(probe.classes_) == ["left", "right", "top"]
    assert probe.decision_function(X).shape == (600, 3)
    np.testing.assert_allclose(probe.predict_proba(X).sum(1), 1)
    assert probe.score(X[400:], names[400:]) > 0.8


def test_validation_rows_choose_the_epoch_and_nothing_else() -> None:
    X, y = xor(120)
    held = np.arange(120) >= 80
    probe = MLPProbe(learning_rate=0.05, epochs=40, batch=8).fit(X, y, validation=held)
    assert probe.n_epochs_ == probe.validation_bits_.argmin() + 1
    assert probe.n_epochs_ < 40
    short = MLPProbe(learning_rate=0.05, epochs=probe.n_epochs_, batch=8).fit(X[:80], y[:80])
    np.testing.assert_allclose(short.decision_function(X), probe.decision_function(X), atol=1e-5)


@pytest.mark.parametrize(
    ("y", "settings", "message"),
    [
        ([1, 1, 1, 1], {}, "one class only"),
        ([0, 1, 0, 1], {"hidden": (0,)}, "whole numbers from 1"),
        ([0, 1, 0, 1], {"learning_rate": -1.0}, "above 0"),
    ],
)
def test_bad_input_says_what_to_do(y: list[int], settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MLPProbe(**settings).fit(np.arange(8.0).reshape(4, 2), y)


def test_a_validation_mask_is_one_truth_per_row() -> None:
    with pytest.raises(ValueError, match="True or False for each of 4 rows"):
        MLPProbe().fit(np.arange(8.0).reshape(4, 2), [0, 1, 0, 1], validation=[0, 0, 1])

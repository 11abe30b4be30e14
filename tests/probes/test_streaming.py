"""Streaming probes against the batch ones."""

import numpy as np
import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from microtome.probes.lda import LDAProbe
from microtome.probes.ridge import RidgeProbe
from microtome.probes.streaming import StreamingLDA, StreamingRidge


@parametrize_with_checks([StreamingLDA(), StreamingRidge()])
def test_scikit_learns_contract(estimator, check) -> None:
    check(estimator)


def data(rows=300, width=12, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(rows) % 3)
    X = rng.normal(size=(rows, width)) * np.logspace(-2, 2, width) + 3000
    X += 0.5 * np.logspace(-2, 2, width) * rng.normal(size=(3, width))[y]
    return X, y


@pytest.mark.parametrize("size", [11, 17, 300])
def test_lda_equals_the_batch_probe_after_any_shards(size) -> None:
    X, y = data()
    order = np.random.default_rng(size).permutation(300)
    stream = StreamingLDA(0.2)
    for start in range(0, 300, size):
        part = order[start : start + size]
        stream.partial_fit(X[part], y[part])
    batch = LDAProbe(0.2).fit(X, y)
    np.testing.assert_allclose(stream.decision_function(X), batch.decision_function(X), rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(stream.coef_, batch.coef_, rtol=1e-8, atol=1e-8 * np.abs(batch.coef_).max())


def test_classes_that_come_later_need_no_earlier_rows() -> None:
    X, y = data()
    names = np.array(["m", "a", "z"])[y]  # the later ones sort before and after
    stream = StreamingLDA(0.2).partial_fit(X[y == 0], names[y == 0])
    assert list(stream.classes_) == ["m"]
    with pytest.raises(ValueError, match="All rows so far are of class 'm'"):
        stream.predict(X)
    stream.partial_fit(X[y == 1], names[y == 1])
    assert list(stream.classes_) == ["a", "m"]
    np.testing.assert_allclose(
        stream.decision_function(X), LDAProbe(0.2).fit(X[y < 2], names[y < 2]).decision_function(X), atol=1e-8
    )
    stream.partial_fit(X[y == 2], names[y == 2])
    batch = LDAProbe(0.2).fit(X, names)
    assert (stream.classes_ == batch.classes_).all()
    np.testing.assert_allclose(stream.decision_function(X), batch.decision_function(X), atol=1e-8)


def test_merged_probes_hold_both_ones_rows() -> None:
    X, y = data()
    one, other = StreamingLDA(0.2).fit(X[y < 2], y[y < 2]), StreamingLDA(0.2).partial_fit(X[y == 2], y[y == 2])
    merged = one.merged(other)
    np.testing.assert_allclose(merged.decision_function(X), LDAProbe(0.2).fit(X, y).decision_function(X), atol=1e-8)
    assert len(one.classes_) == 2
    a, b = StreamingRidge().fit(X[:100], y[:100]), StreamingRidge().fit(X[100:], y[100:])
    np.testing.assert_allclose(a.merged(b).predict(X), RidgeProbe([1.0]).fit(X, y).predict(X), atol=1e-8)
    with pytest.raises(ValueError, match="have 12 and 3 features"):
        one.merged(StreamingLDA().fit(X[:, :3], y))
    with pytest.raises(ValueError, match="have 12 and 3 features"):
        a.merged(StreamingRidge().fit(X[:, :3], y))


@pytest.mark.parametrize("outputs", [1, 2])
def test_ridge_equals_the_batch_probe_after_any_shards(outputs) -> None:
    X, y = data()
    rng = np.random.default_rng(1)
    target = X @ rng.normal(size=(12, outputs)) / 100 + y[:, None]
    target = target[:, 0] if outputs == 1 else target
    weight = rng.uniform(0, 2, 300)
    stream = StreamingRidge(0.3)
    for part in np.array_split(rng.permutation(300), 9):
        stream.partial_fit(X[part], target[part], weight[part])
    batch = RidgeProbe([0.3]).fit(X, target, sample_weight=weight)
    np.testing.assert_allclose(stream.predict(X), batch.predict(X), rtol=1e-8)
    np.testing.assert_allclose(stream.coef_, batch.coef_, rtol=1e-8)
    stream.fit(X[:50], target[:50])
    np.testing.assert_allclose(stream.predict(X), RidgeProbe([0.3]).fit(X[:50], target[:50]).predict(X), rtol=1e-8)


def test_bad_input_says_what_to_do() -> None:
    X, y = data()
    with pytest.raises(ValueError, match="one class only"):
        StreamingLDA().fit(X, np.zeros(300))
    with pytest.raises(ValueError, match="a number from 0 to 1"):
        StreamingLDA("ledoit_wolf").fit(X, y)
    with pytest.raises(ValueError, match="finite penalty per training row"):
        StreamingRidge(-1.0).fit(X, y)
    with pytest.raises(ValueError, match="rows of earlier shards had one number each"):
        StreamingRidge().fit(X, y).partial_fit(X, np.stack([y, y], axis=1))
    with pytest.raises(ValueError, match="X has 3 features"):
        StreamingRidge().fit(X, y).partial_fit(X[:, :3], y)

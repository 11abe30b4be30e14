"""The erasers' contract: scikit-learn's checks, streaming, edits in running models, bad input."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from microtome.capture.taps import taps
from microtome.probes.erasure import InlpEraser, LeaceEraser


@parametrize_with_checks([LeaceEraser(), InlpEraser(iterations=3)])
def test_scikit_learns_contract(estimator, check) -> None:
    check(estimator)


def table(rows: int = 600, width: int = 12, classes: int = 2, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.integers(classes, size=rows)
    X = rng.normal(size=(rows, width)) @ rng.normal(size=(width, width)) * np.logspace(-1, 2, width)
    return X + 5 + 2 * rng.normal(size=(classes, width))[y], y


@pytest.mark.parametrize("classes", [2, 4])
def test_a_refitted_probe_is_at_chance(classes: int) -> None:
    X, y = table(classes=classes)
    eraser = LeaceEraser().fit(X, y)
    erased = eraser.transform(X)
    Z = StandardScaler().fit_transform(erased)
    probe = LogisticRegression(C=1.0, solver="newton-cholesky", tol=1e-12).fit(Z, y)
    assert np.abs(probe.coef_ - probe.coef_.mean(0) * (classes > 2)).max() < 1e-6
    assert eraser.rank_ == classes - 1
    np.testing.assert_allclose(erased.mean(0), X.mean(0), rtol=1e-10)
    assert LogisticRegression(max_iter=2000).fit(StandardScaler().fit_transform(X), y).score(Z, y) < 0.95


def test_numbers_are_erased() -> None:
    X, _ = table()
    y = np.stack([X @ np.arange(12) + 3, X[:, 0] ** 2], axis=1)
    eraser = LeaceEraser().fit(X, y)
    erased = eraser.transform(X)
    covariance = (erased - erased.mean(0)).T @ ((y - y.mean(0)) / y.std(0)) / len(y)
    assert np.abs(covariance).max() < 1e-9
    assert (eraser.rank_, eraser.classes_) == (2, None)


def test_parts_in_any_order_equal_the_whole_and_classes_may_come_later() -> None:
    X, y = table(classes=3)
    X[:, 0] += 3000
    order = np.argsort(y == 1, kind="stable")  # class 1 comes last
    whole, parts = LeaceEraser().fit(X, y), LeaceEraser()
    for some in np.array_split(order, 7):
        parts.partial_fit(X[some], y[some])
    assert parts.n_samples_seen_ == len(X)
    np.testing.assert_array_equal(parts.classes_, whole.classes_)
    np.testing.assert_allclose(parts.projection_, whole.projection_, atol=1e-8 * np.abs(whole.projection_).max())
    np.testing.assert_allclose(parts.transform(X), whole.transform(X), rtol=1e-8, atol=1e-8)


def test_a_part_with_one_class_erases_nothing_yet() -> None:
    X, y = table()
    eraser = LeaceEraser().partial_fit(X[y == 0], y[y == 0])
    np.testing.assert_array_equal(eraser.transform(X), X)
    assert eraser.rank_ == 0
    assert eraser.partial_fit(X[y == 1], y[y == 1]).rank_ == 1


@pytest.mark.parametrize("eraser", [LeaceEraser(), InlpEraser(iterations=2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_edit_is_the_transform(eraser, dtype: torch.dtype) -> None:
    X, y = table()
    eraser.fit(X, y)
    value = torch.tensor(X).reshape(20, 30, 12).to(dtype)
    after = value + eraser.edit()(value)
    assert after.dtype == dtype
    wanted = torch.tensor(eraser.transform(value.double().reshape(600, 12).numpy())).reshape(value.shape)
    scale = float(wanted.abs().max())
    assert float((after.double() - wanted).abs().max()) < (1e-5 if dtype == torch.float32 else 1e-2) * scale


@pytest.mark.parametrize("site", ["resid_post.1", "z.1.2"])
def test_in_a_running_model_the_concept_is_gone_at_the_edited_site(tiny, site: str) -> None:
    model = tiny("llama").double()
    ids = torch.randint(3, 120, (40, 6), generator=torch.Generator().manual_seed(0))
    y = (ids[:, -1] % 2 == 0).numpy()
    with torch.no_grad(), taps(model, site) as clean:
        model(ids)
    eraser = LeaceEraser().fit(clean[site][:, -1].numpy(), y)
    with torch.no_grad(), taps(model, site, edits={site: eraser.edit()}) as edited:
        model(ids)
    after = edited[site]
    assert (after[:, :-1] != clean[site][:, :-1]).any()  # all positions are edited
    torch.testing.assert_close(after[:, -1].numpy(), eraser.transform(clean[site][:, -1].numpy()), rtol=0, atol=1e-6)
    gap = after[:, -1][y].mean(0) - after[:, -1][~y].mean(0)
    assert float(gap.abs().max()) < 1e-6  # the edit computes in the model's dtype


def test_an_edit_on_the_wrong_site_says_so(tiny) -> None:
    model = tiny("llama")
    X, y = np.random.default_rng(0).normal(size=(30, 8)), np.arange(30) % 2
    eraser = LeaceEraser().fit(X, y)
    ids = torch.arange(3, 9)[None]
    with pytest.raises(ValueError, match="Name the head"), taps(model, edits={"z.1": eraser.edit()}):
        model(ids)
    width = pytest.raises(ValueError, match="fitted on 8 features; the edited value has 32")
    with width, taps(model, edits={"resid_post.1": eraser.edit()}):
        model(ids)


@pytest.mark.parametrize("eraser", [LeaceEraser(), InlpEraser()])
def test_bad_input_says_what_is_wrong(eraser) -> None:
    X, y = table(rows=20)
    with pytest.raises(ValueError, match="one class"):
        eraser.fit(X, np.zeros(20, dtype=int))
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        eraser.fit(X, y[:-1])
    with pytest.raises(ValueError, match="NaN"):
        eraser.fit(np.where(X[3, 3] == X, np.nan, X), y)


def test_settings_that_cannot_be() -> None:
    X, y = table(rows=20)
    with pytest.raises(ValueError, match="give 'auto', 'classes' or 'numbers'"):
        LeaceEraser(concept="label").fit(X, y)
    with pytest.raises(ValueError, match="classes are one per row"):
        LeaceEraser(concept="classes").fit(X, np.stack([y, y], axis=1))
    with pytest.raises(ValueError, match="iterations=0"):
        InlpEraser(iterations=0).fit(X, y)
    eraser = LeaceEraser(concept="numbers").partial_fit(X, y)
    with pytest.raises(ValueError, match="earlier parts 1"):
        eraser.partial_fit(X, np.stack([y, y], axis=1))

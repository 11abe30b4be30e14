"""Moments over tokens: brute force, the contract, nothing learned from test texts, and what a mean cannot see."""

import sys

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from microtome.capture.activations import Activations
from microtome.probes.token_moments import TokenMoments, random_projection, token_moments, tokens_by_text


@parametrize_with_checks([TokenMoments(), TokenMoments(projection="pca", width=2)])
def test_scikit_learns_contract(estimator, check) -> None:
    check(estimator)


def planted(n_texts: int = 240, n_tokens: int = 24, width: int = 12, seed: int = 0) -> tuple[list, np.ndarray]:
    """Two classes of equal means; one pair of coordinates rises together in class 1 and apart in class 0."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n_texts) % 2)
    texts = []
    for label in y:
        x = rng.normal(size=(n_tokens, width))
        x[:, 1] = (0.8 if label else -0.8) * x[:, 0] + 0.6 * x[:, 1]
        texts.append((x + rng.normal(size=width)).astype(np.float32))
    return texts, y


def as_acts(texts: list, y: np.ndarray) -> Activations:
    sizes = [len(text) for text in texts]
    owner = np.repeat(np.arange(len(texts)), sizes)
    position = np.concatenate([np.arange(size) for size in sizes])
    rows = pd.DataFrame({"text": owner, "position": position, "label": y[owner], "is_even": position % 2 == 0})
    return Activations.from_arrays({"eeg.0": np.concatenate(texts)}, rows=rows)


@pytest.mark.parametrize("projection", ["random", "pca"])
def test_a_difference_of_covariance_alone_is_found(projection: str) -> None:
    texts, y = planted()
    linear = make_pipeline(StandardScaler(), LogisticRegression(C=0.1))
    options = {"cv": GroupKFold(4), "groups": np.arange(len(y))}
    mean = cross_val_score(linear, np.stack([text.mean(0) for text in texts]), y, **options).mean()
    moments = make_pipeline(TokenMoments(projection=projection), StandardScaler(), LogisticRegression(C=0.1))
    assert mean == pytest.approx(0.5, abs=0.1)
    assert cross_val_score(moments, texts, y, **options).mean() > 0.9


@pytest.mark.parametrize("signed_sqrt", [False, True])
@pytest.mark.parametrize("width", [3, 32])
def test_moments_are_those_of_numpy(signed_sqrt: bool, width: int) -> None:
    texts = [text[: 2 + n] for n, text in enumerate(planted(n_texts=6)[0])]
    found = TokenMoments(width, signed_sqrt=signed_sqrt, seed=5).fit(texts).transform(texts)
    P = random_projection(12, width, seed=5).numpy()
    r = min(width, 12)
    np.testing.assert_allclose(P @ P.T, np.eye(r), atol=1e-12)
    assert found.shape == (6, 12 + r * (r + 1) // 2)
    for row, text in zip(found, texts, strict=True):
        covariance = P @ np.cov(text.astype(np.float64), rowvar=False, ddof=0) @ P.T
        entries = covariance[np.triu_indices(r)]
        entries = np.sign(entries) * np.sqrt(np.abs(entries)) if signed_sqrt else entries
        np.testing.assert_allclose(row, np.concatenate([text.mean(0, dtype=np.float64), entries]), atol=1e-6)


def test_pca_is_that_of_scikit_learn_and_sees_training_texts_only() -> None:
    from sklearn.decomposition import PCA

    texts, _ = planted(n_texts=20)
    moments = TokenMoments(3, projection="pca").fit(texts[:15])
    other = PCA(3).fit(np.concatenate(texts[:15]).astype(np.float64)).components_
    np.testing.assert_allclose(np.abs(np.sum(moments.components_ * other, axis=1)), 1, atol=1e-10)
    before = moments.transform(texts[:15])
    texts[17][:] = 1e9  # a test text: no bit of what was learned moves
    again = clone(moments).fit(texts[:15])
    assert np.array_equal(again.components_, moments.components_)
    assert np.array_equal(again.transform(texts)[:15], before)


def test_one_token_has_no_covariance_and_n_tokens_rank_n_minus_one() -> None:
    texts, _ = planted(n_texts=4, n_tokens=4)
    moments = TokenMoments(signed_sqrt=False, with_mean=False).fit(texts)
    assert (moments.transform([texts[0][:1]]) == 0).all()
    covariance = np.zeros((12, 12))
    covariance[np.triu_indices(12)] = moments.transform(texts[:1])[0]
    covariance += np.triu(covariance, 1).T
    assert np.linalg.matrix_rank(covariance, tol=1e-10) == 3


def test_activations_get_a_row_per_text() -> None:
    texts, y = planted(n_texts=8)
    texts = [text[: 3 + n] for n, text in enumerate(texts)]
    acts = token_moments(as_acts(texts, y), width=4)
    assert acts["eeg.0"].shape == (8, 12 + 10)
    np.testing.assert_allclose(acts["eeg.0"].numpy(), TokenMoments(4).fit(texts).transform(texts), atol=1e-5)
    assert acts.rows["label"].tolist() == y.tolist()
    assert "is_even" not in acts.rows  # differs within a text
    assert acts.rows["n_tokens"].tolist() == [3 + n for n in range(8)]
    assert (acts.rows["position"] == -1).all()


def test_heads_are_apart_and_texts_may_lie_anywhere() -> None:
    texts, y = planted(n_texts=6)
    flat = as_acts(texts, y)
    shuffled = np.random.default_rng(0).permutation(flat.n_rows)
    values = flat["eeg.0"].reshape(-1, 2, 6).numpy()
    acts = Activations.from_arrays({"heads.0": values}, rows=flat.rows).select_rows(shuffled)
    moments = token_moments(acts, width=3)
    assert moments["heads.0"].shape == (6, 2, 6 + 6)
    assert moments.rows["text"].tolist() == list(dict.fromkeys(flat.rows["text"].to_numpy()[shuffled]))
    for head in range(2):
        alone = TokenMoments(3).fit(tokens_by_text(acts, f"heads.0.{head}"))
        np.testing.assert_allclose(
            moments[f"heads.0.{head}"].numpy(), alone.transform(tokens_by_text(acts, f"heads.0.{head}")), atol=1e-5
        )


def test_chunks_of_tokens_change_nothing(monkeypatch) -> None:
    texts, y = planted(n_texts=6)
    whole = token_moments(as_acts(texts, y))["eeg.0"]
    monkeypatch.setattr(sys.modules["microtome.probes.token_moments"], "_VALUES_AT_ONCE", 1000)
    np.testing.assert_allclose(token_moments(as_acts(texts, y))["eeg.0"].numpy(), whole.numpy(), atol=1e-6)


def test_bad_input_says_what_to_do() -> None:
    texts, y = planted(n_texts=4)
    acts = as_acts(texts, y)
    with pytest.raises(ValueError, match=r"every one of 4 texts has one row.*positions='all'"):
        token_moments(acts.select_rows("position == 0"))
    with pytest.raises(ValueError, match="width=0: give at least 1"):
        token_moments(acts, width=0)
    with pytest.raises(ValueError, match="projection='svd': expected 'random' or 'pca'"):
        TokenMoments(projection="svd").fit(texts)
    with pytest.raises(ValueError, match=r"width=0\.5"):
        TokenMoments(0.5).fit(texts)
    with pytest.raises(ValueError, match=r"text 1 has shape \[0, 12\]"):
        TokenMoments().fit([texts[0], texts[1][:0]])
    with pytest.raises(ValueError, match="text 1 has 5 features, text 0 12"):
        TokenMoments().fit([texts[0], texts[1][:, :5]])
    with pytest.raises(ValueError, match="NaN"):
        TokenMoments().fit([texts[0], texts[1] * np.nan])
    with pytest.raises(ValueError, match="11 features, but TokenMoments is expecting 12"):
        TokenMoments().fit(texts).transform([texts[0][:, :11]])
    heads = Activations.from_arrays({"heads.0": np.zeros((4, 2, 3))})
    with pytest.raises(ValueError, match="Name one head"):
        tokens_by_text(heads, "heads.0")

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge

from microtome.probes.baselines import STRENGTHS, _ridge, baselines
from microtome.probes.folds import grouped_folds, nested_folds
from microtome.probes.metrics import fold_auroc
from microtome.probes.word_features import bag_of_words, lengths

WORDS = [f"w{number}" for number in range(60)]


def made(labels, *, folds=4):
    codes = np.asarray(labels).astype(np.int64) if np.asarray(labels).dtype != float else np.arange(len(labels)) % 2
    groups = np.arange(len(codes))
    test = grouped_folds(codes, groups, folds=folds)
    nested = nested_folds(codes, groups, test, folds=3)
    return torch.from_numpy(test), torch.from_numpy(nested)


@pytest.fixture
def case():
    """240 texts; whether "good" stands in one, and one of 60 filler words 12 times."""
    rng = np.random.default_rng(0)
    has_word = rng.random(240) < 0.5
    texts = [" ".join([*rng.choice(WORDS, 12), "good" if has else "bad"]) for has in has_word]
    return texts, has_word, rng


def auroc_of(fit, labels, test):
    return fold_auroc(fit.scores, labels, test)


def test_a_words_presence_is_the_bags_and_an_independent_label_nobodys(case):
    texts, has_word, rng = case
    test, nested = made(has_word)
    labellings = torch.from_numpy(np.stack([has_word, rng.permutation(has_word)]))
    fits = baselines(texts, labellings=labellings, test=test, nested=nested)
    assert list(fits) == ["bag", "length", "majority"]
    of_word, of_noise = auroc_of(fits["bag"], labellings, test)
    assert of_word > 0.99
    assert abs(of_noise - 0.5) < 0.12
    assert ((fits["bag"].scores[0] > 0) == labellings[0]).float().mean() > 0.97
    assert (auroc_of(fits["majority"], labellings, test) == 0.5).all()
    right = ((fits["majority"].scores[0] > 0) == labellings[0]).double().mean()
    assert right == pytest.approx(max(has_word.mean(), 1 - has_word.mean()))
    assert fits["bag"].inner_loss[0].max() < 0.5 < fits["bag"].inner_loss[1].min()


def test_a_label_by_length_is_lengths(case):
    texts, _, rng = case
    words = rng.integers(3, 30, size=240)
    texts = [" ".join(rng.choice(WORDS, count)) for count in words]
    positive = np.array([len(text) for text in texts]) > 45
    test, nested = made(positive)
    fits = baselines(texts, labellings=torch.from_numpy(positive[None]), test=test, nested=nested)
    assert auroc_of(fits["length"], torch.from_numpy(positive), test) == 1.0
    counts = np.full(240, 7)
    counts[positive] = 9
    with_tokens = baselines(
        ["same text"] * 240, labellings=torch.from_numpy(positive[None]), test=test, nested=nested, token_counts=counts
    )
    assert auroc_of(with_tokens["length"], torch.from_numpy(positive), test) == 1.0
    assert auroc_of(with_tokens["bag"], torch.from_numpy(positive), test) == 0.5


def test_position_and_token_of_a_row_table():
    rng = np.random.default_rng(1)
    tokens, position = rng.choice(["run", "cat", "blue"], 300), rng.integers(0, 9, 300)
    by_token = tokens == "cat"
    by_place = position > 4
    rows = pd.DataFrame({"token": tokens, "position": position})
    for labels, name, other in ((by_token, "token", "position"), (by_place, "position", "token")):
        test, nested = made(labels)
        labellings = torch.from_numpy(labels[None])
        fits = baselines(None, rows=rows, labellings=labellings, test=test, nested=nested)
        assert list(fits) == ["position", "token", "majority"]
        assert auroc_of(fits[name], labellings, test) == 1.0
        assert abs(auroc_of(fits[other], labellings, test) - 0.5) < 0.1
    whole = baselines(None, rows=rows.assign(position=-1), labellings=labellings, test=test, nested=nested)
    assert list(whole) == ["token", "majority"]


def test_a_token_never_seen_gets_the_training_shares():
    positive = np.arange(40) % 4 == 0
    test, nested = made(positive)
    rows = pd.DataFrame({"token": [f"t{number}" for number in range(40)]})
    fit = baselines(None, rows=rows, labellings=torch.from_numpy(positive[None]), test=test, nested=nested)["token"]
    for fold in test:
        share = positive[~fold.numpy()].mean()
        np.testing.assert_allclose(fit.scores[0, fold], np.log(share / (1 - share)))


def test_the_bag_agrees_with_scikit_learn(case):
    texts, has_word, rng = case
    labels = has_word ^ (rng.random(240) < 0.2)
    test, nested = made(labels)
    fit = baselines(texts, labellings=torch.from_numpy(labels[None]), test=test, nested=nested)["bag"]
    for fold, rows in enumerate(test.numpy()):
        vectors = TfidfVectorizer(min_df=2, max_features=2000, sublinear_tf=True, token_pattern=r"(?u)\w+|[^\w\s]")
        train = np.flatnonzero(~rows)
        x = vectors.fit_transform([texts[row] for row in train]).toarray()
        scale = np.sqrt(x.var(axis=0).sum())
        model = LogisticRegression(C=fit.fold_strengths[0, fold].item(), tol=1e-10, solver="newton-cholesky")
        model.fit(x / scale, labels[train])
        expected = model.decision_function(
            vectors.transform([texts[r] for r in np.flatnonzero(rows)]).toarray() / scale
        )
        np.testing.assert_allclose(fit.scores[0, rows], expected, atol=2e-3)


def test_refit_weighs_raw_words(case):
    texts, has_word, _ = case
    test, nested = made(has_word)
    fit = baselines(texts, labellings=torch.from_numpy(has_word[None]), test=test, nested=nested)["bag"]
    made_of = bag_of_words(texts, torch.ones(240, dtype=torch.bool))
    assert {made_of.names[int(fit.coefficients.argmax())], made_of.names[int(fit.coefficients.argmin())]} == {
        "good",
        "bad",
    }
    assert fit.strength in STRENGTHS


def test_several_classes_and_numbers(case):
    texts, _, rng = case
    kinds = rng.integers(3, size=240)
    texts = [f"{text} {('red', 'green', 'blue')[kind]}" for text, kind in zip(texts, kinds, strict=True)]
    test, nested = made(kinds)
    labels = torch.from_numpy(np.stack([kinds, rng.permutation(kinds)]))
    fits = baselines(texts, labellings=labels, test=test, nested=nested)
    assert fits["bag"].scores.shape == (2, 240, 3)
    torch.testing.assert_close(fits["bag"].scores.exp().sum(dim=-1), torch.ones(2, 240, dtype=torch.float64))
    assert (fits["bag"].scores[0].argmax(dim=-1) == labels[0]).double().mean() > 0.95
    assert (fits["bag"].scores[1].argmax(dim=-1) == labels[1]).double().mean() < 0.5
    assert fits["majority"].scores.shape == (2, 240, 3)
    numbers = torch.from_numpy(np.array([len(text) for text in texts], dtype=float)[None])
    fits = baselines(texts, labellings=numbers, test=test, nested=nested)
    error = (fits["length"].scores - numbers).square().mean(dim=-1)
    assert error < 0.01 * numbers.var()
    for fold in test:
        torch.testing.assert_close(
            fits["majority"].scores[0, fold], numbers[0, ~fold].mean().expand(int(fold.sum())), rtol=1e-9, atol=0
        )


def test_ridge_is_scikit_learns():
    rng = np.random.default_rng(2)
    rows, numbers = torch.from_numpy(rng.normal(size=(50, 6))), torch.from_numpy(rng.normal(size=(2, 50)))
    masks = torch.arange(50) % 3 != torch.arange(3)[:, None]
    weights, intercepts = _ridge(rows, numbers, masks, (0.1, 10.0))
    for mask, keep in enumerate(masks):
        for place, strength in enumerate((0.1, 10.0)):
            expected = Ridge(alpha=1 / strength).fit(rows[keep], numbers[:, keep].T)
            np.testing.assert_allclose(weights[:, mask, place], expected.coef_, atol=1e-10)
            np.testing.assert_allclose(intercepts[:, mask, place], expected.intercept_, atol=1e-10)


def test_no_bit_of_a_fold_depends_on_its_test_texts(case):
    texts, has_word, _ = case
    test, nested = made(has_word)
    rows = pd.DataFrame({"token": [text.split()[0] for text in texts], "position": np.arange(240) % 5})
    options = {"labellings": torch.from_numpy(has_word[None]), "test": test, "nested": nested}
    clean = baselines(texts, rows=rows, **options)
    row = int(test[1].nonzero()[0, 0])
    texts = [*texts[:row], "zebra " * 500, *texts[row + 1 :]]
    rows.loc[row, ["token", "position"]] = "zebra", 10**9
    dirty = baselines(texts, rows=rows, **options)
    others = test[1].clone()
    others[row] = False
    for name, fit in clean.items():
        assert torch.equal(fit.scores[:, others], dirty[name].scores[:, others]), name
        assert torch.equal(fit.inner_loss[:, 1], dirty[name].inner_loss[:, 1]), name
    assert not torch.equal(clean["bag"].scores, dirty["bag"].scores)


def test_many_rows_keep_the_largest_axes(monkeypatch, case):
    texts, _, _ = case
    monkeypatch.setattr("microtome.probes.word_features.MOST_AXES", 20)
    assert bag_of_words(texts, torch.ones(240, dtype=torch.bool)).rows.shape == (240, 20)


def test_bad_texts_are_explained(case):
    texts, has_word, _ = case
    test, nested = made(has_word)
    options = {"labellings": torch.from_numpy(has_word[None]), "test": test, "nested": nested}
    with pytest.raises(ValueError, match="239 entries for 240 rows"):
        baselines(texts[1:], **options)
    with pytest.raises(ValueError, match=r"texts\[3\] is None, no string"):
        baselines([*texts[:3], None, *texts[4:]], **options)
    assert lengths(["abc"] * 4, None, torch.ones(4, dtype=torch.bool)) is None


@pytest.mark.parametrize("texts", [[""] * 240, [f"u{number}" for number in range(240)]])
def test_texts_that_share_no_word_have_a_useless_bag(case, texts):
    _, has_word, _ = case
    test, nested = made(has_word)
    found = baselines(texts, labellings=torch.from_numpy(has_word[None]), test=test, nested=nested)
    assert fold_auroc(found["bag"].scores, torch.from_numpy(has_word), test).tolist() == [0.5]

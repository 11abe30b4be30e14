import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from microtome.probes.folds import grouped_folds, nested_folds
from microtome.probes.metrics import class_loss_bits
from microtome.probes.multinomial_fits import multinomial_fits

STRENGTHS = [0.003, 0.1, 3.0]


@pytest.fixture
def case():
    rng = np.random.default_rng(0)
    codes = rng.permutation(np.arange(150) % 3)
    features = rng.normal(size=(2, 150, 6)) * [1, 10, 0.1, 3, 5, 1] + 4
    features[0, :, 2] += 0.15 * codes
    features[0, :, 5] += codes == 1
    test = grouped_folds(codes, np.arange(150), folds=3)
    nested = nested_folds(codes, np.arange(150), test, folds=2)
    labellings = torch.from_numpy(np.stack([codes, rng.permutation(codes)]))
    return torch.from_numpy(features), labellings, torch.from_numpy(test), torch.from_numpy(nested)


def pipeline(strength):
    return make_pipeline(StandardScaler(), LogisticRegression(C=strength, solver="newton-cholesky", tol=1e-10))


def centred(scores):
    return scores - scores.mean(1, keepdims=True)


def test_agreement_with_nested_scikit_learn(case):
    features, labellings, test, nested = case
    fit = multinomial_fits(features, labellings, test, nested, STRENGTHS)[0]
    x, y = features[0].numpy(), labellings[0].numpy()
    outer = dict.fromkeys(STRENGTHS, 0.0)
    for fold, rows in enumerate(test.numpy()):
        losses = []
        for strength in STRENGTHS:
            total = 0.0
            for held_out in nested[fold].numpy():
                train = ~rows & ~held_out
                p = pipeline(strength).fit(x[train], y[train]).predict_proba(x[held_out])
                total += log_loss(y[held_out], p, normalize=False, labels=[0, 1, 2]) / np.log(2)
            losses.append(total / (~rows).sum())
            p = pipeline(strength).fit(x[~rows], y[~rows]).predict_proba(x[rows])
            outer[strength] += log_loss(y[rows], p, normalize=False, labels=[0, 1, 2])
        best = STRENGTHS[int(np.argmin(losses))]
        assert fit.fold_strengths[0, fold].item() == pytest.approx(best)
        assert fit.inner_loss[0, fold].item() == pytest.approx(min(losses), abs=1e-4)
        expected = pipeline(best).fit(x[~rows], y[~rows]).decision_function(x[rows])
        np.testing.assert_allclose(fit.scores[0, rows], centred(expected), atol=2e-3)
    assert fit.strength == min(outer, key=outer.get)
    whole = pipeline(fit.strength).fit(x, y)
    ours = x @ fit.coefficients.numpy().T + fit.intercept.numpy()
    np.testing.assert_allclose(ours, centred(whole.decision_function(x)), atol=1e-5)


def test_shapes_and_what_the_labels_carry(case):
    fits = multinomial_fits(*case)
    assert fits[0].scores.shape == (2, 150, 3)
    assert fits[0].inner_loss.shape == (2, 3)
    assert fits[0].coefficients.shape == (3, 6)
    assert fits[0].intercept.shape == (3,)
    loss = torch.stack([class_loss_bits(fit.scores, case[1]).mean(1) for fit in fits])
    assert loss[0, 0] < np.log2(3) - 0.2
    assert (loss[[0, 1, 1], [1, 0, 1]] > np.log2(3) - 0.05).all()


def test_corrupt_test_row_changes_no_other_score_of_its_fold(case):
    features, labellings, test, nested = case
    row = int(test[0].nonzero()[3, 0])
    dirty = features.clone()
    dirty[:, row] = 1e9
    clean = multinomial_fits(features, labellings, test, nested, STRENGTHS)
    spoiled = multinomial_fits(dirty, labellings, test, nested, STRENGTHS)
    kept = test[0] & (torch.arange(150) != row)
    for one, other in zip(clean, spoiled, strict=True):
        assert torch.equal(one.scores[:, kept], other.scores[:, kept])
        assert torch.equal(one.inner_loss[:, 0], other.inner_loss[:, 0])
        assert not torch.equal(one.scores[:, ~test[0]], other.scores[:, ~test[0]])


def test_class_loss_is_minus_log2_of_the_probability():
    logits = torch.tensor([[0.0, 1e5], [0.0, 0.0]])
    torch.testing.assert_close(class_loss_bits(logits.mT, torch.tensor([0, 0])), torch.tensor([1.0, 0.0]).double())
    with pytest.raises(ValueError, match="are NaN"):
        class_loss_bits(logits.mT * torch.nan, torch.tensor([0, 0]))


def test_a_training_fold_without_a_class_is_named(case):
    features, labellings, test, nested = case
    labellings = labellings.clone()
    labellings[1, ~test[1] & (labellings[1] == 2)] = 0
    with pytest.raises(ValueError, match="trains label set 1 without a row of class 2"):
        multinomial_fits(features, labellings, test, nested, STRENGTHS)

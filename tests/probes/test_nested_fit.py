import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from microtome.probes.folds import grouped_folds, nested_folds
from microtome.probes.logistic_solver import default_strengths, fit_logistic
from microtome.probes.metrics import logit_loss_bits
from microtome.probes.nested_fit import _fold_paths, nested_fits

STRENGTHS = default_strengths(6)


@pytest.fixture
def case():
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.arange(120) % 2)
    features = rng.normal(size=(120, 6)) * [1, 10, 0.1, 3, 5, 1] + 4
    features[:, 2] += 0.15 * labels
    test = grouped_folds(labels, np.arange(120), folds=3)
    nested = nested_folds(labels, np.arange(120), test, folds=2)
    positive = torch.from_numpy(np.stack([labels, rng.permutation(labels)]) == 1)
    return torch.from_numpy(features), positive, torch.from_numpy(test), torch.from_numpy(nested)


def pipeline(strength):
    return make_pipeline(StandardScaler(), LogisticRegression(C=strength, solver="newton-cholesky", tol=1e-10))


def test_agreement_with_nested_scikit_learn(case):
    features, positive, test, nested = case
    [fit] = nested_fits(features[None], positive, test, nested, STRENGTHS)
    x = features.numpy()
    outer = dict.fromkeys(STRENGTHS, 0.0)
    for row, y in enumerate(positive.numpy()):
        for fold, rows in enumerate(test.numpy()):
            losses = []
            for strength in STRENGTHS:
                total = 0.0
                for held_out in nested[fold].numpy():
                    train = ~rows & ~held_out
                    p = pipeline(strength).fit(x[train], y[train]).predict_proba(x[held_out])
                    total += log_loss(y[held_out], p, normalize=False) / np.log(2)
                losses.append(total / (~rows).sum())
                if row == 0:
                    p = pipeline(strength).fit(x[~rows], y[~rows]).predict_proba(x[rows])
                    outer[strength] += log_loss(y[rows], p, normalize=False)
            best = STRENGTHS[int(np.argmin(losses))]
            assert fit.fold_strengths[row, fold].item() == pytest.approx(best)
            assert fit.inner_loss[row, fold].item() == pytest.approx(min(losses), abs=1e-4)
            expected = pipeline(best).fit(x[~rows], y[~rows]).decision_function(x[rows])
            np.testing.assert_allclose(fit.scores[row, rows], expected, atol=2e-3)
    assert fit.strength == pytest.approx(min(outer, key=outer.get))
    whole = LogisticRegression(C=fit.strength, solver="newton-cholesky", tol=1e-10)
    scaler = StandardScaler().fit(x)
    whole.fit(scaler.transform(x), positive[0].numpy())
    np.testing.assert_allclose(fit.coefficients, whole.coef_[0] / scaler.scale_, atol=1e-5)
    raw = whole.intercept_[0] - whole.coef_[0] @ (scaler.mean_ / scaler.scale_)
    assert fit.intercept.item() == pytest.approx(raw, abs=1e-5)


def test_corrupt_test_rows_change_no_bit_of_their_fold(case):
    features, positive, test, nested = case
    row = int(test[0].nonzero()[3, 0])
    corrupted = features.clone()
    corrupted[row] = 1e9
    strengths = torch.as_tensor(STRENGTHS, dtype=torch.float64)
    weight = torch.ones(positive.shape, dtype=torch.float64)
    clean, dirty = (
        _fold_paths(x[None], positive, ~test[0], nested[0], test[0], strengths, fit_logistic, logit_loss_bits, weight)
        for x in (features, corrupted)
    )
    kept = test[0].nonzero()[:, 0] != row
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1][..., kept].nan_to_num(), dirty[1][..., kept].nan_to_num())
    assert not torch.equal(clean[1][..., ~kept].nan_to_num(), dirty[1][..., ~kept].nan_to_num())


def test_weak_penalties_are_fitted_only_where_wanted(case, monkeypatch):
    features, positive, test, nested = case
    calls = []

    def recording(features, labels, train, strengths, **options):
        calls.append((len(features), len(strengths)))
        return fit_logistic(features, labels, train, strengths, **options)

    monkeypatch.setattr("microtome.probes.nested_fit.fit_logistic", recording)
    # a label that one feature gives away: ever weaker penalties are better. Noise wants strong ones
    telling = torch.cat([features, 8.0 * positive[:1].double().T], dim=1)
    plain = torch.randn(telling.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    fit, other = nested_fits(torch.stack([telling, plain]), positive, test, nested)
    assert calls[:2] == [(2, 6), (1, 3)]
    assert (fit.fold_strengths[0] == default_strengths(7)[-1]).all()
    assert (other.fold_strengths <= default_strengths(7)[5]).all()


def test_labellings_do_not_touch_each_other(case):
    features, positive, test, nested = case
    [both], [alone] = (
        nested_fits(features[None], positive, test, nested),
        nested_fits(features[None], positive[:1], test, nested),
    )
    torch.testing.assert_close(both.scores[:1], alone.scores, rtol=0, atol=1e-3)
    assert torch.equal(both.fold_strengths[:1], alone.fold_strengths)


def test_sites_do_not_touch_each_other(case):
    features, positive, test, nested = case
    other = features.flip(0) * 3 + 1
    both = nested_fits(torch.stack([features, other]), positive, test, nested)
    for fit, site in zip(both, (features, other), strict=True):
        [alone] = nested_fits(site[None], positive, test, nested)
        torch.testing.assert_close(fit.scores, alone.scores, rtol=0, atol=1e-3)
        torch.testing.assert_close(fit.coefficients, alone.coefficients, rtol=0, atol=1e-6)
        assert torch.equal(fit.fold_strengths, alone.fold_strengths)
        assert fit.strength == alone.strength

"""Closed-form nested fits against loops over scikit-learn, and what test rows may touch."""

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.preprocessing import StandardScaler

import microtome.probes.moment_targets as moment_targets
from microtome.probes.folds import grouped_folds
from microtome.probes.metrics import auroc
from microtome.probes.moment_fits import moment_fits, moment_fits_of_chunks

STRENGTHS = (1e-3, 0.03, 1.0, 30.0)
METHODS = ("ridge", "lda", "mass_mean", "mass_mean_corrected")


def make(kind, rows=150, width=6, sites=2, seed=0):
    rng = np.random.default_rng(seed)
    n_classes = 3 if kind == "classes" else 2
    labels = rng.permutation(np.arange(rows) % n_classes)
    features = rng.normal(size=(sites, rows, width)) * [1, 10, 0.1, 3, 5, 1] + 4
    features[..., 2] += 0.08 * (labels == 1)
    features[..., 1] += 8 * (labels == n_classes - 1)
    features[..., 4] += 6 * (labels == 0)
    test = torch.from_numpy(grouped_folds(labels, np.arange(rows), folds=4))
    both = np.stack([labels, rng.permutation(labels)])
    if kind == "binary":
        both = both == 1
    if kind == "numbers":
        both = both + rng.normal(size=both.shape)
    return torch.from_numpy(features), torch.from_numpy(both), test


def fitted_scores(kind, method, strength, x, y, held_out):
    """Scores of held-out rows by an implementation of its own, before any calibration."""
    scaler = StandardScaler().fit(x)
    z, h = scaler.transform(x), scaler.transform(held_out)
    if method == "ridge":
        target = np.eye(3)[y] if kind == "classes" else y.astype(float)
        return Ridge(alpha=strength * len(z)).fit(z, target).predict(h)
    classes = np.unique(y)
    if method == "mass_mean":
        z, h = x, held_out
    means = np.stack([z[y == k].mean(axis=0) for k in classes])
    within = sum((z[y == k] - m).T @ (z[y == k] - m) for k, m in zip(classes, means, strict=True)) / len(z)
    inverse = {
        "lda": np.linalg.inv(within + strength * np.eye(len(within))),
        "mass_mean": np.eye(len(within)),
        "mass_mean_corrected": np.linalg.inv(within),
    }[method]
    apart = h[:, None] - means
    scores = -0.5 * np.einsum("nki,ij,nkj->nk", apart, inverse, apart)
    if method != "mass_mean":  # whose calibration has the class shares
        scores += np.log(np.mean(y[:, None] == classes, axis=0))
    return scores[:, 1] - scores[:, 0] if kind == "binary" else scores


def calibration(kind, scores, y):
    """Slope and intercepts by scikit-learn, on scores of deviation 1; for several classes by a general optimiser."""
    from scipy.optimize import minimize

    t = scores[:, None] * [0, 1] if kind == "binary" else scores - scores[:, :1]
    centre = t.mean(axis=0)
    unit = np.sqrt(((t - centre) ** 2).sum() / len(t) / (t.shape[1] - 1))
    z = (t - centre) / unit

    def objective(theta):
        logits = theta[0] * z + np.append(0, theta[1:])
        return -log_softmax(logits, axis=1)[np.arange(len(y)), y.astype(int)].sum() + theta[0] ** 2 / 2

    found = minimize(objective, np.append(1.0, np.zeros(t.shape[1] - 1)), tol=1e-12).x
    slope = found[0] / unit
    intercept = np.append(0, found[1:]) - slope * centre
    return slope, intercept[1] if kind == "binary" else intercept


def bits(kind, logits, y):
    if kind == "numbers":
        return (logits - y) ** 2
    both = np.stack([np.zeros_like(logits), logits], axis=1) if kind == "binary" else logits
    return -log_softmax(both, axis=1)[np.arange(len(y)), y.astype(int)] / np.log(2)


CASES = [(kind, method) for kind in ("binary", "classes") for method in METHODS] + [("numbers", "ridge")]


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_agreement_with_nested_loops(kind, method):
    features, labellings, test = make(kind)
    fits = moment_fits(features, labellings, test, None, STRENGTHS, method=method)
    strengths = STRENGTHS if method in ("ridge", "lda") else (0.0,)
    folds, fit, x = test.numpy(), fits[1], features[1].numpy()
    outer, raw = dict.fromkeys(strengths, 0.0), {strength: np.zeros(fit.scores.shape[1:]) for strength in strengths}
    is_calibrated = kind != "numbers" and method != "lda"
    for row, y in enumerate(labellings.numpy()):
        for number, rows in enumerate(folds):
            options = []
            for strength in strengths:
                inner = np.zeros(fit.scores.shape[1:])
                for held_out in np.delete(folds, number, axis=0):
                    train = ~rows & ~held_out
                    inner[held_out] = fitted_scores(kind, method, strength, x[train], y[train], x[held_out])
                slope, intercept = calibration(kind, inner[~rows], y[~rows]) if is_calibrated else (1.0, 0.0)
                if slope <= 0:  # noise: see the beware of `logit_fits`
                    slope = np.nan
                own = fitted_scores(kind, method, strength, x[~rows], y[~rows], x[rows])
                loss = bits(kind, slope * inner[~rows] + intercept, y[~rows]).mean()
                options.append((loss, strength, slope * own + intercept))
                if row == 0:
                    raw[strength][rows] = own
                    outer[strength] += bits(kind, slope * own + intercept, y[rows]).sum()
            if any(np.isnan(option[0]) for option in options):
                assert row == 1
                continue
            loss, strength, logits = min(options, key=lambda option: option[0])
            assert fit.fold_strengths[row, number].item() == pytest.approx(strength)
            assert fit.inner_loss[row, number].item() == pytest.approx(loss, abs=1e-6)
            logits = log_softmax(logits, axis=1) if kind == "classes" else logits
            np.testing.assert_allclose(fit.scores[row, rows], logits, atol=2e-4)
    assert fit.strength == pytest.approx(min(outer, key=outer.get))
    y = labellings[0].numpy()
    slope, intercept = calibration(kind, raw[fit.strength], y) if is_calibrated else (1.0, 0.0)
    kept = x @ fit.coefficients.numpy().T + fit.intercept.numpy()
    whole = slope * fitted_scores(kind, method, fit.strength, x, y, x) + intercept
    if kind == "classes":  # logits of classes mean nothing up to what all share
        kept, whole = log_softmax(kept, axis=1), log_softmax(whole, axis=1)
    np.testing.assert_allclose(kept, whole, atol=2e-4)


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_a_corrupt_test_row_changes_no_bit_of_its_fold(kind, method):
    features, labellings, test = make(kind)
    row = int(test[1].nonzero()[3, 0])
    corrupted = features.clone()
    corrupted[:, row] = 1e9
    for clean, dirty in zip(
        *(moment_fits(x, labellings, test, None, STRENGTHS, method=method) for x in (features, corrupted)), strict=True
    ):
        others = test[1].clone()
        others[row] = False
        assert torch.equal(clean.scores[:, others], dirty.scores[:, others])
        assert torch.equal(clean.inner_loss[:, 1], dirty.inner_loss[:, 1])
        assert torch.equal(clean.fold_strengths[:, 1], dirty.fold_strengths[:, 1])
        assert not torch.equal(clean.scores[:, test[0]], dirty.scores[:, test[0]])


@pytest.mark.parametrize(("kind", "method"), [("binary", "lda"), ("classes", "ridge"), ("numbers", "ridge")])
def test_chunks_give_what_memory_gives(kind, method, monkeypatch):
    features, labellings, test = make(kind)
    whole = moment_fits(features, labellings, test, None, STRENGTHS, method=method)

    def chunks():
        yield from features.split(37, dim=1)

    for other in (
        moment_fits_of_chunks(chunks, labellings, test, STRENGTHS, method=method),
        [moment_fits(site[None].float(), labellings, test, None, STRENGTHS, method=method)[0] for site in features],
    ):
        for a, b in zip(whole, other, strict=True):
            torch.testing.assert_close(a.scores, b.scores, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(a.coefficients, b.coefficients, rtol=1e-3, atol=1e-4)


def test_many_rows_choose_on_some_of_them_weighted_back(monkeypatch):
    features, labellings, test = make("binary", rows=4000)
    whole = moment_fits(features, labellings, test, None, STRENGTHS)
    monkeypatch.setattr(moment_targets, "SELECTION_ROWS", 1000)
    some = moment_fits(features, labellings, test, None, STRENGTHS)
    for a, b in zip(whole, some, strict=True):
        assert (a.inner_loss[0] - b.inner_loss[0]).abs().max() < 0.05
        assert np.corrcoef(a.scores[0], b.scores[0])[0, 1] > 0.99
        assert b.scores.isfinite().all()
    rare = torch.zeros(4000, dtype=torch.int64)
    rare[:40] = 1
    kept, weight = moment_targets._selection_rows(rare)
    assert (rare[kept] == 1).sum() == 40
    assert weight.sum().item() == pytest.approx(4000)


def test_planted_direction_is_found_and_noise_is_not():
    rng = np.random.default_rng(3)
    labels = rng.permutation(np.arange(2000) % 2)
    scale = np.logspace(-0.5, 0.5, 16)
    features = rng.normal(size=(2, 2000, 16)) * scale
    direction = 0.5 * np.ones(16) * scale**2  # optimal weights are all 0.5, Bayes Φ(0.25 |scale|)
    features[0] += np.where(labels == 1, 0.5, -0.5)[:, None] * direction
    positive = torch.from_numpy(labels == 1)[None]
    test = torch.from_numpy(grouped_folds(labels, np.arange(2000), folds=5))
    from scipy.stats import norm

    bayes = norm.cdf(0.25 * np.linalg.norm(scale))
    for method in ("ridge", "lda", "mass_mean_corrected"):
        found, noise = moment_fits(torch.from_numpy(features), positive, test, None, method=method)
        accuracy = ((found.scores[0] > 0) == positive[0]).double().mean().item()
        assert accuracy == pytest.approx(bayes, abs=0.02)
        weights = found.coefficients / found.coefficients.norm()
        assert weights @ torch.ones(16).double() / 4 > 0.9
        assert auroc(noise.scores[0], positive[0]).item() == pytest.approx(0.5, abs=0.05)
        assert noise.inner_loss.mean() > 0.99


def test_calibrated_scores_of_few_rows_beat_raw_ones():
    features, labellings, test = make("binary", rows=60)
    fits = moment_fits(features, labellings, test, None, (1e-3,), method="mass_mean_corrected")
    raw = np.zeros(60)
    x, y = features[0].numpy(), labellings[0].numpy()
    for rows in test.numpy():
        raw[rows] = fitted_scores("binary", "mass_mean_corrected", 0, x[~rows], y[~rows], x[rows])
    assert bits("binary", fits[0].scores[0].numpy(), y).mean() < bits("binary", raw, y).mean()
    slope = LogisticRegression(C=np.inf).fit(fits[0].scores[0].numpy()[:, None], y).coef_.item()
    assert 0.4 < slope < 2.5


@pytest.mark.parametrize("method", ["ridge", "lda", "mass_mean_corrected"])
def test_constant_features_weigh_nothing(method):
    features, labellings, test = make("binary")
    flat = features.clone()
    flat[..., 3] = 7.25
    [a, *_] = moment_fits(flat, labellings, test, None, STRENGTHS, method=method)
    [b, *_] = moment_fits(flat[..., [0, 1, 2, 4, 5]], labellings, test, None, STRENGTHS, method=method)
    assert a.coefficients[3].abs() < 1e-12
    torch.testing.assert_close(a.scores, b.scores, rtol=1e-6, atol=1e-8)


def test_bad_input_says_what_to_do():
    features, labellings, test = make("binary")
    with pytest.raises(ValueError, match="there are ridge, lda, mass_mean"):
        moment_fits(features, labellings, test, method="qda")
    with pytest.raises(ValueError, match="at least 3 are needed"):
        moment_fits(features, labellings, torch.stack([test[0], ~test[0]]))
    with pytest.raises(ValueError, match="exactly one fold"):
        moment_fits(features, labellings, test[:3])
    with pytest.raises(ValueError, match='need method="ridge"'):
        moment_fits(features, labellings.double(), test, method="lda")
    with pytest.raises(ValueError, match="finite penalties per training row"):
        moment_fits(features, labellings, test, None, (-1.0,))
    with pytest.raises(ValueError, match="without a unique solution"):
        moment_fits(features[..., [0, 0, 1]], labellings, test, None, (0.0,))
    with pytest.raises(ValueError, match="The chunks hold 150 rows, the labels 149"):
        moment_fits_of_chunks(lambda: iter([features]), labellings[:, :-1], test[:, :-1])
    one = torch.zeros_like(labellings)
    one[:, 0] = True
    for method in ("lda", "mass_mean"):
        with pytest.raises(ValueError, match="Class 1 of labelling 0 has no row in a training set"):
            moment_fits(features, one, test, method=method)
    with pytest.raises(ValueError, match="Class 1 has no row to calibrate"):
        moment_fits(features, one, test)
    features[0, 5, 2] = torch.inf
    with pytest.raises(ValueError, match="has inf in feature 2"):
        moment_fits(features, labellings, test)


def test_sites_too_wide_for_moments_are_refused_before_any_work() -> None:
    features = torch.zeros(1, 12, 1).expand(1, 12, 20_000)
    test = torch.arange(12) % 3 == torch.arange(3)[:, None]
    with pytest.raises(ValueError, match=r"20,000 features: the moments of 3 folds take 10 GB.*probe=\"logistic\""):
        moment_fits(features, (torch.arange(12) % 2 == 0)[None], test)


@pytest.mark.parametrize("kind", ["binary", "classes"])
@pytest.mark.parametrize("unit", [1e-60, 1e-8, 1e8, 1e60])
def test_mass_mean_scores_do_not_depend_on_the_unit_of_the_features(kind, unit):
    x, labels, test = make(kind)
    pair = (moment_fits(features, labels, test, method="mass_mean") for features in (x, x * unit))
    for plain, scaled in zip(*pair, strict=True):
        assert torch.allclose(plain.scores, scaled.scores, rtol=0, atol=1e-9)
        assert torch.allclose(plain.coefficients, scaled.coefficients * unit, rtol=1e-9)

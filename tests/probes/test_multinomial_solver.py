"""The batched multinomial solver: what must not change its answer, scikit-learn's answer, hard data, messages."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from microtome.probes.logistic_solver import ConvergenceWarning, fit_logistic
from microtome.probes.multinomial_solver import fit_multinomial

STRENGTHS = [1e-3, 0.1, 3.0]


def problem(rows: int = 150, width: int = 12, classes: int = 3, sites: int = 3, seed: int = 0):
    """Correlated features of unlike size [site, row, feature], two label sets [2, row], three masks [3, row]."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    latent = noise(sites, rows, width)
    features = latent @ noise(width, width) * torch.logspace(-2, 2, width, dtype=torch.float64) + 3
    codes = torch.stack([(latent[0, :, :classes] + noise(rows, classes)).argmax(1), torch.arange(rows) % classes])
    train = torch.stack([torch.arange(rows) // 5 % 3 != fold for fold in range(3)])
    return features, codes, train


def fit(features, codes, train, strengths=STRENGTHS, **options):
    return fit_multinomial(features, codes, train, strengths, **({"tolerance": 1e-12} | options))


def renamed(x, y, t):
    """Classes under other numbers, put back in order."""
    order = torch.tensor([2, 0, 1])
    fits = fit(x, order[y], t)
    return fits.weights[..., order, :], fits.intercepts[..., order]


def plain(fits):
    return fits.weights, fits.intercepts


IDENTITIES = {
    "rows in another order": lambda x, y, t: plain(fit(x.flip(1), y.flip(1), t.flip(1))),
    "one site": lambda x, y, t: plain(fit(x[0], y, t)),
    "label sets in another order": lambda x, y, t: tuple(part.flip(1) for part in plain(fit(x, y.flip(0), t))),
    "folds in another order": lambda x, y, t: tuple(part.flip(2) for part in plain(fit(x, y, t.flip(0)))),
    "strengths in another order": lambda x, y, t: tuple(
        part[:, :, :, [1, 2, 0]] for part in plain(fit(x, y, t, [STRENGTHS[i] for i in (2, 0, 1)]))
    ),
    "one fit at a time in memory": lambda x, y, t: plain(fit(x, y, t, memory_bytes=1)),
    "classes under other numbers": renamed,
    "every weight 1": lambda x, y, t: plain(fit(x, y, t, sample_weight=torch.ones(x.shape[1], dtype=torch.float64))),
    "rows that no fold trains on": lambda x, y, t: plain(
        fit(
            torch.cat([x, torch.full_like(x[:, :5], 1e9)], 1),
            torch.cat([y, y[:, :5]], 1),
            torch.cat([t, torch.zeros_like(t[:, :5])], 1),
        )
    ),
}


@pytest.mark.parametrize("identity", IDENTITIES)
def test_identity(identity) -> None:
    features, codes, train = problem()
    features = features / features.std((0, 1))
    expected = fit(features, codes, train)
    weights, intercepts = IDENTITIES[identity](features, codes, train)
    torch.testing.assert_close(weights, expected.weights[: len(weights)], rtol=0, atol=1e-9)
    torch.testing.assert_close(intercepts, expected.intercepts[: len(weights)], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("rows", "width", "classes", "strengths", "atol"),
    [(150, 12, 3, [1e-3, 0.1, 3.0], 1e-6), (150, 12, 5, [0.1, 1.0], 1e-6), (60, 150, 3, [1e-3, 0.1], 1e-6)],
)
@pytest.mark.parametrize("weighting", ["none", "rows", "balanced", "rows and balanced"])
def test_agrees_with_newton_cholesky(rows, width, classes, strengths, atol, weighting) -> None:
    features, codes, train = problem(rows, width, classes, sites=2)
    sample_weight = None
    if "rows" in weighting:
        sample_weight = torch.rand(2, rows, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 3
    class_weight = "balanced" if "balanced" in weighting else None
    fits = fit_multinomial(features, codes, train, strengths, sample_weight=sample_weight, class_weight=class_weight)
    assert fits.converged.all()
    scores = fits.decision(features)
    # one fit of each kind: newton-cholesky takes 1.5 s for one with 150 features
    levels = range(len(strengths)) if width < rows else range(1)
    for site, label_set, fold, level in [(0, 0, 0, level) for level in levels] + [(1, 1, 2, 0)]:
        x, mask = features[site].numpy(), train[fold].numpy()
        x = (x - x[mask].mean(0)) / x[mask].std(0)
        other = LogisticRegression(
            C=strengths[level], class_weight=class_weight, solver="newton-cholesky", tol=1e-11, max_iter=1000
        )
        weight = None if sample_weight is None else sample_weight[label_set, mask].numpy()
        other.fit(x[mask], codes[label_set, mask].numpy(), weight)
        at = site, label_set, fold, level
        np.testing.assert_allclose(fits.weights[at], other.coef_, atol=atol)
        np.testing.assert_allclose(fits.intercepts[at], other.intercept_ - other.intercept_.mean(), atol=atol)
        shift = other.intercept_.mean()
        np.testing.assert_allclose(scores[at].T, other.decision_function(x) - shift, atol=100 * atol)


def test_two_classes_are_the_binary_fit_at_twice_the_strength() -> None:
    features, codes, train = problem(classes=2)
    fits = fit(features, codes, train)
    binary = fit_logistic(features, codes, train, [2 * strength for strength in STRENGTHS], tolerance=1e-12)
    torch.testing.assert_close(fits.weights[..., 1, :] * 2, binary.weights, rtol=0, atol=1e-9)
    torch.testing.assert_close(fits.intercepts[..., 1] * 2, binary.intercepts, rtol=0, atol=1e-9)


@pytest.mark.parametrize("standardize", [True, False])
def test_gradient_is_zero_and_classes_sum_to_zero(standardize) -> None:
    features, codes, train = problem()
    features = features / features.std((0, 1))
    fits = fit(features, codes, train, standardize=standardize)
    for fold, mask in enumerate(train):
        rows = (features[:, mask] - fits.mean[:, fold, None]) / fits.scale[:, fold, None]
        score = torch.einsum("slckd,snd->slcnk", fits.weights[:, :, fold], rows) + fits.intercepts[:, :, fold, :, None]
        residual = score.softmax(-1) - torch.nn.functional.one_hot(codes[:, None, mask])
        slope = torch.einsum("slcnk,snd->slckd", residual, rows) * fits.strengths[:, None, None]
        assert (fits.weights[:, :, fold] + slope).abs().max() <= 1e-9
        assert residual.sum(-2).abs().max() <= 1e-9
    assert fits.weights.sum(-2).abs().max() < 1e-12
    assert fits.intercepts.sum(-1).abs().max() < 1e-12


@pytest.mark.parametrize("strength", [1.0, 1e4])
def test_separable_rows_converge_and_are_flagged(strength) -> None:
    features, codes, train = problem()
    features[..., 0] += 100 * features[..., 0].std() * codes[0]
    fits = fit(features, codes, train, [strength], tolerance=1e-8)
    assert fits.converged.all()
    assert fits.separated[:, 0].all()
    assert not fits.separated[:, 1].any()


def test_a_planted_direction_per_class_is_found() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 20000, 6, dtype=torch.float64, generator=generator)
    truth = torch.zeros(4, 6, dtype=torch.float64)
    truth[:, :4] = 2 * torch.eye(4)
    truth -= truth.mean(0)
    gumbel = -torch.rand(20000, 4, dtype=torch.float64, generator=generator).log().neg().log()
    codes = (features[0] @ truth.T + gumbel).argmax(1)
    fits = fit_multinomial(features, codes, torch.ones(20000, dtype=torch.bool), [1e3], standardize=False)
    torch.testing.assert_close(fits.weights[0, 0, 0, 0], truth, rtol=0, atol=0.1)


def test_a_row_far_out_spoils_only_folds_that_train_on_it() -> None:
    features, codes, train = problem()
    features = features / features.std((0, 1))
    alone = fit(features, codes, train[:1])
    together = fit(features, codes, train)
    row = int((~train[0]).nonzero()[0, 0])
    features[:, row] = 1e9
    again = fit(features, codes, train[:1])
    assert torch.equal(again.weights, alone.weights)
    assert torch.equal(again.intercepts, alone.intercepts)
    spoiled = fit(features, codes, train, tolerance=1e-9)
    assert spoiled.converged.all()
    torch.testing.assert_close(spoiled.weights[:, :, 0], together.weights[:, :, 0], rtol=0, atol=1e-6)


def test_constant_features_get_no_weight_and_float32_is_enough() -> None:
    features, codes, train = problem()
    single = features.float()
    with_constants = torch.cat([single.double(), torch.full_like(features[..., :2], 0.1)], -1)
    with_constants[:, 0, -1] = 5.0  # constant only where row 0 is not trained on: in the first fold
    fits, expected = fit(with_constants, codes, train), fit(single, codes, train)
    assert (fits.weights[..., -2] == 0).all()
    assert (fits.raw_weights[:, :, 0, ..., -1] == 0).all()
    assert (fits.weights[:, :, 1, ..., -1] != 0).all()
    torch.testing.assert_close(fits.weights[:, :, 0, ..., :-2], expected.weights[:, :, 0], rtol=0, atol=1e-9)


def test_rows_of_weight_0_count_as_left_out_and_weight_2_as_twice() -> None:
    features, codes, train = problem(sites=1)
    features = features / features.std((0, 1))
    times = torch.arange(150) // 2 % 3
    features[:, times == 0] *= 1e6
    weighted = fit(features, codes, train, sample_weight=times.double(), standardize=False)
    repeated = (part.repeat_interleave(times, dim=1) for part in (features, codes, train))
    twice = fit(*repeated, standardize=False)
    torch.testing.assert_close(weighted.weights, twice.weights, rtol=0, atol=1e-8)


def test_fits_that_stop_early_are_named() -> None:
    with pytest.warns(ConvergenceWarning, match=r"of 54 multinomial fits stopped above.* site \d, label set \d"):
        fits = fit(*problem(), max_steps=1)
    assert not fits.converged.all()


def spoiled(change):
    features, codes, train = problem()
    changes = {
        "nan": lambda: features[1, 7].__setitem__(3, torch.nan),
        "missing class": lambda: codes[1].masked_fill_(train[2] & (codes[1] == 1), 0),
        "negative": lambda: codes[1].__setitem__(3, -1),
        "few rows": lambda: train[1].__setitem__(slice(1, None), False),
    }
    changes[change]()
    return features, codes, train


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ("nan", {}, "first at site 1, row 7, feature 3; drop the row"),
        ("missing class", {}, "fold 2 trains label set 1 without a row of class 1 \\(3 classes\\); use stratified"),
        ("negative", {}, "codes must be class numbers 0 to 2, got \\[-1\\]"),
        ("few rows", {}, "fold 1 trains on 1 rows"),
        (None, {"n_classes": 2}, "codes must be class numbers 0 to 1, got \\[2\\]"),
        (None, {"n_classes": 4}, "fold 0 trains label set 0 without a row of class 3"),
        (None, {"n_classes": 1}, "codes hold 1 class"),
        (None, {"strengths": [torch.inf]}, "strengths are C, finite and above 0"),
        (None, {"sample_weight": torch.ones(149)}, "sample_weight covers 149 rows"),
    ],
)
def test_input_no_fit_can_come_from(change, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        fit(*(spoiled(change) if change else problem()), **options)

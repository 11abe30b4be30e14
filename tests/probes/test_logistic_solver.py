"""The batched solver: what must not change its answer, scikit-learn's answer, hard data, messages."""

import re

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from microtome.probes import logistic_solver
from microtome.probes.logistic_solver import ConvergenceWarning, fit_logistic

STRENGTHS = [1e-3, 0.1, 3.0]


def problem(rows: int = 150, width: int = 12, sites: int = 3, seed: int = 0):
    """Correlated features of unlike size [site, row, feature], two label sets [2, row], three masks [3, row]."""
    generator = torch.Generator().manual_seed(seed)
    latent = torch.randn(sites, rows, width, dtype=torch.float64, generator=generator)
    mix = torch.randn(width, width, dtype=torch.float64, generator=generator)
    features = latent @ mix * torch.logspace(-2, 2, width, dtype=torch.float64) + 3
    noise = torch.randn(2, rows, dtype=torch.float64, generator=generator)
    labels = torch.stack([latent[0, :, 0] + noise[0] > 0, noise[1] > 0.4])
    train = torch.stack([torch.arange(rows) % 3 != fold for fold in range(3)])
    return features, labels, train


def fit(features, labels, train, strengths=STRENGTHS, **options):
    return fit_logistic(features, labels, train, strengths, **({"tolerance": 1e-12} | options))


def reordered(features, labels, train):
    order = torch.randperm(features.shape[1], generator=torch.Generator().manual_seed(1))
    return fit(features[:, order], labels[:, order], train[:, order])


def with_rotated_rows(features, labels, train):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logistic_solver, "WIDE", 0.0)
        patch.setattr(logistic_solver, "_fit_rotated", rotated_once(logistic_solver._fit_rotated, patch))
        return fit(features, labels, train)


def rotated_once(rotate, patch):
    """Rotate, but solve the rotated rows directly."""

    def once(features, request):
        patch.setattr(logistic_solver, "WIDE", np.inf)
        try:
            return rotate(features, request)
        finally:
            patch.setattr(logistic_solver, "WIDE", 0.0)

    return once


def back(fits, **axes):
    """The fits with their axes put back in order."""
    weights, intercepts = fits.weights, fits.intercepts
    for axis, order in axes.items():
        number = ["site", "label_set", "fold", "strength"].index(axis)
        inverse = torch.tensor(order).argsort()
        weights, intercepts = weights.index_select(number, inverse), intercepts.index_select(number, inverse)
    return weights, intercepts


def plain(fits):
    return fits.weights, fits.intercepts


IDENTITIES = {
    "rows in another order": lambda x, y, t: plain(reordered(x, y, t)),
    "sites in another order": lambda x, y, t: back(fit(x[[2, 0, 1]], y, t), site=[2, 0, 1]),
    "label sets in another order": lambda x, y, t: back(fit(x, y[[1, 0]], t), label_set=[1, 0]),
    "folds in another order": lambda x, y, t: back(fit(x, y, t[[1, 2, 0]]), fold=[1, 2, 0]),
    "strengths in another order": lambda x, y, t: back(
        fit(x, y, t, [STRENGTHS[i] for i in (2, 0, 1)]), strength=[2, 0, 1]
    ),
    "one fit at a time in memory": lambda x, y, t: plain(fit(x, y, t, memory_bytes=1)),
    "rows that no fold trains on": lambda x, y, t: plain(
        fit(
            torch.cat([x, torch.full_like(x[:, :5], 1e9)], 1),
            torch.cat([y, y[:, :5]], 1),
            torch.cat([t, torch.zeros_like(t[:, :5])], 1),
        )
    ),
    "every weight 1": lambda x, y, t: plain(fit(x, y, t, sample_weight=torch.ones(x.shape[1], dtype=torch.float64))),
    "features rotated into the span of the rows": lambda x, y, t: plain(with_rotated_rows(x, y, t)),
}


@pytest.mark.parametrize("identity", IDENTITIES)
def test_identity(identity) -> None:
    features, labels, train = problem()
    features = features / features.std((0, 1))
    expected = fit(features, labels, train)
    weights, intercepts = IDENTITIES[identity](features, labels, train)
    torch.testing.assert_close(weights, expected.weights, rtol=0, atol=1e-10)
    torch.testing.assert_close(intercepts, expected.intercepts, rtol=0, atol=1e-10)


def test_rows_of_weight_0_count_as_left_out() -> None:
    features, labels, train = problem()
    features = features / features.std((0, 1))
    features[:, ::5] *= 1e6
    kept = torch.arange(150) % 5 != 0
    weighted = fit(features, labels, train, sample_weight=kept.double(), standardize=False)
    left_out = fit(features, labels, train & kept, standardize=False)
    assert weighted.converged.all()
    torch.testing.assert_close(weighted.raw_weights, left_out.raw_weights, rtol=0, atol=1e-9)
    torch.testing.assert_close(weighted.raw_intercepts, left_out.raw_intercepts, rtol=1e-9, atol=1e-9)
    # the moments are those of all training rows, as with scikit-learn's StandardScaler without weights
    assert fit(features, labels, train, sample_weight=kept.double()).converged.all()


@pytest.mark.parametrize("standardize", [True, False])
def test_the_gradient_of_the_objective_is_zero(standardize) -> None:
    features, labels, train = problem()
    features = features / features.std((0, 1))
    fits = fit(features, labels, train, standardize=standardize)
    for fold, mask in enumerate(train):
        rows = (features[:, mask] - fits.mean[:, fold, None]) / fits.scale[:, fold, None]
        scores = torch.einsum("slcd,snd->slcn", fits.weights[:, :, fold], rows) + fits.intercepts[:, :, fold, :, None]
        residual = torch.sigmoid(scores) - labels[:, None, mask].double()
        strength = fits.strengths[:, None]
        slope = fits.weights[:, :, fold] + strength * torch.einsum("slcn,snd->slcd", residual, rows)
        assert slope.abs().max() <= 1e-9
        assert residual.sum(-1).abs().max() <= 1e-9
    assert fits.converged.all()
    assert (fits.gradient <= 1e-12).all()


@pytest.mark.parametrize(
    ("rows", "width", "strengths", "atol"),
    [
        (150, 12, [1e-4, 0.01, 1.0], 1e-6),
        (150, 12, [100.0], 1e-4),
        (90, 50, [0.01, 1.0], 1e-6),
        (60, 150, [1e-3, 0.1], 1e-4),
    ],
)
@pytest.mark.parametrize("weighting", ["none", "rows", "balanced", "rows and balanced"])
def test_agrees_with_newton_cholesky(rows, width, strengths, atol, weighting) -> None:
    features, labels, train = problem(rows, width, sites=2)
    sample_weight = None
    if "rows" in weighting:
        sample_weight = torch.rand(2, rows, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 3
    class_weight = "balanced" if "balanced" in weighting else None
    fits = fit_logistic(features, labels, train, strengths, sample_weight=sample_weight, class_weight=class_weight)
    scores = fits.decision(features)
    for site, label_set, fold, level in np.ndindex(2, 2, 3, len(strengths)):
        x, mask = features[site].numpy(), train[fold].numpy()
        mean, scale = x[mask].mean(0), x[mask].std(0)
        other = LogisticRegression(
            C=strengths[level], class_weight=class_weight, solver="newton-cholesky", tol=1e-11, max_iter=1000
        )
        weight = None if sample_weight is None else sample_weight[label_set, mask].numpy()
        other.fit((x[mask] - mean) / scale, labels[label_set, mask].numpy(), weight)
        at = site, label_set, fold, level
        np.testing.assert_allclose(fits.weights[at], other.coef_[0], atol=atol)
        np.testing.assert_allclose(fits.intercepts[at], other.intercept_[0], atol=atol)
        np.testing.assert_allclose(scores[at], other.decision_function((x - mean) / scale), atol=100 * atol)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("strength", [1.0, 1e4, 1e6])
def test_separable_rows_converge_and_are_flagged(strength) -> None:
    features, labels, train = problem()
    features[..., 0] += 100 * features[..., 0].std() * labels[0]
    fits = fit(features, labels, train, [strength], tolerance=1e-8)
    assert fits.converged.all()
    assert fits.separated[:, 0].all()
    assert not fits.separated[:, 1].any()
    wide, labels, train = problem(60, 150, sites=1)
    fits = fit(wide, labels, train, [strength], tolerance=1e-8)
    assert fits.converged.all()
    assert fits.separated.all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("far", [1e6, 1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_far_out_in_every_feature_converges_and_spoils_only_folds_that_train_on_it(far, dtype) -> None:
    features, labels, train = problem()
    features = (features / features.std((0, 1))).to(dtype)
    together, alone = fit(features, labels, train), fit(features, labels, train[:1])
    features[:, 0] = far  # a test row of the first fold only
    spoiled = fit(features, labels, train, tolerance=1e-9)
    assert spoiled.converged.all()
    assert torch.equal(spoiled.mean[:, 0], together.mean[:, 0])
    assert torch.equal(spoiled.scale[:, 0], together.scale[:, 0])
    # ‖w - w*‖ ≤ ‖∇J‖ ≤ 1e-9 C Σs √d
    torch.testing.assert_close(spoiled.weights[:, :, 0], together.weights[:, :, 0], rtol=0, atol=1e-6)
    assert not torch.equal(spoiled.mean[:, 1:], together.mean[:, 1:])
    spoiled = fit(features, labels, train[:1])
    assert torch.equal(spoiled.weights, alone.weights)
    assert torch.equal(spoiled.intercepts, alone.intercepts)


@pytest.mark.filterwarnings("ignore::microtome.probes.logistic_solver.ConvergenceWarning")
def test_a_row_no_arithmetic_can_hold_beside_the_others_ends_and_spares_folds_without_it() -> None:
    features, labels, train = problem()
    features[:, 0] = 1e30
    fits = fit(features, labels, train, tolerance=1e-8)
    assert fits.weights.isfinite().all()
    assert fits.converged[:, :, 0].all()


def test_default_strengths_are_even_in_the_logarithm_and_shrink_with_width() -> None:
    strengths = np.array(logistic_solver.default_strengths(64))
    assert len(strengths) == 9
    np.testing.assert_allclose(strengths[[0, -1]] * 64, [10**-2.5, 10**1.5])
    np.testing.assert_allclose(np.diff(np.log10(strengths)), 0.5)
    np.testing.assert_allclose(np.array(logistic_solver.default_strengths(128)) * 2, strengths)


def test_rows_that_overlap_are_not_flagged_as_separable() -> None:
    features, labels, train = problem()
    assert not fit(features, labels, train).separated.any()


def test_float32_features_give_the_float64_answer() -> None:
    features, labels, train = problem()
    features[..., 2] += 3000  # a massive activation: mean 1e5 deviations
    single = features.float()
    expected, found = fit(single.double(), labels, train), fit(single, labels, train)
    torch.testing.assert_close(found.weights, expected.weights, rtol=0, atol=1e-10)
    rounded = fit(features[..., 3:], labels, train), fit(features[..., 3:].float(), labels, train)
    torch.testing.assert_close(rounded[0].weights, rounded[1].weights, rtol=0, atol=1e-5)


def test_raw_weights_score_as_the_standardised_ones() -> None:
    features, labels, train = problem()
    fits = fit(features, labels, train)
    scores = fits.decision(features)
    for fold in range(3):
        rows = (features - fits.mean[:, fold, None]) / fits.scale[:, fold, None]
        expected = torch.einsum("slcd,snd->slcn", fits.weights[:, :, fold], rows)
        torch.testing.assert_close(
            scores[:, :, fold], expected + fits.intercepts[:, :, fold, :, None], rtol=0, atol=1e-9
        )
    one = fit(features[0], labels[0], train[0], [0.1])
    torch.testing.assert_close(one.decision(features[0])[0, 0, 0, 0], scores[0, 0, 0, 1], rtol=0, atol=1e-8)


def test_constant_features_get_no_weight() -> None:
    features, labels, train = problem()
    with_constants = torch.cat([features, torch.full_like(features[..., :2], 0.1)], -1)
    with_constants[:, 0, -1] = 5.0  # constant only where row 0 is not trained on: in the first fold
    fits, expected = fit(with_constants, labels, train), fit(features, labels, train)
    assert (fits.weights[..., -2] == 0).all()
    assert (fits.weights[:, :, 0, :, -1] == 0).all()
    assert (fits.raw_weights[:, :, 0, :, -1] == 0).all()
    assert (fits.weights[:, :, 1, :, -1] != 0).all()
    torch.testing.assert_close(fits.weights[:, :, 0, :, :-2], expected.weights[:, :, 0], rtol=0, atol=1e-9)


def test_fits_that_stop_early_are_named() -> None:
    features, labels, train = problem()
    with pytest.warns(
        ConvergenceWarning, match=r"of 54 logistic fits stopped above.* site \d, label set \d, fold \d, C="
    ):
        fits = fit(features, labels, train, max_steps=1)
    assert not fits.converged.all()
    assert torch.equal(fits.converged, fits.gradient <= 1e-12)


@pytest.mark.parametrize(("rows", "width"), [(150, 12), (60, 150)])
@pytest.mark.parametrize("standardize", [True, False])
def test_without_an_intercept_a_row_is_also_its_mirror_image(rows, width, standardize) -> None:
    features, labels, train = problem(rows, width, sites=2)
    features = features / features.std((0, 1))
    fits = fit(features, labels, train, standardize=standardize, intercept=False)
    mirrored = fit(
        torch.cat([features, -features], 1),
        torch.cat([labels, ~labels], 1),
        train.repeat(1, 2),
        [strength / 2 for strength in STRENGTHS],
        standardize=standardize,
    )
    torch.testing.assert_close(fits.weights, mirrored.weights, rtol=0, atol=1e-9)
    torch.testing.assert_close(fits.scale, mirrored.scale)
    assert (fits.intercepts == 0).all()
    assert (fits.mean == 0).all()
    # a row may be turned round: one class is enough
    turned = features * (2.0 * labels[0] - 1)[:, None]
    one = fit(turned, torch.ones_like(labels[:1]), train, standardize=standardize, intercept=False)
    torch.testing.assert_close(one.weights, fits.weights[:, :1], rtol=0, atol=1e-9)


def test_many_label_sets_of_wide_rows_are_the_same_fits() -> None:
    features, labels, train = problem(300, 140, sites=1)
    generator = torch.Generator().manual_seed(3)
    many = torch.cat([labels, torch.rand(20, 300, generator=generator) > 0.5])
    together = fit(features, many, train, [1e-3, 0.1])
    alone = fit(features, many[:1], train[:1], [0.1])
    assert together.converged.all()
    torch.testing.assert_close(together.weights[:, :1, :1, 1:], alone.weights, rtol=0, atol=1e-9)
    every_label = fit(features, many, train, [1e-3, 0.1], memory_bytes=1)
    torch.testing.assert_close(together.weights, every_label.weights, rtol=0, atol=1e-9)


def spoiled(name):
    features, labels, train = problem()
    changes = {
        "nan": lambda: features[1, 7].__setitem__(3, torch.nan),
        "huge": lambda: features[1, 7].__setitem__(3, 1e200),
        "one class": lambda: labels[1].__setitem__(train[2], True),
        "few rows": lambda: train[1].__setitem__(slice(2, None), False),
    }
    changes[name]()
    return features, labels, train


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nan", "NaN, inf or numbers past 1e\\+100, first at site 1, row 7, feature 3; drop the row"),
        ("huge", "first at site 1, row 7, feature 3"),
        ("one class", "fold 2 trains label set 1 on rows of one class only \\(1\\); use stratified folds"),
        ("few rows", "fold 1 trains on 1 rows; a fit needs at least 2"),
    ],
)
def test_features_labels_and_folds_no_fit_can_come_from(name, message) -> None:
    with pytest.raises(ValueError, match=message):
        fit(*spoiled(name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.ones(2, 149, dtype=torch.bool)}, "labels covers 149 rows, features have 150"),
        ({"train": torch.ones(3, 151, dtype=torch.bool)}, "train covers 151 rows, features have 150"),
        ({"sample_weight": torch.ones(149)}, "sample_weight covers 149 rows, features have 150"),
        ({"sample_weight": torch.ones(3, 150)}, "sample_weight has 3 rows for 2 label sets; give one for all"),
        ({"sample_weight": -torch.ones(150)}, "sample_weight must be finite and not negative; leave rows out"),
        ({"sample_weight": torch.full((150,), torch.inf)}, "sample_weight must be finite and not negative"),
        ({"labels": torch.full((2, 150), 2)}, "labels must be 0 or 1, got \\[2\\]; with more classes"),
        ({"strengths": [1.0, 0.0]}, "strengths are C, finite and above 0; got \\[1.0, 0.0\\]"),
        ({"strengths": [torch.inf]}, "strengths are C, finite and above 0; got \\[inf\\]. For nearly no penalty"),
        ({"strengths": []}, "strengths are C, finite and above 0; got \\[\\]"),
    ],
)
def test_arguments_that_do_not_fit_together(change, message) -> None:
    features, labels, train = problem()
    arguments = {"features": features, "labels": labels, "train": train, "strengths": STRENGTHS} | change
    with pytest.raises(ValueError, match=message):
        fit_logistic(**arguments)


def test_decision_wants_the_same_sites() -> None:
    features, labels, train = problem()
    fits = fit(features, labels, train)
    with pytest.raises(
        ValueError, match=re.escape("features are [2, 150, 12]; these fits hold 3 sites of 12 features")
    ):
        fits.decision(features[:2])

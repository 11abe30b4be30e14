import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from microtome.probes.metrics import auroc, log_loss_bits
from microtome.probes.temperature import COLDEST, HOTTEST, fitted_temperature, temperature_scaled


def case(n=300, probes=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    positive = torch.rand(n, generator=generator) < 0.4
    noise = torch.randn(probes, n, generator=generator, dtype=torch.float64)
    scale = torch.tensor([0.01, 0.5, 1.0, 4.0, 500.0], dtype=torch.float64)[:probes, None]
    return scale * (noise + positive), positive


def test_agreement_with_a_scalar_minimiser():
    logits, positive = case()
    fitted = fitted_temperature(logits, positive)
    for row, temperature in zip(logits, fitted.tolist(), strict=True):
        found = minimize_scalar(
            lambda log_t, row=row: log_loss_bits(row / np.exp(log_t), positive).item(),
            bounds=(np.log(COLDEST), np.log(HOTTEST)),
            method="bounded",
            options={"xatol": 1e-10},
        )
        assert temperature == pytest.approx(np.exp(found.x), rel=1e-4)


def test_classes_agree_with_a_scalar_minimiser_and_two_classes_with_one_logit():
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(4, (200,), generator=generator)
    logits = 3 * torch.randn(2, 200, 4, generator=generator) + 2 * torch.nn.functional.one_hot(labels, 4).float()
    for row, temperature in zip(logits.double(), fitted_temperature(logits, labels).tolist(), strict=True):
        found = minimize_scalar(
            lambda log_t, row=row: torch.nn.functional.cross_entropy(row / np.exp(log_t), labels).item(),
            bounds=(-3, 5),
            method="bounded",
            options={"xatol": 1e-10},
        )
        assert temperature == pytest.approx(np.exp(found.x), rel=1e-4)
    binary, positive = case()
    as_two = torch.stack([torch.zeros_like(binary), binary], dim=-1)
    torch.testing.assert_close(fitted_temperature(as_two, positive.long()), fitted_temperature(binary, positive))


def test_answers_stay_and_the_loss_on_the_fitting_rows_never_rises():
    for seed in range(20):
        logits, positive = case(n=60, seed=seed)
        scaled = logits / fitted_temperature(logits, positive)[:, None]
        assert ((scaled > 0) == (logits > 0)).all()
        assert (log_loss_bits(scaled, positive) <= log_loss_bits(logits, positive) + 1e-12).all()
        torch.testing.assert_close(auroc(scaled, positive), auroc(logits, positive))


def test_separated_misleading_and_flat_scores_stop_at_the_bounds():
    positive = torch.arange(40) % 2 == 0
    separated = torch.where(positive, 1.0, -1.0).double()
    fitted = fitted_temperature(torch.stack([separated, -separated, 0 * separated]), positive)
    torch.testing.assert_close(fitted, torch.tensor([COLDEST, HOTTEST, 1.0], dtype=torch.float64))


def test_a_fold_is_scaled_by_the_others():
    logits, positive = case()
    test = torch.arange(300) % 3 == torch.arange(3)[:, None]
    scaled = temperature_scaled(logits, positive, test)
    for rows in test:
        expected = fitted_temperature(logits[:, ~rows], positive[~rows])
        torch.testing.assert_close(scaled[:, rows], logits[:, rows] / expected[:, None])
    spoiled = logits.clone()
    row = int(test[1].nonzero()[0, 0])
    spoiled[:, row] = 1e9
    others = test[1].clone()
    others[row] = False
    assert torch.equal(temperature_scaled(spoiled, positive, test)[:, others], scaled[:, others])
    three = torch.randn(1, 300, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(300) // 3 % 3
    first = fitted_temperature(three[:, ~test[0]], labels[~test[0]])
    torch.testing.assert_close(temperature_scaled(three, labels, test)[:, test[0]], three[:, test[0]].double() / first)


def test_bad_input_is_explained():
    logits, positive = case()
    with pytest.raises(ValueError, match="299 labels for logits"):
        fitted_temperature(logits, positive[1:])
    with pytest.raises(ValueError, match="1 logits are NaN or infinite"):
        fitted_temperature(torch.where(torch.arange(300) == 2, torch.inf, logits[:1]), positive)
    with pytest.raises(ValueError, match="labels go up to 3 for 3 classes"):
        fitted_temperature(torch.zeros(1, 4, 3), torch.arange(4))
    with pytest.raises(ValueError, match="every row in exactly one fold"):
        temperature_scaled(logits, positive, torch.ones(2, 300, dtype=torch.bool))

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import brier_score_loss

from microtome.probes.calibration import (
    brier_score,
    calibration_error,
    calibration_floor,
    calibration_line,
    calibration_table,
    reliability,
    squared_calibration_error,
    stated,
)
from microtome.probes.sweep import sweep


def beta_case(n, probes, *, seed=0):
    """Right confidences: probabilities of Beta(2, 2), labels drawn from them; as logits."""
    rng = np.random.default_rng(seed)
    p = rng.beta(2, 2, (probes, n))
    return torch.from_numpy(np.log(p / (1 - p))), torch.from_numpy(rng.random((probes, n)) < p)


def own_ece(confidence, came_true, bins):
    total = 0.0
    for place in range(bins):
        rows = np.clip((confidence * bins).astype(int), 0, bins - 1) == place
        if rows.any():
            total += rows.mean() * abs(came_true[rows].mean() - confidence[rows].mean())
    return total


@pytest.mark.parametrize(("n", "null"), [(100, 0.093), (300, 0.054), (1000, 0.030), (5000, 0.013)])
def test_right_confidences_have_the_null_values_of_their_number(n, null):
    logits, positive = beta_case(n, 400)
    confidence = torch.sigmoid(logits.abs())
    right = (logits > 0) == positive
    measured = calibration_error(confidence, right)
    spread = measured.std().item() / 20
    assert measured.mean().item() == pytest.approx(null, abs=5e-4 + 3 * spread)
    floor = calibration_floor(confidence[:20], draws=100, seed=1)
    assert floor.mean().item() == pytest.approx(measured.mean().item(), abs=3 * spread + 5e-4)


@pytest.mark.parametrize("bins", [1, 7, 15])
def test_error_is_the_sum_over_bins(bins):
    logits, positive = beta_case(200, 3)
    confidence = torch.sigmoid(logits)
    error = calibration_error(confidence, positive, bins=bins)
    for row in range(3):
        assert error[row].item() == pytest.approx(own_ece(confidence[row].numpy(), positive[row].numpy(), bins))


def test_bins_of_equal_mass_hold_equally_many_rows_and_keep_ties_together():
    confidence = torch.linspace(0.5, 0.51, 60, dtype=torch.float64)
    came_true = torch.arange(60) % 2 == 0
    assert reliability(confidence, came_true, bins=6, equal_mass=True)["rows"].tolist() == [10] * 6
    assert len(reliability(confidence, came_true, bins=6)) == 1
    tied = torch.full((60,), 0.7, dtype=torch.float64)
    assert reliability(tied, came_true, bins=6, equal_mass=True)["rows"].tolist() == [60]
    assert calibration_error(tied, came_true, equal_mass=True).item() == pytest.approx(0.2)


def test_a_coin_said_to_be_sure_is_off_by_its_surety():
    sure = torch.full((1000,), 0.9, dtype=torch.float64)
    came_true = torch.arange(1000) % 2 == 0
    assert calibration_error(sure, came_true).item() == pytest.approx(0.4)
    assert squared_calibration_error(sure, came_true).item() == pytest.approx(0.16, abs=3e-4)
    assert calibration_floor(sure).item() == pytest.approx(np.sqrt(0.09 / 1000 * 2 / np.pi), rel=0.15)


def test_debiased_square_is_zero_in_the_mean():
    rng = np.random.default_rng(0)
    confidence = torch.from_numpy(rng.choice([0.55, 0.7, 0.95], (4000, 60)))
    came_true = torch.from_numpy(rng.random((4000, 60))) < confidence
    square = squared_calibration_error(confidence, came_true, equal_mass=False)
    assert abs(square.mean().item()) < 4 * square.std().item() / np.sqrt(4000)
    plain = calibration_error(confidence, came_true)
    assert plain.mean().item() > 0.05


def test_brier_agrees_with_scikit_learn():
    logits, positive = beta_case(150, 2)
    score = brier_score(logits, positive[0])
    for row in range(2):
        expected = brier_score_loss(positive[0], torch.sigmoid(logits[row]))
        assert score[row].item() == pytest.approx(expected)
    three = torch.randn(2, 150, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(150) % 3
    truth = torch.nn.functional.one_hot(labels, 3)
    expected = (three.softmax(-1) - truth).square().sum(-1).mean(-1)
    torch.testing.assert_close(brier_score(three, labels), expected)
    assert brier_score(torch.zeros(1, 150, dtype=torch.float64), positive[0]).item() == 0.25


def test_slope_and_intercept_agree_with_an_unpenalised_regression():
    logits, positive = beta_case(200, 4)
    logits = 30 * logits + torch.tensor([[0.0], [50.0], [-9.0], [1.0]], dtype=torch.float64)
    slope, intercept = calibration_line(logits, positive)
    for row in range(4):
        # the penalty is on the slope of standardised scores, and next to nothing
        scale = logits[row].std().item()
        model = LogisticRegression(C=1e10, tol=1e-12, solver="newton-cholesky")
        model.fit((logits[row] / scale)[:, None].numpy(), positive[row].numpy())
        assert slope[row].item() == pytest.approx(model.coef_[0, 0] / scale, rel=1e-5)
        assert intercept[row].item() == pytest.approx(model.intercept_[0], rel=1e-5, abs=1e-6)


def test_slope_of_right_sure_separated_and_constant_scores():
    logits, positive = beta_case(20_000, 1)
    slope, intercept = calibration_line(torch.cat([logits, 3 * logits]), positive)
    torch.testing.assert_close(slope, torch.tensor([1.0, 1 / 3], dtype=torch.float64), rtol=0.05, atol=0)
    assert intercept.abs().max().item() < 0.05
    positive = torch.arange(40) % 2 == 0
    separated = torch.where(positive, 1.0, -1.0).double()
    slope, intercept = calibration_line(torch.stack([separated, -separated, 0 * separated + 2]), positive)
    assert slope[:2].tolist() == [np.inf, -np.inf]
    assert slope[2].isnan()
    assert intercept.isnan().all()


def test_stated_takes_the_likelier_class():
    confidence, right = stated(torch.tensor([[-2.0, 2.0, 0.5]]), torch.tensor([False, False, True]))
    torch.testing.assert_close(confidence, torch.sigmoid(torch.tensor([[2.0, 2.0, 0.5]]).double()))
    assert right.tolist() == [[True, False, True]]
    three = torch.tensor([[[0.0, 1.0, 3.0], [2.0, 0.0, 0.0]]])
    confidence, right = stated(three, torch.tensor([2, 1]))
    torch.testing.assert_close(confidence, three.double().softmax(-1).amax(-1))
    assert right.tolist() == [[True, False]]


def test_reliability_rows_are_the_bins():
    logits, positive = beta_case(3000, 1)
    confidence, right = stated(logits, positive[0])
    table = reliability(confidence[0], right[0])
    assert table["rows"].sum() == 3000
    assert len(table) == 8  # the likelier class has 0.5 or more
    error = (table["rows"] * (table["confidence"] - table["frequency"]).abs()).sum() / 3000
    assert error == pytest.approx(calibration_error(confidence, right).item())
    assert ((table["low"] < table["frequency"]) & (table["frequency"] < table["high"])).mean() >= 0.75


def test_table_of_overconfident_probes_and_what_a_temperature_does():
    logits, positive = beta_case(1500, 1)
    test = torch.arange(1500) % 5 == torch.arange(5)[:, None]
    table = calibration_table(torch.cat([logits, 4 * logits]), positive[0], test)
    right, sure = table.to_dict("records")
    assert abs(right["ece_excess"]) < 0.015
    assert sure["ece_excess"] > 0.1
    assert sure["ece"] - sure["ece_floor"] == sure["ece_excess"]
    assert right["temperature"] == pytest.approx(1, abs=0.12)
    assert sure["temperature"] == pytest.approx(4 * right["temperature"])
    assert sure["ece_scaled"] == pytest.approx(right["ece_scaled"])
    assert sure["ece_scaled"] - sure["ece_floor_scaled"] < 0.015
    assert sure["slope"] == pytest.approx(right["slope"] / 4)
    assert sure["rms_calibration_error"] > 0.1 > 0.06 > right["rms_calibration_error"]
    three = torch.randn(2, 90, 3, generator=torch.Generator().manual_seed(0))
    table = calibration_table(three, torch.arange(90) % 3, torch.arange(90) % 3 == torch.arange(3)[:, None])
    assert table["slope"].isna().all()
    assert table["bits_scaled"].between(1.4, 1.8).all()


def test_table_takes_a_sweep():
    rng = np.random.default_rng(0)
    quick = {"groups": "rows", "permutations": 0, "bootstraps": 100, "progress": False, "folds": 3, "inner_folds": 2}
    codes = rng.permutation(np.arange(90) % 3)
    sites = {f"resid_post.{layer}": rng.normal(size=(90, 4)) + layer * np.eye(4)[codes] for layer in range(2)}
    for labels in (codes == 1, np.array(["a", "b", "c"])[codes]):
        result = sweep(sites, labels, **quick)
        table = calibration_table(result, bins=10)
        assert table["site"].tolist() == list(sites)
        expected = calibration_table(result.scores, result.truth, result.test, bins=10)
        pd.testing.assert_frame_equal(table.drop(columns="site"), expected)
        np.testing.assert_allclose(calibration_table(result)["ece"], result.table["ece"])
    with pytest.raises(ValueError, match="predicts numbers"):
        calibration_table(sweep(sites, rng.normal(size=90), **quick))
    with pytest.raises(ValueError, match="give the sweep alone"):
        calibration_table(result, result.truth)
    with pytest.raises(ValueError, match="Logits need their labels"):
        calibration_table(result.scores)


def test_bad_input_is_explained():
    half = torch.full((4,), 0.5, dtype=torch.float64)
    with pytest.raises(ValueError, match="bins=0"):
        calibration_error(half, half > 0, bins=0)
    with pytest.raises(ValueError, match="Confidences are probabilities"):
        calibration_error(half + 1, half > 0)
    with pytest.raises(ValueError, match="1 of the scores are NaN"):
        calibration_floor(torch.tensor([0.5, float("nan")], dtype=torch.float64))
    with pytest.raises(ValueError, match="draws=0"):
        calibration_floor(half, draws=0)
    with pytest.raises(ValueError, match="one class"):
        calibration_line(half, half > 0)

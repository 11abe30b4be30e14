"""ccs_report: the truth where it is, chance where it is not, and what random directions get for nothing."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from microtome.probes.ccs_report import ccs_report, linear_scores

QUICK = {"folds": 3, "restarts": 3, "steps": 200, "learning_rate": 0.02}


def pairs(n_pairs: int = 240, width: int = 10, seed: int = 0) -> tuple[dict, dict, np.ndarray]:
    """Head 0 holds the truth along one direction, head 1 nothing."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, 2, n_pairs)
    direction = 2.5 * rng.normal(size=width) / np.sqrt(width)
    topic = rng.normal(size=(n_pairs, 2, width))
    sides = []
    for sign in (1, -1):
        side = topic + 0.5 * rng.normal(size=(n_pairs, 2, width)) + 3 * sign
        side[:, 0] += sign * (2 * truth[:, None] - 1) * direction
        sides.append({"z.0": side.astype(np.float32)})
    return (*sides, truth)


def test_truth_is_told_from_nothing() -> None:
    ours, theirs, truth = pairs()
    table = ccs_report(ours, theirs, truth, groups="rows", **QUICK)
    assert table["site"].tolist() == ["z.0.0", "z.0.1"]
    holds, empty = table.to_dict("records")
    for finder in ("ccs", "pca"):
        assert holds[f"{finder}_accuracy"] > 0.9
        assert holds[f"{finder}_auroc"] > 0.95
        assert abs(empty[f"{finder}_auroc"] - 0.5) < 0.12
    assert holds["random_auroc"] < holds["random_auroc_high"] <= 1
    assert 0.55 < holds["random_accuracy"] < holds["ccs_accuracy"]
    assert abs(empty["random_accuracy"] - 0.5) < 0.06


def test_linear_scores_are_the_projections_and_a_test_pair_moves_no_other() -> None:
    ours, theirs, truth = pairs(n_pairs=60)
    differences = torch.from_numpy(ours["z.0"] - theirs["z.0"]).double().transpose(0, 1)
    positive, test = torch.from_numpy(truth == 1), torch.arange(60) % 3 == torch.arange(3)[:, None]
    drawn = torch.eye(10, dtype=torch.float64)[:, :4]
    pca, random = linear_scores(differences, drawn, positive, test)
    for rows in test:
        train, held = differences[0, ~rows].numpy(), differences[0, rows].numpy()
        expected = PCA(1).fit(train).transform(held)[:, 0]
        np.testing.assert_allclose(pca[0, rows].abs(), np.abs(expected), atol=1e-9)
        np.testing.assert_allclose(random[0, 2, rows].abs(), np.abs(held[:, 2] - train[:, 2].mean()), atol=1e-9)
    spoiled = differences.clone()
    row = int(test[1].nonzero()[4])
    spoiled[:, row] = 1e9
    others = test[1].clone()
    others[row] = False
    for before, after in zip((pca, random), linear_scores(spoiled, drawn, positive, test), strict=True):
        torch.testing.assert_close(before[..., others], after[..., others], atol=0, rtol=0)


def test_bad_input_says_what_to_do() -> None:
    ours, theirs, truth = pairs()
    with pytest.raises(ValueError, match="The sides differ in sites"):
        ccs_report(ours, {"z.1": theirs["z.0"]}, truth, groups="rows", **QUICK)
    with pytest.raises(ValueError, match="The sides differ in sites"):
        ccs_report(ours, {"z.0": theirs["z.0"][1:]}, truth, groups="rows", **QUICK)
    with pytest.raises(ValueError, match="holds 1 different value"):
        ccs_report(ours, theirs, truth * 0, groups="rows", **QUICK)

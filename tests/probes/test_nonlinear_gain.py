"""nonlinear_gain: where a network reads more, where it only memorises, and what is the same for both probes."""

import numpy as np
import pandas as pd
import pytest
import torch

from microtome.capture.activations import Activations
from microtome.probes.mlp_networks import MlpSettings
from microtome.probes.nonlinear_gain import nonlinear_gain

QUICK = MlpSettings(epochs=15, learning_rate=0.02)
LIGHT = {"folds": 3, "inner_folds": 2, "bootstraps": 200, "progress": False, "settings": QUICK}


def planted(n_rows: int = 360, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Heads: one with an XOR, one with a linear signal, two of noise."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 2, n_rows)
    heads = rng.normal(size=(n_rows, 4, 6)).astype(np.float32)
    agree = np.where(label == 1, 1, -1)
    heads[:, 0, 1] = np.sign(heads[:, 0, 0]) * agree * np.abs(heads[:, 0, 1])
    heads[:, 1, 2] += agree
    return {"z.0": heads}, label


def test_a_gain_is_found_where_it_is_and_nowhere_else() -> None:
    arrays, label = planted()
    found = nonlinear_gain(arrays, label, groups="rows", **LIGHT)
    table = found.table
    assert table["site"].tolist() == ["z.0.0", "z.0.1", "z.0.2", "z.0.3"]
    xor, linear, *noise = table.to_dict("records")
    assert xor["linear_auroc"] < 0.65 < 0.85 < xor["mlp_auroc"]
    assert xor["gain"] == pytest.approx(xor["mlp_auroc"] - xor["linear_auroc"])
    assert xor["gain_low"] > 0.1
    assert xor["p_gain_best_site"] == pytest.approx(1 / 1000)
    assert linear["linear_auroc"] > 0.85
    for site in (linear, *noise):
        assert site["p_gain_best_site"] > 0.05
        assert site["gain_low"] < 0.02
    assert abs(xor["mlp_control_auroc"] - 0.5) < 0.12
    assert xor["mlp_selectivity"] == pytest.approx(xor["mlp_auroc"] - xor["mlp_control_auroc"])
    assert found.strongest(1)["site"].item() == "z.0.0"
    assert (table["epochs"] <= 15).all()
    shown = f"NonlinearGain(4 sites, best gain z.0.0 +{xor['gain']:.3f} [{xor['gain_low']:.3f}, {xor['gain_high']:.3f}]"
    assert repr(found) == f"{shown}, p 0.001)"
    assert "<td>z.0.0</td>" in found._repr_html_()


def test_a_network_remembers_more_of_a_control_task() -> None:
    rng = np.random.default_rng(1)
    types = rng.integers(0, 24, 480)
    code = rng.normal(size=(24, 4))
    features = (code[types] + 0.05 * rng.normal(size=(480, 4))).astype(np.float32)
    label = (features[:, 0] > 0).astype(int)
    found = nonlinear_gain({"words": features}, label, groups="rows", types=types, permutations=0, **LIGHT)
    site = found.table.iloc[0]
    assert found.type_coverage == 1
    assert site["mlp_type_auroc"] > site["linear_type_auroc"] + 0.05
    assert site["mlp_type_selectivity"] < site["linear_type_selectivity"]
    assert np.isnan(site["p_gain_best_site"])
    # within a type the control labels say nothing more: shuffled labels are at chance
    assert abs(site["mlp_control_auroc"] - 0.5) < 0.12


def test_test_rows_change_no_other_score() -> None:
    arrays, label = planted(120)
    first = nonlinear_gain(arrays, label, groups="rows", **LIGHT)
    fold = first.test[0]
    spoiled = {"z.0": arrays["z.0"].copy()}
    row = int(fold.nonzero()[0, 0])
    spoiled["z.0"][row] = 1e9
    again = nonlinear_gain(spoiled, label, groups="rows", **LIGHT)
    others = fold.clone()
    others[row] = False
    for before, after in ((first.linear_scores, again.linear_scores), (first.mlp_scores, again.mlp_scores)):
        torch.testing.assert_close(before[:, :, others], after[:, :, others], atol=0, rtol=0)


def per_token() -> tuple[Activations, np.ndarray]:
    """Texts of 1 to 4 tokens; what tells the label lies in the last token."""
    rng = np.random.default_rng(2)
    length = rng.integers(1, 5, 150)
    text = np.repeat(np.arange(150), length)
    label = rng.integers(0, 2, 150)
    position = np.concatenate([np.arange(n) for n in length])
    features = rng.normal(size=(len(text), 5)).astype(np.float32)
    is_last = position == length[text] - 1
    features[is_last, 0] += 3 * label[text[is_last]]
    rows = pd.DataFrame({"text": text, "position": position, "label": label[text]})
    return Activations.from_arrays({"words": features, "others": features}, rows=rows), label


def test_both_probes_get_the_same_pooled_rows() -> None:
    tokens, label = per_token()
    found = nonlinear_gain(tokens, "label", groups="text", sites=["words"], pool="last", **LIGHT)
    assert found.table["site"].tolist() == ["words"]
    np.testing.assert_array_equal(found.labellings[0], label == 1)
    assert found.table["linear_auroc"].item() > 0.9
    two = nonlinear_gain(tokens, "label", groups="text", sites=["words"], pool=2, permutations=0, **LIGHT)
    assert 0.7 < two.table["linear_auroc"].item() < found.table["linear_auroc"].item()
    assert two.linear_scores.shape == two.mlp_scores.shape == (1, 2, 150)


def test_bad_input_says_what_to_do() -> None:
    tokens, _ = per_token()
    mixed = np.arange(tokens.n_rows) % 2
    with pytest.raises(ValueError, match="labels differ among the rows of text"):
        nonlinear_gain(tokens, mixed, groups="text", pool=2, **LIGHT)
    with pytest.raises(ValueError, match="labels has 3 entries"):
        nonlinear_gain(tokens, [0, 1, 0], groups="text", pool=2, **LIGHT)
    with pytest.raises(KeyError, match="types='word' is no column"):
        nonlinear_gain(tokens, "label", groups="text", types="word", **LIGHT)
    arrays, label = planted(60)
    with pytest.raises(ValueError, match="holds 3 different values"):
        nonlinear_gain(arrays, np.arange(60) % 3, groups="rows", **LIGHT)
    with pytest.raises(ValueError, match="cannot fill 3 folds"):
        nonlinear_gain(arrays, label, groups=np.arange(60) % 2, **LIGHT)

"""Sign patterns and codes: bits against brute force, neighbours against scikit-learn, folds that keep groups whole."""

import sys

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from microtome.capture.activations import Activations
from microtome.probes.sign_patterns import (
    _vote,
    code_neighbours,
    code_redundancy,
    hamming_neighbours,
    packed_codes,
    sign_patterns,
)


def acts(rows: int = 60, units: int = 37, seed: int = 0, signal: float = 0.0) -> Activations:
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(rows) % 2)
    x = rng.normal(size=(rows, units)) + signal * y[:, None]
    heads = rng.normal(size=(rows, 2, 5))
    return Activations.from_arrays({"mlp_act.3": x, "z.1": heads}, labels=y, groups=np.arange(rows) // 2)


def test_bits_say_what_is_above_the_threshold() -> None:
    plain = acts()
    signs = sign_patterns(plain)
    assert signs["mlp_act.3"].dtype == torch.float32
    assert torch.equal(signs["mlp_act.3"] == 1, plain["mlp_act.3"] > 0)
    assert set(signs["z.1"].unique().tolist()) == {-1.0, 1.0}
    assert signs["z.1"].shape == (60, 2, 5)
    high = torch.linspace(-1, 1, 37)
    shifted = sign_patterns(plain, ["mlp_act.3"], threshold={"mlp_act.3": high})
    assert torch.equal(shifted["mlp_act.3"] == 1, plain["mlp_act.3"] > high)
    packed = packed_codes(plain)
    assert packed.shape == (60, 6)  # 47 bits
    bits = np.unpackbits(packed, axis=1)
    both = np.concatenate([plain["mlp_act.3"].numpy(), plain["z.1"].flatten(1).numpy()], axis=1)
    np.testing.assert_array_equal(bits[:, :47], both > 0)
    assert (bits[:, 47:] == 0).all()
    np.testing.assert_array_equal(packed_codes(signs), packed)


@pytest.mark.parametrize("act", [torch.relu, torch.nn.functional.gelu, torch.nn.functional.silu])
def test_activations_are_above_zero_where_pre_activations_are(act) -> None:
    h = torch.linspace(-4, 4, 1001)
    assert torch.equal(act(h) > 0, h > 0)


def test_redundancy_counts_rows_whose_code_was_there_before() -> None:
    codes = np.array([[1, 2], [1, 2], [2, 1], [1, 2], [0, 0]], dtype=np.uint8)
    assert code_redundancy(codes) == pytest.approx(2 / 5)
    assert code_redundancy(codes[[0, 2, 4]]) == 0


@pytest.mark.parametrize("at_once", [1, 2**22])
def test_neighbours_are_those_of_brute_force(monkeypatch, at_once: int) -> None:
    monkeypatch.setattr(sys.modules["microtome.probes.sign_patterns"], "_DISTANCES_AT_ONCE", at_once)
    codes = packed_codes(acts(), ["mlp_act.3"])
    bits = np.unpackbits(codes, axis=1)
    index, distance = hamming_neighbours(codes[:10], codes[10:], 9)
    wanted = (bits[:10, None] != bits[None, 10:]).sum(axis=2)
    np.testing.assert_array_equal(distance, np.sort(wanted, axis=1)[:, :9])
    np.testing.assert_array_equal(np.take_along_axis(wanted, index, axis=1), distance)
    for row in range(10):  # of equal distances the earlier row comes first
        assert index[row].tolist() == np.lexsort((np.arange(50), wanted[row]))[:9].tolist()


def test_votes_are_those_of_scikit_learn() -> None:
    plain = acts(rows=80, signal=0.3)
    x, y = plain["mlp_act.3"].numpy() > 0, plain.rows["label"].to_numpy()
    codes = packed_codes(plain, ["mlp_act.3"])
    # an even number of units would tie less; distances tie often, so compare only where the 9th and 10th differ
    index, distance = hamming_neighbours(codes[:20], codes[20:], 10)
    is_clear = distance[:, 8] < distance[:, 9]
    assert is_clear.sum() >= 3
    other = KNeighborsClassifier(9, metric="hamming", algorithm="brute").fit(x[20:], y[20:]).predict(x[:20])
    np.testing.assert_array_equal(_vote(y[20:][index[:, :9]], 2)[is_clear], other[is_clear])


def test_of_equal_votes_the_nearer_class_wins() -> None:
    assert _vote(np.array([[2, 0, 2, 0], [0, 2, 2, 0], [1, 1, 2, 0]]), 3).tolist() == [2, 0, 1]


def test_a_class_is_told_by_its_codes_out_of_fold() -> None:
    found = code_neighbours(acts(rows=120, signal=1.0), "label", groups="group")
    table = found.table.set_index("site")
    assert table.loc["mlp_act.3", "accuracy"] > 0.9
    assert 0.3 < table.loc["z.1", "accuracy"] < 0.7
    assert table.loc["mlp_act.3", "n_units"] == 37
    assert table.loc["z.1", "redundancy"] < 0.2
    assert found.classes == (0, 1)


def test_a_twin_in_the_same_group_never_votes() -> None:
    """Each code occurs twice with one label; twins share a group. A split of rows would score near 1."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(100, 64)), rng.integers(0, 2, 100)
    x, y, group = np.repeat(x, 2, axis=0), np.repeat(y, 2), np.repeat(np.arange(100), 2)
    twins = Activations.from_arrays({"eeg.0": x}, labels=y, groups=group)
    assert code_neighbours(twins, "label", groups="rows", k=1).table["accuracy"][0] > 0.7
    assert code_neighbours(twins, "label", groups="group", k=1).table["accuracy"][0] < 0.62
    found = code_neighbours(twins, "label", groups="group")
    for held in found.test:
        assert not set(group[held]) & set(group[~held])
    changed = x.copy()
    changed[found.test[0]] *= -1e9  # rows of a test fold vote in no prediction of that fold's other rows
    one = np.flatnonzero(found.test[0])[0]
    changed[one] = x[one]
    again = code_neighbours(
        Activations.from_arrays({"eeg.0": changed}, labels=y, groups=group), "label", groups="group"
    )
    (site,) = found.predicted
    assert again.predicted[site][one] == found.predicted[site][one]


def test_bad_input_says_what_to_do() -> None:
    plain = acts()
    codes = packed_codes(plain)
    with pytest.raises(ValueError, match=r"threshold of mlp_act\.3 has shape \[4\]"):
        sign_patterns(plain, ["mlp_act.3"], threshold={"mlp_act.3": torch.zeros(4)})
    with pytest.raises(KeyError, match=r"threshold has none for z\.1"):
        sign_patterns(plain, threshold={"mlp_act.3": 0.0})
    with pytest.raises(ValueError, match="codes has no rows"):
        code_redundancy(codes[:0])
    with pytest.raises(ValueError, match="queries have 5 bytes, references 6"):
        hamming_neighbours(codes[:, :5].copy(), codes)
    with pytest.raises(ValueError, match="k=9 neighbours of 4 references"):
        hamming_neighbours(codes, codes[:4])
    with pytest.raises(ValueError, match="one class only"):
        code_neighbours(plain, np.ones(60), groups="group")
    with pytest.raises(ValueError, match="labels has 3 entries for 60 rows"):
        code_neighbours(plain, np.array([0, 1, 0]), groups="group")
    with pytest.raises(ValueError, match="label of row 1 is missing"):
        code_neighbours(plain, pd.Series([1.0, np.nan] * 30), groups="group")
    with pytest.raises(KeyError):
        code_neighbours(plain, "label", groups="group", sites=["mlp_act.4"])


def test_a_threshold_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="is NaN"):
        sign_patterns(Activations.from_arrays({"a": np.ones((3, 2))}), threshold=float("nan"))

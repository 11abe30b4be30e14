"""Curves of gain against side effect: interpolation by hand, paired intervals, choice under a limit."""

import numpy as np
import pandas as pd
import pytest

from microtome.interventions.evaluation_record import EvaluationRecord
from microtome.interventions.trade_off import best_within, compare_at, gain_at, trade_off_table

N = 50


def record(name: str, kl: float, target: np.ndarray | float) -> EvaluationRecord:
    """A record of so much KL and such targets."""
    n = len(target) if isinstance(target, np.ndarray) else N
    texts = pd.DataFrame({"text": range(n), "completion": "a b", "target": np.broadcast_to(target, n)})
    for column in ("nll", "tokens_read", "nll_whole", "tokens_whole", "tokens", "effort", "relative"):
        texts[column] = 1.0
    texts = texts.assign(repetition=0.0, empty=False)
    neutral = pd.DataFrame({"text": [0, 1], "kl": kl, "clean_nll": 1.0, "edited_nll": 1.0, "rows": 5, "targets": 4})
    return EvaluationRecord(name, {}, ("target",), texts, neutral, pd.DataFrame())


BASE = record("base", 0.0, 1.0)
CURVE = [record("strong", 0.4, 4.0), record("weak", 0.1, 2.0)]  # gains of 3 and 1, not in order


@pytest.mark.parametrize(
    ("limit", "gain"), [(0.0, 0.0), (0.05, 0.5), (0.1, 1.0), (0.25, 2.0), (0.4, 3.0), (0.41, np.nan)]
)
def test_gain_is_interpolated_through_the_unsteered_model(limit, gain):
    found = gain_at(CURVE, BASE, "target", limit, np.ones((2, N)))
    assert found.tolist() == pytest.approx([gain, gain], nan_ok=True)


def test_draws_of_prompts_are_weights():
    gains = np.arange(N, dtype=float)
    curve = [record("one", 1.0, 1.0 + gains)]
    counts = np.random.default_rng(0).multinomial(N, np.full(N, 1 / N), size=7).astype(float)
    assert gain_at(curve, BASE, "target", 0.5, counts) == pytest.approx(counts @ gains / N / 2)


def test_prompts_without_a_target_are_left_out():
    held = np.where(np.arange(N) < 10, 3.0, np.nan)
    assert gain_at([record("one", 1.0, held)], BASE, "target", 1.0, np.ones((1, N)))[0] == 2
    never = gain_at([record("one", 1.0, np.full(N, np.nan))], BASE, "target", 1.0, np.ones((1, N)))
    assert np.isnan(never[0])


def test_a_broken_model_is_no_point_of_the_curve():
    for place in range(3):
        curve = list(CURVE)
        curve.insert(place, record("broken", np.nan, 100.0))
        assert gain_at(curve, BASE, "target", 0.25, np.ones((1, N)))[0] == pytest.approx(2)
    assert best_within([record("broken", np.nan, 100.0), *CURVE], "target", 0.2).name == "weak"


def test_methods_are_compared_pair_by_pair():
    """Prompts differ far more than methods do: the paired difference is exact, the gains are not."""
    spread = 10 * np.random.default_rng(0).normal(size=N)
    base = record("base", 0.0, np.zeros(N))
    curves = {
        "a": [record("a", 1.0, spread)],
        "b": [record("b", 2.0, 2 * spread + 1.0)],
        "short": [record("s", 0.1, spread)],
    }
    table = compare_at(curves, base, "target", 1.0, reference="a").set_index("method")
    assert table.loc["b", ["difference", "difference_low", "difference_high"]].tolist() == pytest.approx([0.5] * 3)
    assert table.loc["a", ["difference", "difference_low", "difference_high"]].tolist() == [0, 0, 0]
    assert table.loc["a", "gain"] == pytest.approx(spread.mean())
    width = table.loc["a", "gain_high"] - table.loc["a", "gain_low"]
    assert width == pytest.approx(2 * 1.96 * spread.std() / np.sqrt(N), rel=0.1)
    assert table.loc["short"].isna().all()
    assert "difference" not in compare_at(curves, base, "target", 1.0)


def test_the_table_has_paired_gains():
    values = np.random.default_rng(0).normal(size=N)
    base, up = record("base", 0.0, values), record("up", 0.1, values + 0.25)
    table = trade_off_table([up, base], base).set_index("condition")
    assert table.index.tolist() == ["base", "up"]
    found = table[["target_gain", "target_gain_low", "target_gain_high"]]
    assert found.loc["base"].tolist() == [0, 0, 0]
    assert found.loc["up"].tolist() == pytest.approx([0.25] * 3)


def test_the_best_within_a_limit():
    records = [*CURVE, record("unknown", 0.01, np.full(N, np.nan)), record("down", 0.02, 0.0)]
    assert best_within(records, "target", 0.2).name == "weak"
    assert best_within(records, "target", 0.02).name == "down"
    assert best_within(records, "target", 1.0).name == "strong"
    with pytest.raises(ValueError, match=r"None of 2 conditions .* weak comes nearest with 0.1"):
        best_within(CURVE, "target", 0.05)
    with pytest.raises(ValueError, match="None of 0 conditions"):
        best_within([], "target", 0.05)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(KeyError, match="no method here"):
        compare_at({"a": CURVE}, BASE, "target", 0.1, reference="b")
    with pytest.raises(ValueError, match="0 or more"):
        compare_at({"a": CURVE}, BASE, "target", float("nan"))
    other = record("other", 0.1, np.zeros(N - 1))
    for call in (lambda: trade_off_table([other], BASE), lambda: compare_at({"a": [other]}, BASE, "target", 0.1)):
        with pytest.raises(ValueError, match="other has 49 prompts, base 50"):
            call()

"""Dose-response and trade-off figures: what the tables hold is what is drawn, and tables that lack something."""

import numpy as np
import pandas as pd
import pytest

from microtome.figures import dose_response, trade_off_curves


@pytest.fixture
def table() -> pd.DataFrame:
    rows = [("unsteered", None, np.nan, 0.0, 0.0, False)]
    rows += [("a", "a", s, 0.1 * s, s / 2, False) for s in (1.0, 2.0)]
    rows += [("b", "b", s, 0.2 * s, s / 3, False) for s in (2.0, 1.0)]
    rows += [("random", "random", 2.0, 0.3, 0.01, True), ("far", "far", 2.0, 9.0, 1.0, True)]
    found = pd.DataFrame(rows, columns=["condition", "method", "strength", "kl", "word_odds_gain", "control"])
    for name in ("kl", "word_odds_gain"):
        found[f"{name}_low"], found[f"{name}_high"] = found[name] - 0.1, found[name] + 0.1
    return found


def test_each_method_is_a_line_from_the_unsteered_model(table) -> None:
    figure = trade_off_curves(table, "word_odds_gain", limit=0.25)
    named = {trace.name: trace for trace in figure.data}
    assert list(named) == ["controls", "a", "b"]
    assert list(named["b"].x) == [0.0, 0.2, 0.4]
    assert list(named["b"].y) == pytest.approx([0.0, 1 / 3, 2 / 3])
    assert list(named["a"].error_y.array) == pytest.approx([0.1] * 3)
    assert figure.layout.title.text.startswith("Gain in log odds")
    # a control that costs more than the lines stands at the edge, and tells its own place
    assert list(named["controls"].customdata) == [0.3, 9.0]
    assert list(named["controls"].x) == pytest.approx([0.3, 0.44])
    assert list(named["controls"].marker.symbol) == ["x-thin", "triangle-right"]


def test_doses_have_a_panel_for_each_target_and_the_side_effect(table) -> None:
    own = table[~table["control"]]
    figure = dose_response(own, ["word_odds_gain"], limit=0.25)
    titles = [axis.title.text for axis in figure.select_yaxes()]
    assert titles == ["gain in log odds of words", "KL, nats"]
    lines = [trace for trace in figure.data if trace.mode == "lines+markers"]
    assert [trace.name for trace in lines] == ["a", "b", "a", "b"]
    assert list(lines[1].x) == [0.0, 1.0, 2.0]
    assert list(lines[3].y) == pytest.approx([0.0, 0.2, 0.4])
    plain = dose_response(own.drop(columns="method"), ["word_odds_gain"])
    assert len([trace for trace in plain.data if trace.mode == "lines+markers"]) == 2


def test_tables_that_lack_something_are_refused(table) -> None:
    with pytest.raises(KeyError, match="no column"):
        dose_response(table.drop(columns="kl"), ["word_odds_gain"])
    with pytest.raises(KeyError, match="no column"):
        trade_off_curves(table, "nothing")
    with pytest.raises(ValueError, match="nothing to draw"):
        trade_off_curves(table[table["control"]], "word_odds_gain")
    with pytest.raises(ValueError, match="one to four"):
        dose_response(table, [])

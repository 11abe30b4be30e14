import pandas as pd
import pytest
from microtome.figures.lens_curves import lens_curves


@pytest.fixture
def table() -> pd.DataFrame:
    rows = [
        (lens, depth, 4.0 - depth, 3.5 - depth, 4.5 - depth, 5.0 - depth, depth / 4)
        for lens in ("logit", "tuned <1>")
        for depth in (3, 0, 1, 2)
    ]
    return pd.DataFrame(rows, columns=["lens", "depth", "kl", "kl_low", "kl_high", "cross_entropy", "agrees"])


def test_a_line_and_a_band_for_each_lens(table):
    figure = lens_curves(table)
    lines = [trace for trace in figure.data if trace.mode == "lines+markers"]
    bands = [trace for trace in figure.data if trace.fill == "toself"]
    assert [trace.name for trace in lines] == ["logit lens", "tuned &lt;1&gt; lens"]
    assert list(lines[0].x) == [0, 1, 2, 3]
    assert list(lines[0].y) == [4.0, 3.0, 2.0, 1.0]
    assert list(bands[0].y) == [4.5, 3.5, 2.5, 1.5, 0.5, 1.5, 2.5, 3.5]
    assert "[3.5, 4.5]" in lines[0].hovertext[0]


def test_values_without_interval_have_no_band(table):
    assert len(lens_curves(table, value="agrees").data) == 2
    assert lens_curves(table, log=True).layout.yaxis.type == "log"
    assert len(lens_curves(table, value="cross_entropy").layout.shapes) == 1


def test_what_cannot_be_drawn_is_refused(table):
    with pytest.raises(ValueError, match="value is 'mood'"):
        lens_curves(table, value="mood")
    with pytest.raises(KeyError, match="entropy"):
        lens_curves(table, value="entropy")
    with pytest.raises(ValueError, match="0 lenses"):
        lens_curves(table[:0])

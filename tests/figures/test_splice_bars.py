import numpy as np
import pandas as pd
import pytest

from microtome.figures.splice_bars import splice_bars

CONDITIONS = ("clean", "operator", "identity", "zero", "rank <8>")


@pytest.fixture
def table() -> pd.DataFrame:
    rows = []
    for factor, positions in enumerate(("1", "5", "all"), 1):
        for place, condition in enumerate(CONDITIONS):
            kl, perplexity = 0.1 * factor * place, 10.0 * factor * 2.0**place
            rows.append((positions, condition, kl, kl * 0.9, kl * 1.2, perplexity, perplexity * 0.5, perplexity * 3))
    columns = ["positions", "condition", "kl", "kl_low", "kl_high", "perplexity", "perplexity_low", "perplexity_high"]
    return pd.DataFrame(rows, columns=columns).assign(source="resid_post.5", target="resid_post.6", route="same")


def test_a_point_and_an_interval_for_each_condition_and_number(table):
    figure = splice_bars(table)
    assert [trace.name for trace in figure.data] == ["1", "5", "all"]
    assert list(figure.layout.yaxis.ticktext) == ["operator", "source, copied", "zero", "rank &lt;8&gt;"]
    assert figure.layout.title.text == "resid_post.5 written over resid_post.6"
    for number, trace in enumerate(figure.data, 1):
        assert list(trace.x) == [10.0 * number * 2.0**place for place in range(1, 5)]
        assert list(trace.error_x.array) == pytest.approx([2 * x for x in trace.x])
        assert list(trace.error_x.arrayminus) == pytest.approx([0.5 * x for x in trace.x])
    lanes = np.array([list(trace.y) for trace in figure.data])
    assert (np.round(lanes) == [[3, 2, 1, 0]] * 3).all()
    assert len(np.unique(lanes)) == lanes.size
    assert "[10, 60]" in figure.data[0].hovertext[0]
    assert sorted(line.x0 for line in figure.layout.shapes) == [10, 20, 30]


def test_a_logarithmic_axis_holds_every_interval_and_bars_start_at_zero(table):
    axis = splice_bars(table).layout.xaxis
    assert axis.type == "log"
    assert axis.range[0] < np.log10(10)
    assert axis.range[1] > np.log10(30 * 16 * 3)
    bars = splice_bars(table, value="kl", log=False)
    assert {trace.type for trace in bars.data} == {"bar"}
    assert bars.layout.xaxis.rangemode == "tozero"
    assert not bars.layout.shapes


def test_what_has_no_number_is_left_out(table):
    table.loc[table["positions"] == "all", "kl"] = np.nan
    table.loc[table["condition"] == "operator", "kl"] = 0.0
    figure = splice_bars(table, value="kl")
    assert [trace.name for trace in figure.data] == ["1", "5"]
    assert list(figure.layout.yaxis.ticktext) == ["source, copied", "zero", "rank &lt;8&gt;"]
    assert len(splice_bars(table.drop(columns=["kl_low", "kl_high"]), value="kl").data) == 2


def test_what_cannot_be_drawn_is_refused(table):
    with pytest.raises(ValueError, match="value is 'mood'"):
        splice_bars(table, value="mood")
    with pytest.raises(KeyError, match="kl_later"):
        splice_bars(table, value="kl_later")
    with pytest.raises(ValueError, match="several operators"):
        splice_bars(pd.concat([table, table.assign(target="resid_post.7")]))
    with pytest.raises(ValueError, match="0 numbers of positions"):
        splice_bars(table[table["condition"] == "clean"])

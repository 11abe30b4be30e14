import pandas as pd
import pytest

from microtome.figures.growth_curve import growth_curve


@pytest.fixture
def table():
    rows = [(site, groups, 0.5 + groups / 500) for site in "abcde" for groups in (40, 10, 80)]
    table = pd.DataFrame(rows, columns=["site", "groups", "auroc"])
    return table.assign(auroc_low=table["auroc"] - 0.05, auroc_high=table["auroc"] + 0.02)


def test_lines_hold_the_tables_numbers(table):
    figure = growth_curve(table, sites=["b", "a"])
    assert [trace.name for trace in figure.data] == ["b", "a"]
    assert list(figure.data[0].x) == [10, 40, 80]
    assert list(figure.data[0].y) == [0.52, 0.58, 0.66]
    assert list(figure.data[0].error_y.array) == pytest.approx([0.02] * 3)
    assert list(figure.data[0].error_y.arrayminus) == pytest.approx([0.05] * 3)
    assert figure.layout.xaxis.type == "log"
    assert figure.layout.shapes[0].y0 == 0.5
    assert len(growth_curve(table).data) == 4
    assert growth_curve(table.drop(columns="auroc_low")).data[0].error_y.array is None


def test_errors(table):
    with pytest.raises(KeyError, match=r"no column \['groups'\]"):
        growth_curve(table.drop(columns="groups"))
    with pytest.raises(KeyError, match=r"no site \['z'\]"):
        growth_curve(table, sites=["z"])
    with pytest.raises(ValueError, match="one to 4"):
        growth_curve(table, sites=list("abcde"))

import numpy as np
import pandas as pd
import pytest

from microtome.figures.transfer_matrix import transfer_matrix

NAMES = ["tweets", "movie", "amazon", "nyt"]


def test_cells_hold_the_tables_numbers(transfer_table):
    figure = transfer_matrix(transfer_table)
    trace = figure.data[0]
    assert list(figure.layout.yaxis.ticktext) == NAMES
    assert list(figure.layout.xaxis.ticktext) == NAMES
    for row in transfer_table.itertuples():
        at = NAMES.index(row.train), NAMES.index(row.test)
        assert trace.z[at] == row.auroc
        assert trace.text[at[0]][at[1]] == f"{row.auroc:.2f}"
        expected = f"{row.train} → {row.test}<br>AUROC {row.auroc:.3f} [{row.auroc_low:.3f}, {row.auroc_high:.3f}]"
        assert trace.hovertext[at[0]][at[1]] == expected
    axis = figure.layout.coloraxis
    assert (axis.cmin + axis.cmax) / 2 == pytest.approx(0.5)


def test_pairs_within_a_domain_are_outlined(transfer_table):
    shapes = transfer_matrix(transfer_table[transfer_table["train"] != "nyt"]).layout.shapes
    assert sorted((shape.x0 + 0.5, shape.y0 + 0.5) for shape in shapes) == [(0, 0), (1, 1), (2, 2)]


def test_missing_pairs_are_gaps_and_names_are_plain_text():
    table = pd.DataFrame({"train": ["<b>a</b>", "2024"], "test": ["2024", "2024"], "accuracy": [0.5, 0.75]})
    figure = transfer_matrix(table, value="accuracy")
    assert list(figure.layout.yaxis.ticktext) == ["&lt;b&gt;a&lt;/b&gt;", "2024"]
    np.testing.assert_array_equal(figure.data[0].z, [[0.5], [0.75]])
    figure = transfer_matrix(table.assign(test=["x", "2024"]), value="accuracy")
    assert np.isnan(figure.data[0].z).tolist() == [[False, True], [True, False]]
    assert figure.data[0].text[0][1] == ""


def test_errors(transfer_table):
    with pytest.raises(KeyError, match=r"no column \['train'\]; it has \['test'"):
        transfer_matrix(transfer_table.drop(columns="train"))
    with pytest.raises(ValueError, match="has no rows"):
        transfer_matrix(transfer_table.iloc[:0])
    with pytest.raises(ValueError, match=r"the pair \('tweets', 'tweets'\) has several rows"):
        transfer_matrix(pd.concat([transfer_table, transfer_table.iloc[:1]]))

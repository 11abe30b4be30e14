import numpy as np
import pandas as pd
import pytest

from microtome.figures.layer_pairs import layer_pairs

SITES = ["resid_pre.0", "resid_post.0", "resid_post.1"]


@pytest.fixture
def table() -> pd.DataFrame:
    """Each depth with each deeper one, and with itself."""
    rows = [(a, b) for i, a in enumerate(SITES) for b in SITES[i:]]
    table = pd.DataFrame(rows, columns=["source", "target"])
    return table.assign(
        r2_vw=[1.0, 0.9, 0.5, 1.0, 0.8, 1.0], identity_r2_vw=[1.0, -40.0, 0.2, 1.0, 0.1, 1.0], strength=1e-3
    )


def test_cells_hold_the_tables_numbers(table):
    figure = layer_pairs(table)
    trace, layout = figure.data[0], figure.layout
    assert list(layout.yaxis.ticktext) == list(layout.xaxis.ticktext) == SITES
    np.testing.assert_array_equal(trace.z, [[1.0, 0.9, 0.5], [np.nan, 1.0, 0.8], [np.nan, np.nan, 1.0]])
    expected = "resid_pre.0 → resid_post.1<br>R2, variance-weighted 0.500<br>R2 of the identity 0.2<br>strength 0.001"
    assert trace.hovertext[0][2] == expected
    assert trace.hovertext[1][0] == ""
    assert (layout.coloraxis.cmin + layout.coloraxis.cmax) / 2 == pytest.approx(0)
    assert sorted((shape.x0 + 0.5, shape.y0 + 0.5) for shape in layout.shapes) == [(0, 0), (1, 1), (2, 2)]
    assert layout.yaxis.autorange == "reversed"
    assert layout.title.text == "R2, variance-weighted from depth to depth"


def test_far_below_the_floor_is_drawn_as_the_floor_and_told_in_full(table):
    figure = layer_pairs(table, value="identity_r2_vw")
    assert figure.data[0].z[0][1] == -1
    assert "R2 of the identity -40.000" in figure.data[0].hovertext[0][1]
    assert figure.layout.coloraxis.cmin == -2 + 1
    assert layer_pairs(table, value="identity_r2_vw", floor=None).data[0].z[0][1] == -40


def test_other_values_are_sequential_and_names_plain(table):
    figure = layer_pairs(table.assign(source=["<b>"] * 3 + SITES[:3], target=SITES * 2), value="strength", title="t")
    assert figure.layout.yaxis.ticktext[0] == "&lt;b&gt;"
    assert figure.layout.coloraxis.cmin is None
    assert figure.layout.title.text == "t"


def test_many_names_are_thinned():
    names = [f"resid_post.{i}" for i in range(40)]
    figure = layer_pairs(pd.DataFrame({"source": names, "target": names, "r2_vw": 1.0}))
    assert list(figure.layout.xaxis.ticktext) == names[::2]


def test_two_models_have_rows_and_columns_of_their_own():
    pairs = [(f"small/{a}", f"<large>/{b}") for a in SITES[:2] for b in SITES]
    table = pd.DataFrame(pairs, columns=["source", "target"]).assign(
        r2_vw=[0.9, 0.5, 0.1, 0.6, 0.8, 0.3], back_r2_vw=0.25, cka=0.5, cka_null=0.01
    )
    figure = layer_pairs(table)
    layout = figure.layout
    np.testing.assert_array_equal(figure.data[0].z, [[0.9, 0.5, 0.1], [0.6, 0.8, 0.3]])
    assert (layout.yaxis.title.text, layout.xaxis.title.text) == ("from small", "to &lt;large&gt;")
    assert list(layout.yaxis.ticktext) == SITES[:2]
    assert list(layout.xaxis.ticktext) == SITES
    assert not layout.shapes  # no site is on both sides
    told = "small/resid_post.0 → &lt;large&gt;/resid_pre.0<br>R2, variance-weighted 0.600"
    assert figure.data[0].hovertext[1][0].startswith(told + "<br>R2 back, variance-weighted 0.25")
    assert layer_pairs(table, value="cka").layout.title.text == "linear CKA from depth to depth"
    mixed = pd.concat([table, table.assign(source="other/resid_pre.0").iloc[:3]])
    assert list(layer_pairs(mixed).layout.yaxis.ticktext) == [f"small/{a}" for a in SITES[:2]] + ["other/resid_pre.0"]


def test_errors(table):
    with pytest.raises(KeyError, match=r"no column \['r2'\]"):
        layer_pairs(table, value="r2")
    with pytest.raises(ValueError, match="has no rows"):
        layer_pairs(table.iloc[:0])
    with pytest.raises(ValueError, match=r"'target' holds no numbers. Draw one of \['r2_vw'"):
        layer_pairs(table, value="target")
    with pytest.raises(ValueError, match=r"\('resid_pre.0', 'resid_pre.0'\) has several rows"):
        layer_pairs(pd.concat([table, table]))

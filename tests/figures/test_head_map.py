import numpy as np
import pytest

from microtome.figures.head_map import head_map


@pytest.mark.parametrize(("layers", "heads"), [(30, 9), (12, 12), (1, 1), (3, 4), (2, 40)])
def test_every_cell_is_the_heads_value(sweep_table, layers, heads):
    table = sweep_table(layers, heads)
    wide, tall = head_map(table).data[0], head_map(table, layers_on="y").data[0]
    assert wide.z.shape == (heads, layers)
    for row in table[table["kind"] == "z"].itertuples():
        assert wide.z[row.head, row.layer] == row.auroc
        assert f"L{row.layer}H{row.head}<" in wide.hovertext[row.head][row.layer]
    np.testing.assert_array_equal(tall.z, wide.z.T)
    assert tall.hovertext[layers - 1][0] == wide.hovertext[0][layers - 1]
    assert list(wide.x) == list(range(layers))
    assert list(wide.y) == list(range(heads))


def test_axes_have_names_whole_steps_and_head_0_on_top(sweep_table):
    layout = head_map(sweep_table(3, 4)).layout
    assert (layout.xaxis.title.text, layout.yaxis.title.text) == ("layer", "head")
    assert (layout.xaxis.dtick, layout.yaxis.dtick) == (1, 1)
    assert layout.yaxis.range == (3.5, -0.5)
    layout = head_map(sweep_table(3, 4), layers_on="y").layout
    assert (layout.xaxis.title.text, layout.yaxis.title.text) == ("head", "layer")
    assert head_map(sweep_table(30, 4)).layout.xaxis.dtick is None


def test_colours_are_centred_on_no_effect(sweep_table):
    table = sweep_table(6, 3)
    for value, middle in (("auroc", 0.5), ("selectivity", 0.0)):
        axis = head_map(table, value=value).layout.coloraxis
        assert (axis.cmin + axis.cmax) / 2 == pytest.approx(middle)
        heads = table.loc[table["kind"] == "z", value]
        assert max(axis.cmax - middle, middle - axis.cmin) == pytest.approx((heads - middle).abs().max())
    assert head_map(table, value="strength").layout.coloraxis.cmin is None


@pytest.mark.parametrize("layers_on", ["x", "y"])
def test_crosses_are_on_the_heads_that_do_not_stand_out(sweep_table, layers_on):
    table = sweep_table(10, 4)
    marks = head_map(table, layers_on=layers_on, significance=0.01).data[1]
    across, down = ("layer", "head") if layers_on == "x" else ("head", "layer")
    unproved = table[(table["kind"] == "z") & (table["p_best_site"] >= 0.01)]
    assert 0 < len(unproved) < 40
    assert set(zip(marks.x, marks.y, strict=True)) == set(zip(unproved[across], unproved[down], strict=True))
    assert marks.name == "does not beat the best-site null (p ≥ 0.01)"
    assert marks.showlegend
    assert not head_map(table.assign(p_best_site=0.0)).data[1].showlegend
    assert len(head_map(table.drop(columns="p_best_site")).data) == 1
    # a sweep without permutations
    assert len(head_map(table.assign(p_best_site=float("nan"))).data[1].x) == 0


def test_heads_that_were_not_swept_are_gaps(sweep_table):
    table = sweep_table(4, 3)
    trace = head_map(table[table["site"] != "z.2.1"]).data[0]
    assert np.argwhere(np.isnan(trace.z)).tolist() == [[1, 2]]
    assert trace.hovertext[1][2] == ""


def test_other_kinds_and_titles(sweep_table):
    figure = head_map(sweep_table(3, 2, kind="q"), kind="q", title="My <map>")
    assert figure.layout.title.text == "My <map>"
    assert head_map(sweep_table(3, 2), title="").layout.title.text == ""


def test_errors(sweep_table):
    with pytest.raises(ValueError, match=r"layers_on is 'up'. Give 'x' for a wide map"):
        head_map(sweep_table(3, 2), layers_on="up")
    with pytest.raises(ValueError, match="'resid_post' has rows without a head, so it has no map"):
        head_map(sweep_table(3, 2), kind="resid_post")


def test_the_table_is_left_as_it_was(sweep_table):
    table = sweep_table(3, 2)
    before = table.copy(deep=True)
    head_map(table)
    assert table.equals(before)

import numpy as np
import pytest

from microtome.figures.layer_curve import layer_curve


def named(figure, name):
    (trace,) = [trace for trace in figure.data if trace.name == name]
    return trace


def band_of(figure, colour):
    (trace,) = [trace for trace in figure.data if trace.fill == "toself" and trace.fillcolor.startswith(colour)]
    return trace


GREY, BLUE = "rgba(132,139,148", "rgba(47,127,193"


def test_line_band_and_control_are_the_tables(sweep_table):
    table = sweep_table(30, 9)
    rows = table[table["kind"] == "resid_post"]
    figure = layer_curve(table)
    line, control = named(figure, "residual stream"), named(figure, "shuffled labels")
    assert list(line.x) == list(range(30))
    np.testing.assert_array_equal(line.y, rows["auroc"])
    np.testing.assert_array_equal(control.y, rows["control_auroc"])
    for colour, name in ((BLUE, "auroc"), (GREY, "control_auroc")):
        band = band_of(figure, colour)
        assert list(band.x) == [*range(30), *range(29, -1, -1)]
        np.testing.assert_array_equal(band.y, [*rows[f"{name}_high"], *rows[f"{name}_low"][::-1]])
    assert line.hovertext[7].startswith("<b>L7</b>  AUROC")


def test_levels_lie_across_all_layers(sweep_table):
    figure = layer_curve(sweep_table(30, 9), best_site_null=0.585)
    for name, level in (("95 % of best-site null (0.585)", 0.585), ("chance (0.5)", 0.5)):
        trace = named(figure, name)
        assert list(trace.y) == [level, level]
        assert list(trace.x) == [-0.5, 29.5]
    assert not [trace for trace in layer_curve(sweep_table(3, 2)).data if "null" in (trace.name or "")]


def test_kinds_with_heads_show_the_best_of_each_layer(sweep_table):
    table = sweep_table(12, 5)
    line = named(layer_curve(table, kinds=("resid_post", "z")), "best of 5 heads")
    best = table[table["kind"] == "z"].groupby("layer")["auroc"].max()
    np.testing.assert_array_equal(line.y, best)


def test_other_values(sweep_table):
    table = sweep_table(4, 2)
    figure = layer_curve(table, value="selectivity")
    assert named(figure, "no effect (0)").y == (0.0, 0.0)
    assert figure.layout.yaxis.title.text == "selectivity"
    assert not [trace for trace in figure.data if trace.name == "shuffled labels"]
    assert {trace.name for trace in layer_curve(table, value="strength").data} == {"residual stream"}


def test_what_the_table_lacks_is_left_out(sweep_table):
    table = sweep_table(4, 2).drop(columns=["auroc_low", "control_auroc_high"])
    assert not [trace for trace in layer_curve(table).data if trace.fill == "toself"]
    table.loc[table["site"] == "resid_post.2", "auroc"] = np.nan
    assert list(named(layer_curve(table), "residual stream").x) == [0, 1, 3]


def test_steps_are_whole(sweep_table):
    assert layer_curve(sweep_table(3, 2)).layout.xaxis.dtick == 1
    assert layer_curve(sweep_table(13, 2)).layout.xaxis.dtick is None


def test_errors(sweep_table):
    for kinds in ((), ("z",) * 5):
        with pytest.raises(ValueError, match="Give one to 4 site kinds"):
            layer_curve(sweep_table(3, 2), kinds=kinds)
    with pytest.raises(ValueError, match="no rows of kind 'mlp_out'"):
        layer_curve(sweep_table(3, 2), kinds=("resid_post", "mlp_out"))

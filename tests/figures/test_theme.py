import pytest

from microtome.figures.theme import DARK, LIGHT, colour_layout, label_of, plain, symmetric_range


@pytest.mark.parametrize("values", [[0.9], [0.2, 0.6], [0.5], [], [float("nan"), 0.7], [0.1, 0.95]])
def test_ranges_are_centred_and_hold_the_values(values):
    low, high = symmetric_range(values, 0.5)
    assert low < high
    assert (low + high) / 2 == pytest.approx(0.5)
    assert all(low <= value <= high for value in values if value == value)


def test_effects_have_a_middle_and_other_columns_do_not():
    for name, middle in (("auroc", 0.5), ("accuracy", 0.5), ("selectivity", 0.0)):
        axis = colour_layout(name, [0.1, 0.8])["coloraxis"]
        assert (axis["cmin"] + axis["cmax"]) / 2 == pytest.approx(middle)
        assert axis["colorscale"] == "RdBu"
    assert "cmin" not in colour_layout("strength", [0.1, 10.0])["coloraxis"]


def test_markup_is_taken_from_text():
    assert plain("<b>x</b> & 'y'") == "&lt;b&gt;x&lt;/b&gt; &amp; 'y'"
    assert label_of("auroc") == "AUROC"
    assert label_of("my_<i>column") == "my &lt;i&gt;column"


def test_looks_differ_in_colour_alone():
    light, dark = LIGHT.layout.to_plotly_json(), DARK.layout.to_plotly_json()
    assert light["font"]["color"] != dark["font"]["color"]
    assert light["paper_bgcolor"] != dark["paper_bgcolor"]
    assert light["margin"] == dark["margin"]
    assert light["font"]["size"] == dark["font"]["size"]

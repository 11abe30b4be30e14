import pandas as pd
import pytest

from microtome.figures.origin_curves import origin_curves


@pytest.fixture
def table() -> pd.DataFrame:
    rows = [(name, depth, depth / 4, 0.25, 0.9, -9.0) for name in ("truth <b>", "tense") for depth in (2, 0, 1, 3)]
    columns = ["name", "depth", "carried_to_target", "made_at", "carried_from_previous", "identity_to_target"]
    return pd.DataFrame(rows, columns=columns)


def test_a_panel_for_each_direction(table):
    figure = origin_curves(table)
    assert [note.text for note in figure.layout.annotations] == ["truth &lt;b&gt;", "tense"]
    lines = {(trace.name, trace.xaxis): trace for trace in figure.data}
    carried = lines["carried from here to the target", "x"]
    assert list(carried.x) == [0, 1, 2, 3]
    assert list(carried.y) == [0, 0.25, 0.5, 0.75]
    low = lines["the target's, read off as it is", "x2"]
    assert list(low.y) == [-0.25] * 4
    assert "-9" in low.hovertext[0]
    assert len(figure.data) == 8


def test_a_band_where_there_are_controls(table):
    more = table.assign(carried_to_target_control_low=0.1, carried_to_target_control_high=0.2)
    assert len(origin_curves(more).data) == 10
    assert len(origin_curves(table.drop(columns="identity_to_target")).data) == 6


def test_what_cannot_be_drawn_is_refused(table):
    with pytest.raises(KeyError, match="made_at"):
        origin_curves(table.drop(columns="made_at"))
    with pytest.raises(ValueError, match="0 directions"):
        origin_curves(table[:0])
    with pytest.raises(ValueError, match="7 directions"):
        origin_curves(pd.concat([table[:1].assign(name=str(n)) for n in range(7)]))

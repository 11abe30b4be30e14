import pandas as pd
import pytest

from microtome.figures.carried_features import carried_features


@pytest.fixture
def table() -> pd.DataFrame:
    rows = [
        ("a", "b", 0.9, "carried", 0.05),
        ("a", "b", 0.91, "carried", 0.05),
        ("a", "b", 0.2, "made here", 0.05),
        ("a", "b", -7.0, "made here", 0.05),
        ("a", "c <b>", 0.5, "undecided", float("nan")),
    ]
    return pd.DataFrame(rows * 26, columns=["source", "target", "r2", "verdict", "null_bar"])


def test_a_panel_of_counts_for_each_pair(table):
    figure = carried_features(table)
    bars = {(trace.name, trace.xaxis): trace for trace in figure.data}
    assert len(bars) == 6
    assert sum(bars["carried", "x"].y) == 2 * 26
    assert sum(bars["made here", "x"].y) == 2 * 26
    assert bars["made here", "x"].y[0] == 26
    assert sum(bars["undecided", "x2"].y) == 26
    assert [note.text for note in figure.layout.annotations] == ["a → b", "a → c &lt;b&gt;"]
    assert [shape.x0 for shape in figure.layout.shapes] == [0.05]
    assert sum(trace.showlegend for trace in figure.data) == 3


def test_what_cannot_be_drawn_is_refused(table):
    with pytest.raises(KeyError, match="verdict"):
        carried_features(table.drop(columns="verdict"))
    with pytest.raises(ValueError, match="0 pairs"):
        carried_features(table[:0])
    many = pd.concat([table.assign(target=f"t{n}") for n in range(7)])
    with pytest.raises(ValueError, match="7 pairs"):
        carried_features(many)


def test_a_few_directions_are_points_with_intervals(table):
    few = table[:4].assign(name=["a", "b <i>", "c", "d"], r2_low=lambda rows: rows["r2"] - 0.1)
    figure = carried_features(few.assign(r2_high=few["r2"] + 0.2))
    made = next(trace for trace in figure.data if trace.name == "made here")
    assert list(made.y) == ["c", "d"]
    assert list(made.error_x.array) == pytest.approx([0.2, 0.2])
    assert list(next(trace for trace in figure.data if trace.name == "carried").y) == ["a", "b &lt;i&gt;"]

import pandas as pd
import pytest

from microtome.figures.reliability import reliability_curve


@pytest.fixture
def table():
    return pd.DataFrame(
        {
            "rows": [25, 100],
            "confidence": [0.9, 0.6],
            "frequency": [0.7, 0.62],
            "low": [0.8, 0.5],
            "high": [1.0, 0.7],
        }
    )


def test_points_hold_the_tables_numbers(table):
    figure = reliability_curve(table, note="ECE <0.1>")
    band, right, bins = figure.data
    assert list(band.x) == [0.6, 0.9, 0.9, 0.6]
    assert list(band.y) == [0.7, 1.0, 0.8, 0.5]
    assert list(right.x) == list(right.y) == [0.6, 1.0]
    assert list(bins.x) == [0.6, 0.9]
    assert list(bins.y) == [0.62, 0.7]
    assert list(bins.marker.size) == [24, 15]
    assert "ECE &lt;0.1&gt;" in figure.layout.title.text


def test_errors(table):
    with pytest.raises(KeyError, match=r"no column \['low'\]"):
        reliability_curve(table.drop(columns="low"))
    with pytest.raises(ValueError, match="has no rows"):
        reliability_curve(table.iloc[:0])

import pandas as pd
import pytest

from microtome.figures.transport_curves import distance_curves, efficiency_curves


@pytest.fixture
def ranks() -> pd.DataFrame:
    table = pd.DataFrame({"rank": [4, 1, 2], "score": [0.5, 0.1, 0.2], "ceiling": [0.6, 0.2, 0.3]})
    table["efficiency"] = table["score"] / table["ceiling"]
    return table.assign(truncated_score=-3.0, truncated_efficiency=[0.1, -9.0, 0.2], published_efficiency=0.4)


@pytest.fixture
def pairs() -> pd.DataFrame:
    rows = [
        (distance, 1 / distance - 0.1 * place, kind)
        for kind in ("with sinks", "without <sinks>")
        for distance in (1, 2, 3)
        for place in (0, 1)
    ]
    return pd.DataFrame(rows, columns=["distance", "r2_vw", "tokens"])


def test_ranks_in_order_with_low_values_at_the_floor_and_told_in_full(ranks):
    figure = efficiency_curves(ranks)
    lines = {(trace.name, trace.xaxis): trace for trace in figure.data}
    assert len(lines) == 6
    assert list(lines["reduced rank", "x"].x) == [1, 2, 4]
    assert list(lines["reduced rank", "x"].y) == [0.1, 0.2, 0.5]
    cut = lines["singular values cut off", "x2"]
    assert list(cut.y) == [-9.0, 0.2, 0.1]
    assert figure.layout.yaxis2.range[0] == pytest.approx(-0.5, abs=0.1)
    assert "-9" in cut.hovertext[0]
    assert [trace.name for trace in figure.data if trace.showlegend is not False] == [
        "ceiling, same rows",
        "reduced rank",
        "singular values cut off",
        "as published",
    ]


def test_means_of_each_distance(pairs):
    figure = distance_curves(pairs, values=("r2_vw",), by="tokens")
    assert [trace.name for trace in figure.data] == [
        "R2, variance-weighted, with sinks",
        "R2, variance-weighted, without &lt;sinks&gt;",
    ]
    assert list(figure.data[0].y) == pytest.approx([0.95, 0.45, 1 / 3 - 0.05])
    assert figure.data[0].line.dash != figure.data[1].line.dash
    assert "mean of 2 pairs" in figure.data[0].hovertext[0]
    one = distance_curves(pairs, values=("r2_vw",))
    assert [trace.fill for trace in one.data] == ["toself", None]


def test_what_cannot_be_drawn_is_refused(ranks, pairs):
    with pytest.raises(KeyError, match="ceiling"):
        efficiency_curves(ranks.drop(columns="ceiling"))
    with pytest.raises(ValueError, match="no rows"):
        efficiency_curves(ranks[:0])
    with pytest.raises(ValueError, match="'mood' is not drawn"):
        distance_curves(pairs, values=("mood",))
    with pytest.raises(KeyError, match="r2_ua"):
        distance_curves(pairs)
    with pytest.raises(ValueError, match="0 rows"):
        distance_curves(pairs[:0], values=("r2_vw",))

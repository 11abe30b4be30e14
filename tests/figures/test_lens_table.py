import numpy as np
import pandas as pd
import pytest
from microtome.figures.lens_table import lens_table


@pytest.fixture
def table() -> pd.DataFrame:
    rows = []
    for depth in range(4):
        for position in range(3):
            rank = max(0, (3 - depth) * 2 - position)
            word = ["<b>", "\n", " extraordinary", " Paris"][depth]
            rows.append((depth, position, f"t{position}", word, 0.5, [word, "x"], [0.5, 0.1], 3.0 - depth, 1.0, rank))
    names = ["depth", "position", "token", "word", "prob", "words", "probs", "kl", "entropy", "rank"]
    return pd.DataFrame(rows, columns=names)


def written(figure) -> dict[tuple[int, int], str]:
    return {(y, x): text for trace in figure.data[1:] for x, y, text in zip(trace.x, trace.y, trace.text, strict=True)}


def test_every_cell_has_its_word_and_the_way_of_the_final_word(table):
    cells = written(lens_table(table))
    assert len(cells) == 12
    assert cells[(0, 0)] == "· &lt;b&gt;"
    assert cells[(1, 0)] == "▲ ⏎" or cells[(1, 0)] == "▲ ␣"
    assert cells[(2, 0)] == "▲ _extraor…"
    assert cells[(3, 0)] == "● _Paris"
    worse = table.assign(rank=table["depth"] + 1)
    assert written(lens_table(worse))[(2, 1)].startswith("▼")


def test_colours_are_the_column_and_light_words_lie_on_dark_cells(table):
    figure = lens_table(table)
    np.testing.assert_allclose(figure.data[0].z, table.pivot(index="depth", columns="position", values="kl"))
    white = next(trace for trace in figure.data[1:] if trace.textfont.color == "#ffffff")
    assert set(white.y) == {0, 1}
    assert lens_table(table, colour="prob").layout.coloraxis.cmax == 1.0
    assert len(lens_table(table, positions=(1, 3)).data[0].x) == 2


def test_nothing_in_a_word_is_markup(table):
    hover = lens_table(table).data[0].hovertext[0][0]
    assert "'&lt;b&gt;'" in hover
    assert "KL 3.000" in hover


def test_what_cannot_be_drawn_is_refused(table):
    with pytest.raises(KeyError, match="rank"):
        lens_table(table.drop(columns="rank"))
    with pytest.raises(ValueError, match="kl, entropy, prob"):
        lens_table(table, colour="mood")
    with pytest.raises(ValueError, match="no rows"):
        lens_table(table, positions=(9, 10))
    with pytest.raises(ValueError, match="one lens"):
        lens_table(pd.concat([table, table]))

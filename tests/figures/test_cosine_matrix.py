"""The matrix of cosines: cells on both sides of the diagonal, the scale, refusals."""

import numpy as np
import pandas as pd
import pytest

from microtome.figures.cosine_matrix import cosine_matrix

TABLE = pd.DataFrame(
    {
        "site": "resid_post.3",
        "first": ["mass_mean", "mass_mean", "lda"],
        "second": ["lda", "pca", "pca"],
        "cosine": [0.4, 0.9, 0.2],
        "cosine_low": [0.3, 0.8, np.nan],
        "cosine_high": [0.5, 0.95, np.nan],
        "score_correlation": [0.9, -0.5, 0.1],
        "chance": 0.1,
    }
)


def test_cells_are_on_both_sides_of_the_diagonal() -> None:
    figure = cosine_matrix(TABLE)
    heat = figure.data[0]
    np.testing.assert_allclose(heat.z, [[1, 0.4, 0.9], [0.4, 1, 0.2], [0.9, 0.2, 1]])
    assert heat.text[0][1] == heat.text[1][0] == "0.40"
    assert heat.hovertext[1][0] == "mass_mean · lda<br>cosine 0.400 [0.300, 0.500]"
    assert heat.hovertext[1][2].endswith("0.200")
    assert list(figure.layout.xaxis.ticktext) == ["mass mean", "lda", "pca"]
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (0, 1)
    assert figure.layout.title.text == "cosine of direction finders at resid_post.3 (random directions: 0.100)"


def test_signs_are_in_the_cells_and_sizes_in_the_colours() -> None:
    heat = cosine_matrix(TABLE, value="score_correlation").data[0]
    assert heat.z[0][2] == 0.5
    assert heat.text[0][2] == "-0.50"


def test_pairs_that_are_not_there_stay_empty() -> None:
    assert np.isnan(cosine_matrix(TABLE.iloc[:2]).data[0].z[1][2])


def test_refusals() -> None:
    with pytest.raises(KeyError, match=r"no column \['angle'\]"):
        cosine_matrix(TABLE, value="angle")
    with pytest.raises(ValueError, match="no rows"):
        cosine_matrix(TABLE.iloc[:0])
    with pytest.raises(ValueError, match="several sites"):
        cosine_matrix(pd.concat([TABLE, TABLE.assign(site="resid_post.4")]))
    with pytest.raises(ValueError, match="several rows"):
        cosine_matrix(pd.concat([TABLE, TABLE]))

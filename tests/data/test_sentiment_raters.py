"""Single ratings behind the sentiment set's means."""

import numpy as np
import pytest

from microtome.data.sentiment import sentiment_ratings
from microtome.data.sentiment_raters import parse_ratings, sentiment_raters


def test_deviation_and_number_of_the_ratings():
    raw = "\ufeff1_1\t1.5\t0.5\t[1, 2]\r\n1_2\t-1\t0.81650\t[-2, -1, 0]\n".encode()
    table = parse_ratings(raw, name="some.txt")
    assert table["id"].tolist() == ["1_1", "1_2"]
    assert table["raw_rating"].tolist() == [1.5, -1.0]
    np.testing.assert_allclose(table["rating_sd"], [np.sqrt(0.5), 1.0])
    assert table["raters"].tolist() == [2, 3]


@pytest.mark.parametrize("line", ["1\t0\t0\t[1]", "1\t0\t0\t[1, 5]", "1\t0\t[1, 2]", "1\t0\t0\t[1, 2", ""])
def test_other_lines_are_refused(line):
    with pytest.raises(ValueError, match=r"some\.txt, line 2: .* is not `id <tab> mean"):
        parse_ratings(f"1\t0\t0\t[1, 2]\n{line}\n2\t0\t0\t[1, 2]".encode(), name="some.txt")


@pytest.mark.slow
@pytest.mark.network
def test_the_real_archive():
    raters, ratings = sentiment_raters(), sentiment_ratings()
    both = ratings.merge(raters, on="id", validate="one_to_one")
    assert len(both) == len(ratings) == 23703
    gap = (both["raw_rating"] - both["rating"]).abs()
    assert both["domain"][gap > 1e-6].value_counts().to_dict() == {"tweets": 199}
    assert both.groupby("domain")["raters"].agg(["min", "max"]).to_numpy().tolist() == [
        [20, 20],
        [15, 29],
        [20, 20],
        [20, 99],
    ]

"""Columns made binary, and rows drawn by whole groups."""

import numpy as np
import pandas as pd
import pytest

from microtome.app.grid_config import LabelSettings
from microtome.app.grid_labels import draw_groups, grid_label


def made(values: list, **label):
    return grid_label(pd.Series(values), LabelSettings(column="c", **label))


@pytest.mark.parametrize(
    ("values", "label", "rows", "positive"),
    [
        (["a", "b", None, "b"], {}, [0, 1, 3], [False, True, True]),
        ([0.0, np.nan, 1.0], {}, [0, 2], [False, True]),
        ([True, None, False], {}, [0, 2], [True, False]),
        (["x", "y", "z", None], {"positive": "y"}, [0, 1, 2], [False, True, False]),
        ([1, 2, 3], {"positive": 1}, [0, 1, 2], [True, False, False]),
        ([1, 2, 9, 30], {"above": "median"}, [0, 1, 2, 3], [False, False, True, True]),
        ([1, 2, None, 30], {"above": 1}, [0, 1, 3], [False, True, True]),
        ([None, 1, 2, None], {"above": "median"}, [1, 2], [False, True]),
        (["a", "c", None, "b"], {}, [0, 1, 3], ["a", "c", "b"]),
        ([1, 2, None, 30], {"target": "numbers"}, [0, 1, 3], [1.0, 2.0, 30.0]),
        ([1, 2, 3, 1], {"target": "classes"}, [0, 1, 2, 3], ["1", "2", "3", "1"]),
    ],
)
def test_values_become_targets(values, label, rows, positive) -> None:
    found = made(values, **label)
    assert found.rows.tolist() == rows
    assert found.values.tolist() == positive
    assert found.says["column"] == "c"


@pytest.mark.parametrize(
    ("values", "label", "error", "says"),
    [
        ([1, 2, 3], {}, ValueError, r"'c' has 3 values \(1, 2, 3\)\. Write \{column: 'c', target: numbers\}.*median"),
        (
            [1, 2, 3],
            {},
            ValueError,
            r"\(--target numbers\).*\(--above median\).*\(--positive CLASS\).*--target classes",
        ),
        (["a", "b", "c"], {"target": "numbers"}, TypeError, "'target: numbers' needs numbers.*--positive CLASS"),
        (["a", "a"], {}, ValueError, "'c' is 'a' in every row"),
        ([None, None], {}, ValueError, "missing in all 2 rows"),
        (["yes", "no"], {"positive": False}, ValueError, "no row is False.*put the class in quotes"),
        ([0, 1], {"positive": True}, ValueError, "no row is True"),
        (["a", "b"], {"positive": "d"}, ValueError, "no row is 'd'; its values are 'a', 'b'"),
        (["a", "b"], {"above": 1}, TypeError, "'above' needs numbers"),
        ([True, False], {"above": 1}, TypeError, "'above' needs numbers"),
        ([1, 2], {"above": 7}, ValueError, "no row is above 7"),
        ([1, 2], {"above": 0}, ValueError, "every row is above 0"),
    ],
)
def test_what_cannot_be_a_label(values, label, error, says) -> None:
    with pytest.raises(error, match=says):
        made(values, **label)


def test_groups_are_drawn_whole() -> None:
    groups = np.repeat(np.arange(40), np.arange(40) % 7 + 1)
    kept = draw_groups(groups, rows=60, seed=0)
    assert 50 < len(kept) <= 60
    assert np.array_equal(kept, np.sort(kept))
    for group in np.unique(groups[kept]):
        assert (groups[kept] == group).sum() == (groups == group).sum()
    assert np.array_equal(kept, draw_groups(groups, rows=60, seed=0))
    assert not np.array_equal(kept, draw_groups(groups, rows=60, seed=1))
    with pytest.raises(ValueError, match="does not hold one whole group"):
        draw_groups(np.zeros(30), rows=20, seed=0)

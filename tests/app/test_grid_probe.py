"""What the sweep would refuse after the capture is known before it; what a tired person reads says how sure it is."""

import numpy as np
import pandas as pd
import pytest

from microtome.app.grid_config import GridConfig
from microtome.app.grid_labels import GridLabel
from microtome.app.grid_probe import check_folds
from microtome.app.grid_story import FEW_GROUPS, said_result, said_rows

CONFIG = GridConfig(name="g", models=["smollm2"], data=["toy"], probe={"folds": 2, "inner_folds": 2})


def label(positive: list[int]) -> GridLabel:
    return GridLabel(np.arange(len(positive)), np.array(positive, dtype=bool), "binary", {})


def test_folds_that_can_be_made() -> None:
    check_folds(label([0, 1] * 8), np.arange(16) // 2, pd.Series([f"text {i}" for i in range(16)]), CONFIG)


@pytest.mark.parametrize(
    ("groups", "positive", "said"),
    [
        ([0] * 8, [0, 1] * 4, "All 8 rows are in one group"),
        ([0, 1] * 4, [0, 1] * 4, "fold"),
        (
            [0, 0, 0, 0, 1, 1, 1, 1],
            [0, 1] * 4,
            r"Inner folds, within .* outer fold 0: 1 groups .* Ask for inner_folds<=1",
        ),
        ([0, 1, 2, 3], [0, 0, 0, 1], "Class 1 has 1 rows for 2 folds"),
    ],
)
def test_folds_that_cannot(groups, positive, said) -> None:
    with pytest.raises(ValueError, match=said):
        check_folds(label(positive), np.array(groups), None, CONFIG)


def test_one_text_in_two_groups_is_said_without_python() -> None:
    texts = pd.Series(["a", "a", "b", "c", "d", "e", "f", "g"])
    with pytest.raises(
        ValueError, match=r"occur in more than one group.*Give such rows one group in the data"
    ) as caught:
        check_folds(label([0, 1] * 4), np.arange(8), texts, CONFIG)
    assert "merged_groups" not in str(caught.value)


def test_few_groups_and_missing_labels_are_said() -> None:
    row = {"rows": 79, "groups": 3, "unlabelled": 1, "p_best_site": 0.01}
    assert said_rows(row) == "79 rows (1 more without a label) in 3 groups"
    assert said_result(row) == "p 0.010; caution: 3 groups are few, an interval over them says little"
    assert "caution" not in said_result(row | {"groups": FEW_GROUPS})
    assert said_rows({"rows": 1200, "groups": 1}) == "1,200 rows in 1 group"

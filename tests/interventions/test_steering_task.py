"""Data of a steering run: what is held out is held out."""

import pandas as pd
import pytest

from microtome.interventions.steering_task import opening, shards_of_groups, split_task


def table(n: int = 600) -> pd.DataFrame:
    rows = range(n)
    return pd.DataFrame(
        {
            "text": [f"text {i} has quite a few words to open with, or not" for i in rows],
            "label": [i % 2 == 0 for i in rows],
            "group": [i // 3 for i in rows],
        }
    )


def task(**settings):
    return split_task(table(), name="toy", contrast=100, prompts=40, dev_prompts=20, neutral=["x"], **settings)


def test_no_group_is_in_two_parts():
    made = task()
    parts = [made.contrast, made.other, made.prompts["dev"], made.prompts["test"]]
    groups = [set(part["group"]) for part in parts]
    assert [len(part) for part in (made.contrast, *made.prompts.values())] == [100, 20, 40]
    assert len(made.other) > 0
    for i, one in enumerate(groups):
        for other in groups[i + 1 :]:
            assert not one & other


def test_either_class_comes_as_often():
    made = task()
    assert all(part["label"].mean() == 0.5 for part in (made.contrast, *made.prompts.values()))
    assert len(made.texts(True)) == len(made.texts(False)) == len(made.groups(True)) == 50


def test_prompts_are_openings_of_texts_that_go_on():
    made = task(words=4)
    assert all(len(text.split()) == 4 for text in made.prompts["test"]["text"])
    assert opening(" a  b c ", 2) == "a b"
    short = table().assign(text="only three words")
    with pytest.raises(ValueError, match="of one class"):
        split_task(short, name="short", neutral=["x"])


def test_the_seed_decides_and_nothing_else_does():
    groups = list(range(50))
    assert (shards_of_groups(groups, 0) == shards_of_groups(groups, 0)).all()
    assert (shards_of_groups(groups, 0) != shards_of_groups(groups, 1)).any()
    assert (shards_of_groups(groups[:10], 0) == shards_of_groups(groups, 0)[:10]).all()


def test_columns_and_classes_are_asked_for():
    with pytest.raises(ValueError, match="lacks group"):
        split_task(table().drop(columns="group"), name="toy")
    with pytest.raises(ValueError, match="of one class"):
        split_task(table().assign(label=True), name="toy", neutral=["x"])

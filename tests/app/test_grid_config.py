"""Settings of a grid: short and long spellings, defaults, and errors that name the field."""

import re
import subprocess
import sys

import pytest
import yaml
from pydantic import ValidationError

from microtome.app.grid_config import GridConfig
from microtome.app.settings_file import read_settings
from microtome.app.user_errors import sentence

LEAST = {"name": "n", "models": ["smollm2"], "data": ["cities"]}


def test_one_of_a_kind_needs_no_list() -> None:
    short = GridConfig(name="n", models="smollm2", data="cities", sites="z", positions="mean", labels="label")
    assert short == GridConfig(
        name="n",
        models=[{"name": "smollm2"}],
        data=[{"name": "cities"}],
        sites=[["z"]],
        positions=["mean"],
        labels=[{"column": "label"}],
    )
    assert GridConfig(**LEAST).sites == (("resid_post", "z"),)
    assert GridConfig(**LEAST | {"sites": ["z", "embed"]}).sites == (("z",), ("embed",))


def test_label_and_labels_are_one_setting() -> None:
    one = GridConfig(**LEAST | {"data": [{"name": "brown", "label": {"column": "kind", "positive": "humour"}}]})
    assert one.data[0].labels[0].positive == "humour"


def test_settings_are_frozen_and_survive_yaml(tables) -> None:
    data = ["cities", {"name": "brown", "texts": 50}, {"file": tables[0], "group": "author", "labels": ["stars"]}]
    labels = [
        "label",
        {"column": "a", "above": "median"},
        {"column": "b", "above": 2.5},
        {"column": "c", "positive": True},
    ]
    settings = GridConfig(**LEAST | {"data": data, "labels": labels, "positions": ["last", -1]})
    with pytest.raises(ValidationError):
        settings.seed = 1
    text = yaml.safe_dump(settings.model_dump(mode="json", exclude_none=True))
    assert GridConfig(**yaml.safe_load(text)) == settings
    assert settings.labels[3].positive is True


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"positions": ["lst"]}, r"positions\[0\] 'lst': give last, first, mean, all, or an index"),
        ({"positions": [True]}, r"positions\[0\] True: give last"),
        ({"data": [{"file": "nowhere.csv", "group": "g"}]}, r"data\[0\] .*: there is no file nowhere.csv"),
        ({"data": ["cities", {"file": "nowhere.csv"}]}, r"data\[1\]\.group is not given"),
        ({"data": [{"name": "a", "label": "b", "labels": ["c"]}]}, r"data\[0\] .*: has both 'label' and 'labels'"),
        ({"labels": [{"column": "a", "positive": 1, "above": 2}]}, r"labels\[0\] .*: label 'a' has both"),
        ({"labels": [{"colum": "a"}]}, r"'labels\[0\]\.colum' is no setting"),
        ({"sites": []}, "sites .*: value should have at least 1 item"),
        ({"probe": {"folds": 1}}, r"probe\.folds 1: input should be greater than or equal to 2"),
        ({"model": "smollm2"}, "'model' is no setting; there are name, out, models"),
        ({"name": "../up"}, r"name '\.\./up'"),
    ],
)
def test_errors_name_the_field(tmp_path, change, says) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(yaml.safe_dump(LEAST | change), encoding="utf-8")
    with pytest.raises(ValidationError) as error:
        read_settings(GridConfig, file)
    assert re.search(says, sentence(error.value, None))


def test_reading_settings_imports_no_torch() -> None:
    code = "import sys, microtome.app.grid_config, microtome.app.grid_commands; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

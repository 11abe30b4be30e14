"""Names and order of cells."""

import re

import pytest

from microtome.app.grid_cells import capture_cells, label_name, model_name, probe_cells, shortened
from microtome.app.grid_config import GridConfig, LabelSettings, ModelSettings

LEAST = {"name": "n", "models": ["smollm2"], "data": ["cities"]}


def test_models_vary_slowest_and_names_say_it_all() -> None:
    config = GridConfig(
        **LEAST | {"models": ["smollm2", "a/b"], "sites": [["resid_post", "z"], "embed"], "positions": ["last", -1]}
    )
    cells = capture_cells(config)
    assert [cell.name for cell in cells[:5]] == [
        "smollm2--cities--resid_post+z--last",
        "smollm2--cities--resid_post+z--at-1",
        "smollm2--cities--embed--last",
        "smollm2--cities--embed--at-1",
        "a-b--cities--resid_post+z--last",
    ]
    [probe] = probe_cells(cells[0], [LabelSettings(column="label")])
    assert probe.name == "smollm2--cities--resid_post+z--last--label"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("owner/name", "owner-name"), ("/models/mine/", "mine"), ("./mine", "mine"), ("w/tiny.gguf", "tiny.gguf")],
)
def test_model_names(name, expected) -> None:
    assert model_name(ModelSettings(name=name)) == expected
    assert model_name(ModelSettings(name=name, called="own")) == "own"


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ({"column": "kind"}, "kind"),
        ({"column": "kind", "positive": "HUM"}, "kind-is-HUM"),
        ({"column": "place", "above": "median"}, "place-above-median"),
        ({"column": "place", "above": 2.5}, "place-above-2.5"),
        ({"column": "place", "above": 0.123456789}, "place-above-0.123456789"),
    ],
)
def test_label_names(label, expected) -> None:
    assert label_name(LabelSettings(**label)) == expected


@pytest.mark.parametrize(
    "text", ["a b", "a/b", "a\\b", "ä", "..", "-", "a--b", "x" * 300, "a:b", "Ω" * 40, ".a", "a\n"]
)
def test_any_text_gives_a_safe_name_of_its_own(text) -> None:
    name = shortened(text)
    assert re.fullmatch(r"[A-Za-z0-9_.+\-]{1,44}", name)
    assert "--" not in name
    assert ".." not in name
    assert name[0] not in ".-"
    assert name != shortened(text + "!")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"models": ["x/same", "/y/same", "/z/SAME"]}, "models: 'SAME' is there twice"),
        ({"data": ["cities", {"name": "cities", "texts": 10}]}, "data: 'cities' is there twice"),
        ({"positions": ["last", "last"]}, "cells: .* is there twice"),
    ],
)
def test_twins_are_refused(change, says) -> None:
    with pytest.raises(ValueError, match=says):
        capture_cells(GridConfig(**LEAST | change))
    [cell] = capture_cells(GridConfig(**LEAST))
    with pytest.raises(ValueError, match="the labels of cities: 'a' is there twice"):
        probe_cells(cell, [LabelSettings(column="a")] * 2)

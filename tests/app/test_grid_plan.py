"""Plans: what is known before any work, and which settings make a cell another one."""

import pytest

from microtome.app import grid_plan
from microtome.app.grid_config import GridConfig
from microtome.app.grid_folder import GridFolder
from microtome.app.grid_plan import needs_capture, plan_grid, refuse_other_settings
from microtome.app.settings_file import read_settings


def planned(path):
    config = read_settings(GridConfig, path)
    return config, plan_grid(config)


def test_a_plan_loads_each_data_set_once_and_no_model(grid, model_folders, monkeypatch) -> None:
    loads = []
    real = grid_plan.load_grid_data
    monkeypatch.setattr(grid_plan, "load_grid_data", lambda *a: loads.append(a[1]) or real(*a))
    monkeypatch.setattr("microtome.capture.models.load_model", lambda name: pytest.fail("no model is needed"))
    labels = ["verdict", {"column": "place", "positive": "a"}]
    _, plans = planned(grid(models=model_folders, positions=["last", "mean"], labels=labels))
    assert loads == ["first"]
    assert [plan.cell.name for plan in plans] == [
        f"{model}--first--resid_post+z--{positions}" for model in ("llama", "gpt2") for positions in ("last", "mean")
    ]
    assert [probe.cell.name.rpartition("--")[2] for probe in plans[0].probes] == ["verdict", "place-is-a"]
    assert plans[0].probes[0].settings.items() >= plans[0].settings.items()


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"sites": ["residpost"]}, ValueError, "Did you mean .resid_post"),
        ({"labels": ["verdit"]}, KeyError, "verdict"),
        ({"labels": [{"column": "place", "target": "numbers"}]}, ValueError, "label 'place': 'target: numbers' needs"),
        ({"models": ["x/a", "/y/x-a"]}, ValueError, "models: 'x-a' is there twice"),
    ],
)
def test_what_can_be_known_is_said_now(grid, change, error, says) -> None:
    with pytest.raises(error, match=says):
        planned(grid(**change))


SAME = [{"capture": {"max_tokens": 64}}, {"capture": {"shard_mb": 1}}, {"report": True}, {"keep_activations": False}]
OTHER = [
    ({"seed": 2}, "seed was 0, is 2"),
    ({"capture": {"truncate": "left"}}, "truncate was None, is left"),
    ({"probe": {"rows": 30}}, "probe.*rows was None, is 30"),
]


@pytest.mark.parametrize("change", SAME, ids=str)
def test_how_it_is_run_makes_no_other_cell(grid, change) -> None:
    first, second = planned(grid())[1], planned(grid(**change))[1]
    assert first[0].settings == second[0].settings
    assert first[0].probes[0].settings == second[0].probes[0].settings


@pytest.mark.parametrize(("change", "says"), OTHER, ids=str)
def test_what_is_computed_makes_another_cell(grid, change, says) -> None:
    config, [plan] = planned(grid())
    folder = GridFolder.of(config)
    folder.create(config)
    run = folder.fresh_run(plan.probes[0].cell, config)
    run.write_json("cell", {"settings": plan.probes[0].settings, "summary": {}})
    refuse_other_settings(folder, [plan])
    with pytest.raises(ValueError, match=f"1 cell.*made with other settings: cells/llama--.*{says}.*Nothing was done"):
        refuse_other_settings(folder, planned(grid(**change))[1])


def test_a_capture_is_needed_while_something_is_to_be_probed(grid) -> None:
    config, [plan] = planned(grid())
    folder = GridFolder.of(config)
    folder.create(config)
    both = ("capture", "probe")
    assert needs_capture(folder, plan, both)
    run = folder.fresh_run(plan.probes[0].cell, config)
    run.write_json("cell", {"settings": plan.probes[0].settings, "summary": {}})
    assert not needs_capture(folder, plan, both)
    assert needs_capture(folder, plan, ("capture",))
    folder.write_capture_facts(plan.cell, {"settings": plan.settings, "is_deleted": True})
    assert not needs_capture(folder, plan, ("capture",))

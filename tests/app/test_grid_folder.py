"""The folder: locks, errors, facts, and what is not a grid."""

import pytest

from microtome.app.grid_cells import capture_cells, probe_cells
from microtome.app.grid_config import GridConfig, LabelSettings
from microtome.app.grid_folder import CellIsBusy, GridFolder


@pytest.fixture
def settings(tmp_path) -> GridConfig:
    return GridConfig(name="night", out=tmp_path, models="m", data="d")


@pytest.fixture
def folder(settings) -> GridFolder:
    made = GridFolder.of(settings)
    made.create(settings)
    return made


@pytest.fixture
def cell(settings):
    return capture_cells(settings)[0]


def test_a_cell_is_held_by_one(folder, cell) -> None:
    assert not folder.is_busy(cell)
    with folder.locked(cell):
        assert folder.is_busy(cell)
        with pytest.raises(CellIsBusy, match="another process works on m--d"), folder.locked(cell):
            pass
    assert not folder.is_busy(cell)


def test_looking_makes_no_file(settings, cell, tmp_path) -> None:
    folder = GridFolder.of(settings)
    [probe] = probe_cells(cell, [LabelSettings(column="label")])
    assert not folder.is_busy(cell)
    assert folder.capture_facts(cell) is None
    assert folder.probe_facts(probe) is None
    assert folder.error(cell) is None
    assert not folder.is_captured(cell)
    assert folder.finished_cells() == {}
    assert list(tmp_path.iterdir()) == []


def test_errors_are_one_line_and_then_all_of_it(folder, cell) -> None:
    try:
        raise ValueError("too few groups\nsee below")
    except ValueError as error:
        folder.write_error(cell, error)
    assert folder.error(cell) == "ValueError: too few groups"
    text = folder.error_file(cell).read_text(encoding="utf-8")
    assert "see below" in text
    assert "Traceback" in text


def test_damaged_facts_are_named(folder, cell) -> None:
    folder.write_capture_facts(cell, {"settings": {"dtype": "float32"}})
    assert folder.capture_facts(cell) == {"settings": {"dtype": "float32"}}
    (folder.path / "captures" / f"{cell.name}.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"json is damaged .*Delete it"):
        folder.capture_facts(cell)


def test_an_unfinished_run_is_replaced_and_a_finished_one_is_not(folder, cell, settings) -> None:
    [probe] = probe_cells(cell, [LabelSettings(column="label")])
    folder.fresh_run(probe, settings).write_json("leftover", 1)
    run = folder.fresh_run(probe, settings)
    assert run.values == ()
    run.write_json("cell", {"settings": {}, "summary": {}})
    with pytest.raises(FileExistsError):
        folder.fresh_run(probe, settings)
    assert list(folder.finished_cells()) == [probe.name]

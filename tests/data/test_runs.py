import datetime
import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
import torch
import yaml
from pydantic import BaseModel

from microtome.data.runs import Run, list_runs


class Settings(BaseModel, frozen=True):
    model: str = "tiny"
    layers: tuple[int, ...] = (1, 2)
    folder: Path = Path("a/b")


@pytest.fixture
def run(tmp_path):
    return Run.create(tmp_path / "runs", "demo", {"model": "tiny"}, seed=3)


@pytest.fixture
def table():
    return pd.DataFrame(
        {"site": ["z.0.1", "resid_post.3"], "auroc": [0.5, np.nan], "head": [1, None], "is_best": [True, False]}
    )


def files_of(run: Run) -> set[str]:
    return {str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_file()}


@pytest.mark.parametrize("config", [{"model": "tiny", "ü": [1, 2.5, None]}, Settings()], ids=["dict", "pydantic"])
def test_a_fresh_run_holds_its_config_and_provenance_only(tmp_path, config):
    run = Run.create(tmp_path / "deep" / "runs", "demo", config, seed=7)
    assert run.path == tmp_path / "deep" / "runs" / "demo"
    assert run.name == "demo"
    assert files_of(run) == {"config.yaml", "provenance.json"}
    assert run.config == (config if isinstance(config, dict) else config.model_dump(mode="json"))
    assert run.provenance["seed"] == 7
    assert run.provenance["name"] == "demo"
    assert run.provenance["environment"]["packages"]["torch"] == torch.__version__
    assert Run.open(run.path) == run
    assert [path.name for path in run.path.parent.iterdir()] == ["demo"]


def test_pydantic_settings_come_back_from_the_file(tmp_path):
    run = Run.create(tmp_path, "demo", Settings(layers=(4, 5)))
    assert Settings(**run.config) == Settings(layers=(4, 5))


def test_table_round_trip(run, table):
    path = run.write_table("sweep", table)
    assert path == run.path / "tables" / "sweep.parquet"
    pd.testing.assert_frame_equal(Run.open(run.path).table("sweep"), table)
    assert run.tables == ("sweep",)


def test_array_round_trip(run):
    base = torch.arange(12.0).reshape(3, 4)
    arrays = {
        "transposed": base.T,
        "base": base,
        "view of it": base[1],
        "numpy": np.arange(3),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "empty": torch.zeros(0, 5),
    }
    path = run.write_arrays("weights.z", arrays)
    assert path.name == "weights.z.safetensors"
    loaded = run.arrays("weights.z")
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        expected = torch.as_tensor(array).detach()
        assert loaded[name].dtype == expected.dtype
        assert torch.equal(loaded[name], expected)
    assert run.array_files == ("weights.z",)


def test_figure_json_and_report_round_trip(run):
    figure = go.Figure(go.Scatter(x=[1, 2], y=np.array([0.5, np.nan])), layout={"title": {"text": "ü <b>"}})
    run.write_figure("curve", figure)
    assert json.loads(run.figure("curve").to_json()) == json.loads(figure.to_json())
    value = {
        "n": np.int64(3),
        "x": np.float32(0.5),
        "where": Path("a"),
        "list": np.arange(2),
        "day": datetime.date(2026, 1, 2),
    }
    run.write_json("summary", value)
    assert run.json("summary") == {"n": 3, "x": 0.5, "where": "a", "list": [0, 1], "day": "2026-01-02"}
    assert run.write_report("<!doctype html>ü").read_text("utf-8") == "<!doctype html>ü"
    assert (run.figures, run.values, run.tables) == (("curve",), ("summary",), ())


def test_recorded_facts_are_added_and_replaced(run):
    run.record(model={"hash": "abc", "dtype": torch.float32}, seconds=1.5)
    run.record(seconds=2.5)
    assert run.provenance["model"] == {"hash": "abc", "dtype": "torch.float32"}
    assert run.provenance["seconds"] == 2.5
    assert run.provenance["seed"] == 3
    with pytest.raises(ValueError, match=r"\['seed'\] are recorded when the run is made"):
        run.record(seed=4)


def test_a_cell_of_a_grid_may_be_a_name(tmp_path):
    name = "smollm2--cities--resid_post+z.5--at-1"
    assert Run.create(tmp_path, name, {}).name == name
    assert [run.name for run in list_runs(tmp_path)] == [name]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "a\\b", ".hidden", "a..b", "a b", "ä", "a\n", "-a"])
def test_bad_names(tmp_path, run, table, name):
    with pytest.raises(ValueError, match="is no name for a run"):
        Run.create(tmp_path, name, {})
    with pytest.raises(ValueError, match="is no name for a file in tables"):
        run.write_table(name, table)
    with pytest.raises(ValueError, match="is no name for a file in figures"):
        run.figure(name)


def test_an_existing_run_needs_overwrite_and_is_kept_aside(run, table):
    run.write_table("sweep", table)
    root = run.path.parent
    with pytest.raises(FileExistsError, match=r"is there already. Give another name, or pass overwrite=True"):
        Run.create(root, "demo", {})
    assert run.tables == ("sweep",)
    second = Run.create(root, "demo", {"second": True}, overwrite=True)
    assert files_of(second) == {"config.yaml", "provenance.json"}
    assert Run.open(root / ".demo.previous").tables == ("sweep",)
    Run.create(root, "demo", {"third": True}, overwrite=True)
    assert Run.open(root / ".demo.previous").config == {"second": True}
    assert sorted(path.name for path in root.iterdir()) == [".demo.previous", "demo"]
    assert [run.name for run in list_runs(root)] == ["demo"]


def test_a_folder_that_is_no_run_is_never_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="is no run folder, so it is left alone"):
        Run.create(tmp_path, "thesis", {}, overwrite=True)
    assert (tmp_path / "thesis" / "text.txt").read_text() == "years of work"


def test_a_config_that_yaml_cannot_hold_leaves_nothing(tmp_path):
    with pytest.raises(TypeError, match=r"config holds .*object.*, which YAML cannot"):
        Run.create(tmp_path, "demo", {"thing": object()})
    assert list(tmp_path.iterdir()) == []


def interrupted(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["while writing", "before the rename"])
def test_an_interrupted_rewrite_keeps_the_old_file(run, table, monkeypatch, when):
    run.write_table("sweep", table)
    before = files_of(run)
    if when == "while writing":

        def half(self, path, **_):
            Path(path).write_bytes(b"half")
            raise KeyboardInterrupt

        monkeypatch.setattr(pd.DataFrame, "to_parquet", half)
    else:
        monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.write_table("sweep", table.iloc[:1])
    monkeypatch.undo()
    pd.testing.assert_frame_equal(run.table("sweep"), table)
    assert files_of(run) == before


def test_an_interrupted_replacement_keeps_the_old_run(run, table, monkeypatch):
    run.write_table("sweep", table)
    monkeypatch.setattr(Path, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Run.create(run.path.parent, "demo", {}, overwrite=True)
    monkeypatch.undo()
    assert Run.open(run.path).tables == ("sweep",)


def test_what_cannot_be_stored(run):
    with pytest.raises(TypeError, match=r"table 'sweep' cannot be stored: .*site.*Make that column str or numbers"):
        run.write_table("sweep", pd.DataFrame({"site": [Path("a"), 1]}))
    with pytest.raises(TypeError, match="JSON cannot hold"):
        run.write_json("a", {"x": object()})
    with pytest.raises(ValueError, match=r"[Oo]ut of range float"):
        run.write_json("a", {"x": float("nan")})
    assert files_of(run) == {"config.yaml", "provenance.json"}


def test_what_is_not_there(run, table):
    run.write_table("sweep", table)
    with pytest.raises(
        KeyError, match=r"run demo has nothing called 'sweeep' in tables; it has \['sweep'\]. Did you mean 'sweep'"
    ):
        run.table("sweeep")
    for read in (run.figure, run.arrays, run.json):
        with pytest.raises(KeyError, match=r"it has \[\]"):
            read("sweep")
    with pytest.raises(FileNotFoundError, match=r"there is no run .*absent. Runs in .*: \['demo'\]"):
        Run.open(run.path.with_name("absent"))
    with pytest.raises(ValueError, match=r"is no run folder: config.yaml or provenance.json is missing"):
        Run.open(run.path.parent)


def test_damaged_and_missing_files(run, table):
    run.write_table("sweep", table).write_bytes(b"PAR1 half")
    run.write_arrays("weights", {"a": torch.ones(2)}).write_bytes(b"half")
    run.write_figure("curve", go.Figure()).write_text("{")
    run.write_json("value", 1).write_text("")
    for read, name in ((run.table, "sweep"), (run.arrays, "weights"), (run.figure, "curve"), (run.json, "value")):
        with pytest.raises(ValueError, match=rf"{name}\.\w+ is damaged .*overwrite=True"):
            read(name)
    (run.path / "config.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"config\.yaml is damaged"):
        _ = run.config
    (run.path / "provenance.json").unlink()
    with pytest.raises(ValueError, match=r"provenance\.json is missing, so .* is no whole run"):
        _ = run.provenance


def test_files_are_what_other_tools_read(run, table):
    run.write_table("sweep", table)
    assert pd.read_parquet(run.path / "tables" / "sweep.parquet")["site"].tolist() == table["site"].tolist()
    assert yaml.safe_load((run.path / "config.yaml").read_text()) == {"model": "tiny"}
    assert json.loads((run.path / "provenance.json").read_text())["seed"] == 3


def test_list_runs_of_nothing(tmp_path):
    assert list_runs(tmp_path / "absent") == []
    (tmp_path / "no_run").mkdir()
    assert list_runs(tmp_path) == []

"""Whole grids on tiny models: finished, repeated, failing in one cell, killed, shared by two processes, stopped."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
import weakref
from pathlib import Path

import pandas as pd
import pytest

from microtome.app import grid_probe, grid_run
from microtome.app.grid_commands import run_grid
from microtome.data.runs import Run
from microtome.probes.sweep_result import Sweep

BOTH = ("capture", "probe")
TIMES = ["seconds_capture", "seconds_probe"]


def files_of(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*")) if path.is_file()}


def entries(tables: list[str]) -> list[dict]:
    return [{"file": table, "text": "review", "group": "author"} for table in tables]


def summary(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(folder / "summary.parquet").sort_values("cell", ignore_index=True)


def test_two_models_by_two_data_sets_finish(grid, model_folders, tables, tmp_path, monkeypatch, capsys) -> None:
    config = grid(models=model_folders, data=entries(tables), labels=["verdict", {"column": "stars", "above": 3}])
    assert run_grid(config, BOTH) == 0
    folder = tmp_path / "runs" / "night"
    table = summary(folder)
    assert len(table) == 8
    assert set(table["status"]) == {"finished"}
    assert set(table["model"]) == {"llama", "gpt2"}
    assert set(table["label"]) == {"verdict", "stars-above-3"}
    assert table["error"].isna().all()
    assert table["best_layer_site"].str.startswith("resid_post.").all()
    assert table["best_head_site"].str.startswith("z.").all()
    for which in ("best_layer", "best_head", "selected"):
        auroc, low, high = (table[f"{which}_auroc{part}"] for part in ("", "_low", "_high"))
        assert ((low <= auroc) & (auroc <= high)).all()
    row = table.iloc[0]
    run = Run.open(row["run"])
    assert set(run.figures) == {"head_map", "layer_curve"}
    best = run.table("sites").dropna(subset="head")["auroc"].max()
    assert row["best_head_auroc"] == pytest.approx(best)
    assert Sweep.load(run.path / "sweep").truth.numel() == row["rows"]
    assert {"model", "data", "capture", "label"} <= set(run.provenance)
    assert len(list((folder / "captures").glob("*/"))) == 4  # two labels are probed in one capture

    log = (folder / "log.txt").read_text(encoding="utf-8")
    assert log in capsys.readouterr().err
    assert log.count("  captured ") == 4
    assert log.count("  probed ") == 8
    assert "best layer resid_post." in log
    assert "8 of 8 cells finished, 0 failed" in log

    before = files_of(folder / "cells") | files_of(folder / "captures")
    monkeypatch.setattr(grid_run, "load_model", lambda name: pytest.fail("a finished grid loads no model"))
    assert run_grid(config, BOTH) == 0
    assert files_of(folder / "cells") | files_of(folder / "captures") == before
    pd.testing.assert_frame_equal(summary(folder), table)


def test_a_label_that_is_added_later_needs_no_new_capture(grid, monkeypatch, tmp_path) -> None:
    assert run_grid(grid(), BOTH) == 0
    monkeypatch.setattr(grid_run, "load_model", lambda name: pytest.fail("the capture is on disk"))
    assert run_grid(grid(labels=["verdict", {"column": "place", "positive": "a"}]), BOTH) == 0
    table = summary(tmp_path / "runs" / "night")
    assert list(table["label"]) == ["place-is-a", "verdict"]
    # a cell that is taken out of the settings stays in the summary
    assert run_grid(grid(labels=["verdict"]), BOTH) == 0
    assert list(summary(tmp_path / "runs" / "night")["label"]) == ["place-is-a", "verdict"]


def test_a_cell_that_fails_fails_alone(grid, model_folders, tmp_path, monkeypatch, capsys) -> None:
    config = grid(
        models=[*model_folders, str(tmp_path / "absent")], labels=["verdict", {"column": "stars", "above": 3}]
    )
    real = grid_probe.sweep

    def fails_for_stars(activations, labels, **settings):
        if labels.sum() != len(labels) // 2 and "GPT2" in activations.provenance["model"]["model_class"]:
            raise RuntimeError("the solver\nlost its way")
        return real(activations, labels, **settings)

    monkeypatch.setattr(grid_probe, "sweep", fails_for_stars)
    assert run_grid(config, BOTH) == 1
    folder = tmp_path / "runs" / "night"
    table = summary(folder).set_index("cell")
    assert table["status"].value_counts().to_dict() == {"finished": 3, "failed": 1, "waiting": 2}
    [failed] = table.index[table["status"] == "failed"]
    assert failed == "gpt2--first--resid_post+z--last--stars-above-3"
    assert table.loc[failed, "error"] == "RuntimeError: the solver"
    trace = (folder / "errors" / f"{failed}.txt").read_text(encoding="utf-8")
    assert "lost its way" in trace
    assert "fails_for_stars" in trace
    assert table.loc[table["model"] == "absent", "error"].str.startswith("not run: its capture failed (").all()
    log = (folder / "log.txt").read_text(encoding="utf-8")
    assert log.count("  FAILED ") == 4  # the cell and the capture, when they fail and in the list at the end
    assert log.count("  not run, because its capture failed: ") == 4
    assert "3 of 6 cells finished, 1 failed, 1 capture failed" in log
    assert f"FAILED {failed}: RuntimeError: the solver" in log.rpartition("cells finished")[2]
    assert "Traceback" not in log

    monkeypatch.setattr(grid_probe, "sweep", real)
    assert run_grid(config, BOTH) == 1
    table = summary(folder).set_index("cell")
    assert table.loc[failed, "status"] == "finished"
    assert not (folder / "errors" / f"{failed}.txt").exists()


def test_a_model_that_cannot_be_loaded_is_tried_once(grid, tables, monkeypatch) -> None:
    tried = []

    def load(name: str):
        tried.append(name)
        raise ValueError("no such model")

    monkeypatch.setattr(grid_run, "load_model", load)
    assert run_grid(grid(data=entries(tables)), BOTH) == 1
    assert len(tried) == 1


def test_probe_needs_finished_captures(grid, tmp_path) -> None:
    config = grid()
    assert run_grid(config, ("probe",)) == 1
    [error] = summary(tmp_path / "runs" / "night")["error"]
    assert "run microtome capture CONFIG first" in error
    assert run_grid(config, ("capture",)) == 0
    table = summary(tmp_path / "runs" / "night")
    assert table["status"].tolist() == ["finished", "failed"]  # the capture, and the cell as it was left
    assert table["label"].isna().tolist() == [True, False]
    assert table["rows"][0] == 40
    assert run_grid(config, ("probe",)) == 0
    assert set(summary(tmp_path / "runs" / "night")["status"]) == {"finished"}


def test_activations_are_deleted_when_they_are_not_kept(grid, monkeypatch, tmp_path) -> None:
    config = grid(keep_activations=False)
    assert run_grid(config, BOTH) == 0
    folder = tmp_path / "runs" / "night"
    assert [path.suffix for path in (folder / "captures").iterdir()] == [".json"]
    monkeypatch.setattr(grid_run, "load_model", lambda name: pytest.fail("there is nothing to do"))
    assert run_grid(config, BOTH) == 0
    assert run_grid(config, ("capture",)) == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 1}, "seed was 0, is 1"),
        ({"probe": {"folds": 3, "inner_folds": 2, "permutations": 20, "bootstraps": 100}}, "probe.folds was 2, is 3"),
        ({"capture": {"dtype": "float16"}}, "dtype was float32, is float16"),
    ],
)
def test_other_settings_are_refused_before_any_work(grid, change, says, tmp_path) -> None:
    assert run_grid(grid(), BOTH) == 0
    before = files_of(tmp_path / "runs")
    with pytest.raises(ValueError, match=says):
        run_grid(grid(**change), BOTH)
    assert files_of(tmp_path / "runs") == before
    # how it is run may change
    assert run_grid(grid(capture={"max_tokens": 512}, report=True), BOTH) == 0


def test_a_capture_that_was_deleted_by_hand_holds_nobody_to_its_settings(grid, tmp_path) -> None:
    assert run_grid(grid(), ("capture",)) == 0
    with pytest.raises(ValueError, match=r"captures/.*dtype was float32"):
        run_grid(grid(capture={"dtype": "bfloat16"}), ("capture",))
    shutil.rmtree(tmp_path / "runs" / "night" / "captures" / "llama--first--resid_post+z--last")
    assert run_grid(grid(capture={"dtype": "bfloat16"}), ("capture",)) == 0


def test_warnings_of_a_cell_are_in_the_log(grid, tmp_path, monkeypatch) -> None:
    real = grid_probe.sweep

    def warns(*arguments, **settings):
        for _ in range(3):
            warnings.warn("some fits stopped early", UserWarning, stacklevel=1)
        return real(*arguments, **settings)

    monkeypatch.setattr(grid_probe, "sweep", warns)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run_grid(grid(), BOTH) == 0
    log = (tmp_path / "runs" / "night" / "log.txt").read_text(encoding="utf-8")
    assert log.count("warning in llama--first--resid_post+z--last--verdict: UserWarning: some fits stopped early") == 1


def test_changed_data_are_refused_before_any_work(grid, tables, tmp_path) -> None:
    mine = tmp_path / "mine.csv"
    table = pd.read_csv(tables[0])
    table.to_csv(mine, index=False)
    config = grid(data=entries([str(mine)]))
    assert run_grid(config, BOTH) == 0
    table.assign(verdict=table["verdict"].to_numpy()[::-1]).to_csv(mine, index=False)
    with pytest.raises(ValueError, match="the labels are others"):
        run_grid(config, BOTH)
    table.assign(review=table["review"] + " so").to_csv(mine, index=False)
    with pytest.raises(ValueError, match="the texts are others"):
        run_grid(config, BOTH)


def test_a_cell_that_another_process_holds_is_left_to_it(grid, tables, tmp_path, capsys) -> None:
    config = grid(data=entries(tables))
    folder = tmp_path / "runs" / "night"
    (folder / "locks").mkdir(parents=True)
    (folder / "captures").mkdir()
    lock = folder / "locks" / "llama--first--resid_post+z--last.lock"
    code = "lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", f"import sys, filelock; {code}", str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        assert run_grid(config, ("capture",)) == 1
        table = summary(folder).set_index("cell")
        assert table.loc[lock.stem, "status"] == "running elsewhere"
        assert table.loc["llama--second--resid_post+z--last", "status"] == "finished"
        assert "left to another process" in capsys.readouterr().err
        other.stdin.close()
    assert run_grid(config, BOTH) == 0


KILLED = """
import os, sys
from pathlib import Path
from microtome.app import grid_run
from microtome.app.grid_commands import run_grid

name, after = sys.argv[3], int(sys.argv[4])
module = sys.modules[sys.argv[2]]
real, calls = getattr(module, name), []

def dies(*arguments, **settings):
    calls.append(1)
    if len(calls) > after:
        os._exit(9)
    return real(*arguments, **settings)

setattr(module, name, dies)
run_grid(Path(sys.argv[1]), ("capture", "probe"))
"""


@pytest.mark.slow
def test_two_processes_share_a_grid(grid, model_folders, tables, tmp_path, uninterrupted) -> None:
    config = grid(**TWO_BY_TWO, data=entries(tables), models=model_folders)
    code = "import sys; from pathlib import Path; from microtome.app.grid_commands import run_grid\n"
    code += "run_grid(Path(sys.argv[1]), ('capture', 'probe'))"
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(config)], stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [child.communicate()[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    table = summary(tmp_path / "runs" / "night")
    assert table["status"].tolist() == ["finished"] * 8
    log = (tmp_path / "runs" / "night" / "log.txt").read_text(encoding="utf-8")
    assert log.count("  captured ") == 4
    assert log.count("  probed ") == 8
    alone = table[table["model"] == "llama"].reset_index(drop=True)
    other = [*TIMES, "run"]
    pd.testing.assert_frame_equal(alone.drop(columns=other), uninterrupted.drop(columns=other))


TWO_BY_TWO = {"labels": ["verdict", {"column": "stars", "above": 3}], "report": True}


@pytest.fixture(scope="module")
def uninterrupted(write_grid, tables, tmp_path_factory) -> pd.DataFrame:
    folder = tmp_path_factory.mktemp("whole")
    assert run_grid(write_grid(folder, **TWO_BY_TWO, data=entries(tables)), BOTH) == 0
    return summary(folder / "runs" / "night")


@pytest.mark.parametrize(
    ("module", "name", "after"),
    [
        pytest.param("microtome.app.grid_run", "capture", 1, marks=pytest.mark.slow),
        ("microtome.capture.store_writer", "append_log", 1),
        ("microtome.probes.methods", "nested_fits", 3),
        pytest.param("microtome.app.grid_probe", "cell_report", 0, marks=pytest.mark.slow),
        pytest.param("microtome.app.grid_folder", "write_whole", 4, marks=pytest.mark.slow),
    ],
)
def test_a_killed_grid_goes_on_to_the_same_summary(grid, tables, tmp_path, module, name, after, uninterrupted) -> None:
    killed = grid(**TWO_BY_TWO, data=entries(tables))
    child = subprocess.run(
        [sys.executable, "-c", KILLED, str(killed), module, name, str(after)], capture_output=True, text=True
    )
    assert child.returncode == 9, child.stderr
    folder = tmp_path / "runs" / "night"
    assert len(summary(folder)) == 4
    assert (summary(folder)["status"] == "waiting").any()
    assert run_grid(killed, BOTH) == 0
    other = [*TIMES, "run"]
    pd.testing.assert_frame_equal(
        summary(folder).drop(columns=other), uninterrupted.drop(columns=other), check_exact=True
    )
    assert list((folder / "checkpoints").iterdir()) == []
    if name == "nested_fits":
        assert ", with fits that are there already" in (folder / "log.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_grid_says_so_and_goes_on_later(grid, tmp_path, monkeypatch, number) -> None:
    real = grid_probe.sweep

    def stopped(*_: object, **__: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)  # the handler runs between two steps of the interpreter, which may be a few later

    monkeypatch.setattr(grid_probe, "sweep", stopped)
    handler = signal.getsignal(signal.SIGTERM)
    config = grid()
    with pytest.raises(KeyboardInterrupt, match="the same command goes on from here"):
        run_grid(config, BOTH)
    assert signal.getsignal(signal.SIGTERM) is handler
    log = (tmp_path / "runs" / "night" / "log.txt").read_text(encoding="utf-8")
    assert "stopped by hand" in log.splitlines()[-1]
    assert summary(tmp_path / "runs" / "night")["status"].tolist() == ["waiting"]
    monkeypatch.setattr(grid_probe, "sweep", real)
    assert run_grid(config, BOTH) == 0


def test_json_prints_the_summary(grid, capsys) -> None:
    assert run_grid(grid(), BOTH, as_json=True) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert row["status"] == "finished"
    assert row["error"] is None


def test_a_folder_of_something_else_is_left_alone(grid, tmp_path) -> None:
    (tmp_path / "runs" / "night").mkdir(parents=True)
    (tmp_path / "runs" / "night" / "thesis.tex").write_text("important")
    with pytest.raises(FileExistsError, match="is no grid"):
        run_grid(grid(), BOTH)


def test_a_model_is_gone_before_the_next_one_is_loaded(grid, model_folders, monkeypatch) -> None:
    alive: list[weakref.ref] = []
    real = grid_run.load_model

    def load(name: str):
        assert [module for module in alive if module() is not None] == []
        loaded = real(name)
        alive.append(weakref.ref(loaded.module))
        return loaded

    monkeypatch.setattr(grid_run, "load_model", load)
    assert run_grid(grid(models=model_folders), BOTH) == 0
    assert len(alive) == 2


def test_the_same_architecture_without_training_is_a_model_of_its_own(grid, tmp_path, model_folders) -> None:
    models = [model_folders[0], {"name": model_folders[0], "untrained": 0}, {"name": model_folders[0], "untrained": 1}]
    assert run_grid(grid(models=models), BOTH) == 0
    table = summary(tmp_path / "runs" / "night")
    assert table["model"].tolist() == ["llama", "llama-untrained-0", "llama-untrained-1"]
    assert table["best_layer_auroc"].nunique() == 3


def test_classes_and_numbers_are_cells_too(grid, tmp_path) -> None:
    labels = ["place", {"column": "stars", "target": "numbers"}]
    probe = {"folds": 3, "inner_folds": 2, "permutations": 20, "bootstraps": 100}
    assert run_grid(grid(labels=labels, probe=probe, report=True), BOTH) == 0
    table = summary(tmp_path / "runs" / "night").set_index("label")
    assert table.loc["place", "measure"] == "auroc"
    assert table.loc["stars-as-numbers", "measure"] == "r2"
    assert table.loc["stars-as-numbers", "best_layer_r2"] < 1
    assert pd.isna(table.loc["stars-as-numbers", "best_layer_auroc"])
    for run in table["run"]:
        assert "Without the model" in (Path(run) / "report.html").read_text(encoding="utf-8")

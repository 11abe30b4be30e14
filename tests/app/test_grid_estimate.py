"""A dry run: states, sizes and times of all cells, and nothing written."""

import json
from pathlib import Path

import pandas as pd
import pytest

from microtome.app import grid_estimate
from microtome.app.grid_commands import run_grid
from microtome.capture import store_writer

BOTH = ("capture", "probe")


def everything(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def said(config: Path, capsys, steps=BOTH) -> tuple[pd.DataFrame, dict, int]:
    code = run_grid(config, steps, dry_run=True, as_json=True)
    found = json.loads(capsys.readouterr().out)
    return pd.DataFrame(found["cells"]).set_index("cell"), found["totals"], code


def test_a_dry_run_touches_nothing(grid, tmp_path, capsys) -> None:
    config = grid(labels=["verdict", {"column": "stars", "above": 3}])
    before = everything(tmp_path)
    assert run_grid(config, BOTH, dry_run=True) == 0
    out = capsys.readouterr().out
    assert "llama--first--resid_post+z--last--stars-above-3" in out
    assert "Still to do: " in out
    assert everything(tmp_path) == before


def test_rows_bytes_and_time_of_what_is_to_do(grid, tmp_path, capsys) -> None:
    config = grid()
    table, totals, code = said(config, capsys)
    assert code == 0
    assert table["state"].tolist() == ["to do", "to do"]
    assert table["rows"].tolist() == [40, 40]
    # 3 layers of 32 and 3 layers of 4 heads of 8, in float32
    assert table["nbytes"].iloc[0] == 40 * 3 * (32 + 32) * 4
    assert (table["seconds"] > 0).all()
    assert totals["seconds"] == pytest.approx(table["seconds"].sum())
    assert totals["free_bytes"] > 0

    assert run_grid(config, ("capture",)) == 0
    before = everything(tmp_path)
    table, totals, _ = said(config, capsys)
    assert table["state"].tolist() == ["finished", "to do"]
    assert table["seconds"].iloc[1] > 0
    assert totals["nbytes"] == 0
    assert everything(tmp_path) == before

    assert run_grid(config, BOTH) == 0
    table, totals, _ = said(config, capsys)
    assert table["state"].tolist() == ["finished", "finished"]
    assert totals["seconds"] == 0


def test_a_capture_that_was_begun_is_to_be_resumed(grid, tmp_path, capsys, monkeypatch) -> None:
    config = grid()
    with monkeypatch.context() as patch:
        patch.setattr(store_writer, "append_log", lambda path, record: 1 / 0)
        assert run_grid(config, BOTH) == 1
    capsys.readouterr()
    table, _, code = said(config, capsys)
    assert code == 0
    assert table["state"].tolist() == ["to resume", "to do"]
    assert run_grid(config, BOTH) == 0
    log = (tmp_path / "runs" / "night" / "log.txt").read_text(encoding="utf-8")
    assert "40 texts, 0 of 1 shards are there already" in log


def test_what_cannot_be_done_is_said_now(grid, tmp_path, capsys, model_folders) -> None:
    config = grid(models=[str(tmp_path / "absent"), *model_folders[:1]], probe={"rows": 20, "folds": 2})
    table, _, code = said(config, capsys)
    assert code == 1
    assert table["state"].tolist() == ["cannot", "cannot", "to do", "to do"]
    assert "absent" in table["error"].iloc[0]
    assert table["rows"].iloc[3] == 20  # whole groups of two


def test_time_grows_with_rows_and_width() -> None:
    from microtome.app.grid_config import ProbeSettings

    settings = ProbeSettings(folds=2, inner_folds=2, permutations=20, bootstraps=100)
    small = grid_estimate._seconds_per_probe(100, 8, settings)
    large = grid_estimate._seconds_per_probe(2000, 256, settings)
    assert large > 2 * small

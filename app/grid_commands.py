"""`microtome capture | probe | sweep CONFIG.yaml`: read the settings, then run the grid or say what it would do."""

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from microtome.app.grid_config import GridConfig
from microtome.app.settings_file import read_settings


def run_grid(config_path: Path, steps: Sequence[str], *, dry_run: bool = False, as_json: bool = False) -> int:
    """Do the steps ("capture", "probe", or both) of a grid, or with `dry_run` only say what they would take.

    Returns the exit code: 0 if every cell that was asked for is finished (in a dry run: can be done), else 1.
    Raises, before any work, what `read_settings`, `plan_grid` and `refuse_other_settings` raise for settings that
    cannot be used, and KeyboardInterrupt when it is stopped.
    """
    config = read_settings(GridConfig, config_path)
    from microtome.app.grid_estimate import print_estimate
    from microtome.app.grid_folder import GridFolder
    from microtome.app.grid_log import GridLog
    from microtome.app.grid_plan import plan_grid, refuse_other_settings
    from microtome.app.grid_run import STEPS, run_cells
    from microtome.app.grid_summary import is_finished

    if not steps or set(steps) - set(STEPS):
        raise ValueError(f"steps={steps!r}; give some of {STEPS}.")
    folder = GridFolder.of(config)
    plans = plan_grid(config)
    refuse_other_settings(folder, plans)
    if dry_run:
        estimate = print_estimate(config, folder, plans, steps, as_json=as_json)
        return 1 if (estimate["state"] == "cannot").any() else 0
    folder.create(config)
    table = run_cells(config, folder, plans, steps, GridLog(folder.log_file))
    if as_json:
        print(json_text(records(table)))
    return 0 if is_finished(table, plans) else 1


def records(table: pd.DataFrame) -> list[dict]:
    """The table's rows as plain values, missing ones null."""
    return json.loads(table.to_json(orient="records", double_precision=15))


def json_text(value: list | dict) -> str:
    """Plain values as JSON."""
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)

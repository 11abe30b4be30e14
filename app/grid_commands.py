"""`microtome capture | probe | sweep CONFIG.yaml`: read the settings, then run the grid or say what it would do."""

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from microtome.app.grid_config import GridConfig


def run_grid(config_path: Path, steps: Sequence[str], *, dry_run: bool = False, as_json: bool = False) -> int:
    """Do the steps ("capture", "probe", or both) of a grid, or with `dry_run` only say what they would take.

    Returns the exit code: 0 if every cell that was asked for is finished (in a dry run: can be done), else 1.
    Raises ValueError, KeyError, FileNotFoundError, FileExistsError before any work for settings that cannot be used.
    """
    config = read_grid(config_path)
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


def read_grid(path: Path) -> GridConfig:
    """The settings in a YAML file. Raises FileNotFoundError, or ValueError that names each field that is wrong."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no settings file {path}; the working directory is {Path.cwd()}.")
    try:
        held = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(held, dict):
        raise ValueError(f"{path} holds a {type(held).__name__}; settings are names with values, 'models: [smollm2]'.")
    try:
        return GridConfig(**held)
    except ValidationError as error:
        raise ValueError(f"{path}: {'; '.join(dict.fromkeys(map(_sentence, error.errors())))}.") from error


def records(table: pd.DataFrame) -> list[dict]:
    """The table's rows as plain values, missing ones null."""
    return json.loads(table.to_json(orient="records", double_precision=15))


def json_text(value: list | dict) -> str:
    """Plain values as JSON."""
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)


def _sentence(error: ErrorDetails) -> str:
    """One of pydantic's errors, as the field in the file and what is wrong with it: `data[1].group: field required`."""
    known = GridConfig.model_fields
    field = ""
    for part in error["loc"]:
        if isinstance(part, int):
            field += f"[{part}]"
        elif part.isidentifier() and (field or part in known or error["type"] == "extra_forbidden"):
            # a discriminator or a branch of a union is no identifier, or is a type's name
            field += "" if part in ("int", "str", "float", "bool") else (f".{part}" if field else part)
    said = error["msg"].removeprefix("Value error, ").rstrip(".")
    if error["type"] == "extra_forbidden":
        return f"{field} is no setting" + (f"; there are {', '.join(known)}" if len(error["loc"]) == 1 else "")
    if error["type"] == "missing":
        return f"{field} is missing"
    given = error.get("input")
    shown = f" {given!r}" if isinstance(given, str | int | float | bool) or given is None else ""
    return f"{field}{shown}: {said[0].lower()}{said[1:]}"

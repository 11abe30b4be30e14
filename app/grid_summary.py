"""The summary of a grid: a table with one row per cell, made anew from the folder after every cell.

Status is one of: finished; failed (`error` says why, errors/<cell>.txt all of it); running elsewhere (another process
holds the cell); waiting (not done yet, or not run because its capture failed, which `error` then says). Finished cells
that are no longer in the settings stay in the table.
"""

from collections.abc import Sequence

import pandas as pd

from microtome.app.grid_cells import CaptureCell, ProbeCell, data_name, label_name, model_name, positions_name
from microtome.app.grid_folder import GridFolder
from microtome.app.grid_plan import CapturePlan
from microtome.data.replaced_file import replaced_file
from microtome.probes.sweep_result import Sweep

FINISHED, FAILED, WAITING, ELSEWHERE = "finished", "failed", "waiting", "running elsewhere"
_WORDS = ("cell", "model", "data", "sites", "positions", "label", "status", "error")
_OF_BEST = ("site", "auroc", "auroc_low", "auroc_high", "r2", "r2_low", "r2_high")
_BEST = tuple(f"{which}_{part}" for which in ("best_layer", "best_head") for part in _OF_BEST)
_TYPES = {
    **dict.fromkeys(_WORDS, "str"),
    **dict.fromkeys(("texts", "tokens", "rows", "groups"), "Int64"),
    "measure": "str",
    **{name: "str" if name.endswith("site") else "Float64" for name in _BEST},
    **dict.fromkeys(("control_auroc", "control_r2", "p_best_site"), "Float64"),
    **dict.fromkeys((f"selected_{part}" for part in _OF_BEST if part != "site"), "Float64"),
    **dict.fromkeys(("seconds_capture", "seconds_probe"), "Float64"),
    "nbytes": "Int64",
    "run": "str",
}


def sweep_facts(result: Sweep) -> dict:
    """What the summary says of a finished sweep, as plain values; what is NaN is left out."""
    table = result.table
    name = result.measure
    best = table.loc[table[name].idxmax()]
    facts: dict = {"measure": name, "rows": len(result.truth), "groups": int(result.groups.max()) + 1}
    for which, has_head in (("best_layer", False), ("best_head", True)):
        of_kind = table[table["head"].notna() == has_head]
        if len(of_kind):
            row = of_kind.loc[of_kind[name].idxmax()]
            facts[f"{which}_site"] = str(row["site"])
            facts |= {f"{which}_{column}": row[column] for column in (name, f"{name}_low", f"{name}_high")}
    facts |= {f"control_{name}": best[f"control_{name}"], "p_best_site": best["p_best_site"]}
    facts |= {f"selected_{part}": result.selected.measures[part] for part in (name, f"{name}_low", f"{name}_high")}
    return {
        name: float(value) if isinstance(value, float) else value for name, value in facts.items() if value == value
    }


def summary(folder: GridFolder, plans: Sequence[CapturePlan], *, with_captures: bool) -> pd.DataFrame:
    """The table of all cells; rows of captures, whose label is missing, only `with_captures`."""
    rows = []
    finished = folder.finished_cells()
    for plan in plans:
        if with_captures:
            rows.append(_capture_row(folder, plan))
        for probe in plan.probes:
            facts = finished.pop(probe.cell.name, None)
            rows.append(_probe_row(folder, probe.cell) if facts is None else _finished_row(folder, facts))
    rows += [_finished_row(folder, facts) for facts in finished.values()]
    table = pd.DataFrame([{name: row.get(name) for name in _TYPES} for row in rows], columns=list(_TYPES))
    return table.astype(_TYPES)


def write_summary(folder: GridFolder, plans: Sequence[CapturePlan], *, with_captures: bool) -> pd.DataFrame:
    """Make the table and put it in the place of the one before."""
    with folder.summary_locked():
        table = summary(folder, plans, with_captures=with_captures)
        with replaced_file(folder.summary_file) as scratch:
            table.to_parquet(scratch)
    return table


def is_finished(table: pd.DataFrame, plans: Sequence[CapturePlan]) -> bool:
    """Whether every cell that was asked for is finished. `table` is the summary."""
    return bool((asked_for(table, plans)["status"] == FINISHED).all())


def asked_for(table: pd.DataFrame, plans: Sequence[CapturePlan]) -> pd.DataFrame:
    """The summary's rows that a run was about: captures if it has them, else the probe cells of the settings."""
    captures = {plan.cell.name for plan in plans}
    of_captures = table[table["cell"].isin(captures)]
    if len(of_captures):
        return of_captures
    return table[table["cell"].isin({probe.cell.name for plan in plans for probe in plan.probes})]


def cell_words(cell: CaptureCell | ProbeCell) -> dict:
    """The columns that say which cell a row is about."""
    capture = cell.capture if isinstance(cell, ProbeCell) else cell
    words = {
        "cell": cell.name,
        "model": model_name(capture.model),
        "data": data_name(capture.data),
        "sites": "+".join(capture.sites),
        "positions": positions_name(capture.positions),
    }
    return words | ({"label": label_name(cell.label)} if isinstance(cell, ProbeCell) else {})


def _finished_row(folder: GridFolder, facts: dict) -> dict:
    row = facts["summary"]
    return {**row, "status": FINISHED, "run": str(folder.path / "cells" / row["cell"])}


def _probe_row(folder: GridFolder, cell: ProbeCell) -> dict:
    row = cell_words(cell) | _open_status(folder, cell)
    reason = folder.error(cell.capture)
    if row["status"] == WAITING and reason is not None:
        row["error"] = f"not run: its capture failed ({reason})"
    held = folder.capture_facts(cell.capture) or {}
    return row | {name: held.get(name) for name in ("texts", "tokens", "seconds_capture", "nbytes")}


def _capture_row(folder: GridFolder, plan: CapturePlan) -> dict:
    held = folder.capture_facts(plan.cell) or {}
    is_done = held.get("is_deleted") or folder.is_captured(plan.cell)
    status = {"status": FINISHED} if is_done else _open_status(folder, plan.cell)
    sizes = {name: held.get(name) for name in ("texts", "tokens", "rows", "seconds_capture", "nbytes")}
    return cell_words(plan.cell) | status | sizes | {"run": str(folder.store(plan.cell))}


def _open_status(folder: GridFolder, cell: CaptureCell | ProbeCell) -> dict:
    """Of a cell that is not finished."""
    if folder.is_busy(cell):
        return {"status": ELSEWHERE}
    error = folder.error(cell)
    return {"status": WAITING} if error is None else {"status": FAILED, "error": error}

"""What the log of a grid says: how a run starts, what each cell found, and at the end what is left and why."""

import os
import socket
from collections.abc import Mapping, Sequence

import pandas as pd

from microtome.app.grid_folder import GridFolder
from microtome.app.grid_plan import CapturePlan
from microtome.app.grid_summary import ELSEWHERE, FAILED, FINISHED, asked_for
from microtome.data.spoken import spoken_bytes, spoken_seconds

FEW_GROUPS = 20  # a bootstrap draws whole groups: of so few, most draws leave some out and repeat others


def said_start(folder: GridFolder, plans: Sequence[CapturePlan], steps: Sequence[str]) -> str:
    """What is to be done and what is there."""
    probes = [probe.cell for plan in plans for probe in plan.probes]
    done = sum(folder.probe_facts(cell) is not None for cell in probes)
    captured = sum(folder.is_captured(plan.cell) for plan in plans)
    return (
        f"{' and '.join(steps)} of grid {folder.path.name}: {_count(len(plans), 'capture')} ({captured} on disk), "
        f"{_count(len(probes), 'probe cell')} ({done} finished). Process {os.getpid()} on {socket.gethostname()}."
    )


def said_result(row: dict) -> str:
    """The best layer and head of a finished cell, for the log."""
    parts, name = [], row.get("measure", "auroc")
    for which in ("layer", "head"):
        if f"best_{which}_{name}_high" in row:
            value, low, high = (row[f"best_{which}_{name}{part}"] for part in ("", "_low", "_high"))
            unit = "R2 " if name == "r2" else ""
            parts.append(f"best {which} {row[f'best_{which}_site']} {unit}{value:.3f} [{low:.3f}, {high:.3f}]")
    if f"control_{name}" in row:
        parts.append(f"shuffled labels {row[f'control_{name}']:.3f}")
    if "p_best_site" in row:
        parts.append(f"p {row['p_best_site']:.3f}")
    if row.get("groups", FEW_GROUPS) < FEW_GROUPS:
        parts.append(f"caution: {row['groups']} groups are few, an interval over them says little")
    return "; ".join(parts)


def said_rows(row: dict) -> str:
    """How many rows were probed, in how many groups, and how many had no label."""
    without = f" ({row['unlabelled']:,} more without a label)" if row.get("unlabelled") else ""
    return f"{row['rows']:,} rows{without} in {_count(row['groups'], 'group')}"


def said_capture(facts: dict) -> str:
    """The size of a finished capture, for the log."""
    return (
        f"{facts['rows']:,} rows of {facts['texts']:,} texts, {facts['sites']} sites, {spoken_bytes(facts['nbytes'])}"
    )


def said_end(
    folder: GridFolder,
    plans: Sequence[CapturePlan],
    table: pd.DataFrame,
    seconds: float,
    spent: Mapping[str, float],
) -> str:
    """How many cells are finished, where the time went, and each cell that is not finished with its reason.

    table: the summary. spent: seconds of `seconds` by what they were spent on.
    """
    asked = asked_for(table, plans)
    counts = asked["status"].value_counts()
    still_open = asked[asked["status"] != FINISHED]
    names = set(asked["cell"])
    captures = [plan.cell for plan in plans if plan.cell.name not in names and folder.error(plan.cell)]
    failed = [f"  FAILED {cell.name}: {folder.error(cell)}" for cell in captures]
    failed += [f"  FAILED {row.cell}: {row.error}" for row in still_open.itertuples() if row.status == FAILED]
    without = {probe.cell.name for plan in plans if plan.cell in captures for probe in plan.probes}
    parts = [*spent.items(), ("rest", seconds - sum(spent.values()))]
    failures = f"{len(failed) - len(captures)} failed"
    failures += f", {_count(len(captures), 'capture')} failed" if captures else ""
    lines = [
        f"{counts.get(FINISHED, 0)} of {_count(len(asked), 'cell')} finished, {failures}. "
        f"This took {spoken_seconds(seconds)}: {', '.join(f'{name} {spoken_seconds(part)}' for name, part in parts)}.",
    ]
    for row in still_open[still_open["status"] != FAILED].itertuples():
        why = "not run, because its capture failed" if row.cell in without else row.status
        lines.append(f"  {why}: {row.cell}")
    if (still_open["status"] == ELSEWHERE).any():
        lines.append("Another process is at work on some cells; this one found nothing more to do.")
    lines += [f"All cells: {folder.summary_file}", *failed]  # last, where one looks first
    return "\n".join(lines)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"

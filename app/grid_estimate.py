"""`--dry-run`: every cell of a grid with its state, rows, bytes and time, and the totals. Writes nothing.

A capture's bytes are exact; its time is that of a few batches on the model itself (`estimate_capture`). A probe cell's
time is that of one outer fold on made-up features of the true shape, correlated as activations are, for one site or a
few heads of each width, times the folds and sites. Beware: real features may need more or fewer steps, and other work
on the machine counts; take it as right within a factor of two.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby

import numpy as np
import pandas as pd
import torch

from microtome.app.grid_config import GridConfig, ProbeSettings
from microtome.app.grid_folder import GridFolder
from microtome.app.grid_log import said_error
from microtome.app.grid_plan import CapturePlan, ProbePlan, needs_capture
from microtome.app.grid_probe import check_folds, labelled_rows
from microtome.app.grid_run import load_grid_model
from microtome.app.grid_summary import FINISHED
from microtome.app.machine import free_disk
from microtome.capture import LoadedModel, Store, capture, estimate_capture
from microtome.capture.batches import MAX_TOKENS
from microtome.data.spoken import spoken_bytes, spoken_seconds
from microtome.probes.bootstrap import bootstrap_accuracy, bootstrap_auroc
from microtome.probes.nested_fit import nested_fits
from microtome.probes.permutation import ridge_auroc

TO_DO, TO_RESUME, NOT_NEEDED, CANNOT = "to do", "to resume", "not needed", "cannot"
_MOST_TIMED, _TIMED_BYTES = 12, 2**23  # sites that are timed side by side
_MODEL_ERRORS = (ValueError, KeyError, IndexError, TypeError, OSError)  # of loading, dissecting, encoding


@dataclass(frozen=True)
class Shape:
    """Captured sites of one width. probes: how many of them, heads counted one by one."""

    width: int
    probes: int


def estimate_grid(
    config: GridConfig, folder: GridFolder, plans: Sequence[CapturePlan], steps: Sequence[str]
) -> pd.DataFrame:
    """One row per cell: step, cell, state, rows, nbytes, seconds, error. Bytes and seconds are of what is to come."""
    rows: list[dict] = []
    for model, of_model in groupby(plans, key=lambda plan: plan.cell.model):
        load = cache(lambda model=model: load_grid_model(model))
        for plan in of_model:
            row, shapes, n_rows = _capture_row(config, folder, plan, steps, load)
            rows += [row] if "capture" in steps else []
            if "probe" in steps:
                rows += [_probe_row(config, folder, plan, probe, row, shapes, n_rows) for probe in plan.probes]
    columns = ["step", "cell", "state", "rows", "nbytes", "seconds", "error"]
    types = {"rows": "Int64", "nbytes": "Int64", "seconds": "Float64", "error": "str"}
    return pd.DataFrame(rows, columns=columns).astype(types)


def print_estimate(
    config: GridConfig, folder: GridFolder, plans: Sequence[CapturePlan], steps: Sequence[str], *, as_json: bool = False
) -> pd.DataFrame:
    """Print the estimate, as a table or as JSON with totals, and return it."""
    from microtome.app.grid_commands import json_text, records

    table = estimate_grid(config, folder, plans, steps)
    free = free_disk(folder.path)
    totals = {
        "folder": str(folder.path),
        "seconds": float(table["seconds"].sum()),
        "nbytes": int(table["nbytes"].sum()),
        "free_bytes": free,
    }
    if as_json:
        print(json_text({"cells": records(table), "totals": totals}))
        return table
    widths = max(map(len, [*table["cell"], "cell"]))
    print(f"{'step':<8}{'cell':<{widths + 2}}{'state':<12}{'rows':>10}{'bytes':>10}{'time':>14}")
    for row in records(table):
        rows = "" if row["rows"] is None else f"{row['rows']:,}"
        size = "" if row["nbytes"] is None else spoken_bytes(row["nbytes"])
        took = "" if row["seconds"] is None else spoken_seconds(row["seconds"])
        print(f"{row['step']:<8}{row['cell']:<{widths + 2}}{row['state']:<12}{rows:>10}{size:>10}{took:>14}")
        if row["error"] is not None:
            print(f"{'':<8}{row['error']}")
    print(
        f"\nStill to do: {spoken_seconds(totals['seconds'])}, {spoken_bytes(totals['nbytes'])} to write; "
        f"{spoken_bytes(free)} are free where {folder.path} is or will be."
    )
    if totals["nbytes"] > free:
        print("That is more than is free. Keep fewer sites or texts, float16, or keep_activations: false.")
    return table


def _capture_row(
    config: GridConfig, folder: GridFolder, plan: CapturePlan, steps: Sequence[str], load: Callable[[], LoadedModel]
) -> tuple[dict, list[Shape], int | None]:
    """The capture's row, and the shapes and number of the rows that its probes will see."""
    row = {"step": "capture", "cell": plan.cell.name}
    if folder.is_captured(plan.cell):
        store = Store.open(folder.store(plan.cell))
        return row | {"state": FINISHED, "rows": store.n_rows}, _shapes(store), store.n_rows
    if not needs_capture(folder, plan, ("capture", *steps)):
        return row | {"state": NOT_NEEDED}, [], None
    settings = config.capture
    place = {
        "truncate": settings.truncate,
        "dtype": getattr(torch, settings.dtype),
        "max_tokens": settings.max_tokens or MAX_TOKENS,
    }
    texts, sites = plan.data.table["text"].tolist(), list(plan.cell.sites)
    try:
        loaded = load()
        estimate = estimate_capture(loaded, texts, sites, plan.cell.positions, **place)
        # two texts show how many heads there are, and how wide
        shapes = _shapes(capture(loaded, texts[:2], sites, plan.cell.positions, progress=False, **place))
    except _MODEL_ERRORS as error:
        return row | {"state": CANNOT, "error": said_error(error)}, [], None
    begun = folder.store_info(plan.cell)
    left, state = (1.0, TO_DO) if begun is None else (1 - begun.finished / begun.shards, TO_RESUME)
    sizes = {"rows": estimate.rows, "nbytes": round(estimate.nbytes * left), "seconds": (estimate.seconds or 0) * left}
    return row | {"state": state} | sizes, shapes, estimate.rows


def _probe_row(
    config: GridConfig,
    folder: GridFolder,
    plan: CapturePlan,
    probe: ProbePlan,
    captured: dict,
    shapes: list[Shape],
    n_rows: int | None,
) -> dict:
    row = {"step": "probe", "cell": probe.cell.name}
    facts = folder.probe_facts(probe.cell)
    if facts is not None:
        return row | {"state": FINISHED, "rows": facts["summary"]["rows"]}
    if captured["state"] == CANNOT or n_rows is None:
        return row | {"state": CANNOT, "error": "its capture cannot be made"}
    if plan.cell.positions == "all":
        known = min(n_rows, config.probe.rows or n_rows)  # how many tokens have the label shows in the capture
    else:
        numbers = pd.DataFrame({"text": np.arange(len(plan.data.table))})
        try:
            label, groups = labelled_rows(plan, probe, numbers, config)
            check_folds(label, groups, plan.data.table["text"].iloc[label.rows], config)
            known = len(label.rows)
        except (ValueError, TypeError) as error:
            return row | {"state": CANNOT, "error": said_error(error)}
    state = TO_RESUME if folder.checkpoint(probe.cell).is_dir() else TO_DO
    seconds = sum(_seconds_per_probe(known, shape.width, config.probe) * shape.probes for shape in shapes)
    return row | {"state": state, "rows": known, "seconds": seconds}


def _shapes(activations) -> list[Shape]:
    """How many probes there are of each width."""
    probes: dict[int, int] = {}
    for tensor in activations.tensors.values():
        heads = tensor.shape[1] if len(tensor.shape) == 3 else 1
        probes[tensor.shape[-1]] = probes.get(tensor.shape[-1], 0) + heads
    return [Shape(width, count) for width, count in sorted(probes.items())]


@cache
def _seconds_per_probe(rows: int, width: int, settings: ProbeSettings) -> float:
    """Seconds for one probe of this size: an outer fold of fits and of the null, times the folds, and its intervals."""
    print(f"timing probes of {rows:,} rows by {width}", file=sys.stderr)
    folds, inner_folds = settings.folds, settings.inner_folds
    per_fold = max(-(-rows // folds), 4 * inner_folds)
    n = per_fold * folds
    generator = torch.Generator().manual_seed(0)
    together = max(1, min(_MOST_TIMED, _TIMED_BYTES // (8 * n * width)))
    spectrum = torch.arange(1, width + 1).float() ** -0.7
    mixed = torch.randn(width, width, generator=generator) / width**0.5
    hidden = torch.randn(together, n, width, generator=generator) * spectrum
    test = torch.arange(n) % folds == torch.arange(folds)[:, None]
    inner = (torch.arange(n) // folds) % inner_folds == torch.arange(inner_folds)[:, None]
    nested = (inner & ~test[0])[None]
    # half of every fold is positive, in shuffles too: rows [per fold, fold] are shuffled down the columns
    told = (hidden[0, :, 0] + torch.randn(n, generator=generator)).view(per_fold, folds)
    halves = told.argsort(0).argsort(0) < per_fold // 2
    orders = torch.rand(settings.permutations, per_fold, folds, generator=generator).argsort(1)
    shuffles = halves.expand(len(orders), -1, -1).gather(1, orders).reshape(len(orders), n)
    positive = halves.reshape(n)
    features = hidden @ mixed
    started = time.perf_counter()
    [*_] = nested_fits(features, torch.stack([positive, *shuffles[:2]]), test[:1], nested)
    ridge_auroc(features, torch.cat([positive[None], shuffles]), test[:1])
    one_fold = time.perf_counter() - started
    started = time.perf_counter()
    scores = features[..., 0].double()
    groups = torch.arange(n)
    bootstrap_auroc(scores, positive, groups, test, draws=settings.bootstraps)
    bootstrap_accuracy((scores > 0) == positive, groups, draws=settings.bootstraps)
    intervals = 2 * (time.perf_counter() - started)  # of the labels and of the shuffled ones
    return (one_fold * folds + intervals) / together

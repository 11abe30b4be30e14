"""One probe cell: the label's rows of a finished capture, a probe at every site, and a run folder with what was found.

Labels of texts are taken from the data and not from the store, so that a label that was added to a grid later needs no
new capture. The folder's values/cell.json is written last: only a cell that has it is finished.
"""

import sys
import time

import numpy as np
import pandas as pd

from microtome.app.grid_config import GridConfig
from microtome.app.grid_folder import MARKER, GridFolder
from microtome.app.grid_labels import GridLabel, draw_groups, grid_label
from microtome.app.grid_plan import CapturePlan, ProbePlan
from microtome.app.grid_report import cell_report
from microtome.app.grid_summary import cell_words, sweep_facts
from microtome.capture import Store
from microtome.probes.folds import grouped_folds, nested_folds
from microtome.probes.groups import group_codes
from microtome.probes.methods import probe_method
from microtome.probes.sweep import sweep
from microtome.probes.target import target_of


def run_probe(plan: CapturePlan, probe: ProbePlan, folder: GridFolder, config: GridConfig) -> dict:
    """Probe a finished capture for one label and write the cell's folder. Returns its row of the summary.

    Raises FileNotFoundError if the capture is not there, and whatever the label, the store or the sweep finds wrong.
    """
    started = time.perf_counter()
    if not folder.is_captured(plan.cell):
        raise FileNotFoundError(
            f"captures/{plan.cell.name} is not there or not whole: run microtome capture CONFIG first, or microtome "
            "sweep CONFIG, which does both."
        )
    store = Store.open(folder.store(plan.cell))
    captured = folder.capture_facts(plan.cell) or {}
    label, groups = labelled_rows(plan, probe, store.rows, config)
    chosen = store if len(label.rows) == store.n_rows else store.select_rows(label.rows)
    check_folds(label, groups, None, config)
    result = sweep(
        chosen,
        label.values,
        groups=groups,
        target=label.kind,
        probe=config.probe.method,
        class_weight=config.probe.class_weight,
        folds=config.probe.folds,
        inner_folds=config.probe.inner_folds,
        permutations=config.probe.permutations,
        bootstraps=config.probe.bootstraps,
        seed=config.seed,
        checkpoint=folder.checkpoint(probe.cell),
        progress=sys.stderr.isatty(),
    )
    rows = chosen.rows[["text", "position", "token"]].assign(label=label.values, group=groups)
    run = folder.fresh_run(probe.cell, config)
    run.write_table("sites", result.table)
    run.write_table("rows", rows.assign(group=rows["group"].astype(str)))
    run.write_table("best_site_null", pd.DataFrame({"largest_statistic": result.null}))
    figures = result.plot()
    for name, figure in figures.items():
        run.write_figure(name, figure)
    result.save(run.path / "sweep")
    run.record(
        model=store.provenance["model"],
        data=plan.data.facts,
        capture={key: value for key, value in store.provenance.items() if key != "model"},
        label=label.says,
        rows={"captured": store.n_rows, "with_label": label.says["rows"], "probed": len(label.rows)},
        seconds=result.provenance["seconds"],
    )
    if config.report:
        run.write_report(cell_report(run, probe.cell, label.says, result, figures))
    row = cell_words(probe.cell) | {name: captured.get(name) for name in ("texts", "tokens", "nbytes")}
    row |= sweep_facts(result)
    row["unlabelled"] = store.n_rows - label.says["rows"]
    row |= {"seconds_capture": captured.get("seconds_capture"), "seconds_probe": time.perf_counter() - started}
    run.write_json(MARKER, {"settings": probe.settings, "summary": row})
    return row


def check_folds(label: GridLabel, groups: np.ndarray, texts: pd.Series | None, config: GridConfig) -> None:
    """Raise ValueError now for what the sweep would raise after the capture: leaking groups, or too few of them."""
    probe_method(config.probe.method, label.kind, class_weight=config.probe.class_weight).require(config.probe.folds)
    numbers = target_of(label.values, n_rows=len(label.values), kind=label.kind).codes
    try:
        codes = group_codes(groups, n_rows=len(groups), texts=texts)
    except ValueError as error:
        said, is_leak, _ = str(error).partition(" Give them one group")
        raise ValueError(f"{said} Give such rows one group in the data." if is_leak else said) from error
    test = grouped_folds(numbers, codes, folds=config.probe.folds, seed=config.seed)
    nested_folds(numbers, codes, test, folds=config.probe.inner_folds, seed=config.seed)


def labelled_rows(
    plan: CapturePlan, probe: ProbePlan, rows: pd.DataFrame, config: GridConfig
) -> tuple[GridLabel, np.ndarray]:
    """The captured rows to probe, each positive or not, and their groups.

    Raises ValueError and TypeError as `grid_label` and `draw_groups`.
    """
    column = probe.cell.label.column
    texts = rows["text"].to_numpy()
    values = rows[column] if column in plan.data.token_labels else plan.data.table[column].iloc[texts]
    label = grid_label(values.reset_index(drop=True), probe.cell.label)
    says = label.says | {"rows": len(label.rows)}
    groups = plan.data.table["group"].to_numpy()[texts[label.rows]]
    kept = np.arange(len(label.rows))
    if config.probe.rows is not None and len(kept) > config.probe.rows:
        kept = draw_groups(groups, rows=config.probe.rows, seed=config.seed)
    return GridLabel(label.rows[kept], label.values[kept], label.kind, says), groups[kept]

"""`microtome probe FEATURES`: a sweep over activations or features that are on disk, as a run folder with a report.

    <out>/<name>/          config.yaml, provenance, tables, figures, sweep/, report.html, values/probe.json (finished)
    <out>/.<name>.fits/    what is fitted so far; deleted at the end

Stopped at any moment, the same command goes on. A run of the same settings and the same files is not made again.
"""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
from filelock import FileLock, Timeout

from microtome.app.grid_cells import label_name, shortened
from microtome.app.grid_labels import grid_label
from microtome.app.machine import can_write
from microtome.app.probe_config import ProbeConfig
from microtome.app.sweep_words import print_best, sweep_headline, sweep_sections
from microtome.capture import Store
from microtome.capture.activations import Activations
from microtome.capture.feature_tables import read_features
from microtome.capture.store_files import is_store
from microtome.data.runs import Run
from microtome.data.spoken import spoken_seconds
from microtome.figures.report import html_report
from microtome.probes.groups import ROWS
from microtome.probes.sweep import sweep
from microtome.probes.sweep_result import BEST_COLUMNS, Sweep

MARKER = "probe"


def run_probe_of(config: ProbeConfig, *, as_json: bool = False) -> Sweep:
    """Probe it and print the strongest sites with intervals and controls.

    Raises FileNotFoundError for features that are not there, FileExistsError for another run of that name or another
    process at work on it, and what reading them, the label and the sweep raise.
    """
    from rich.console import Console  # late: importing rich draws from Python's random generator

    console = Console(stderr=as_json, highlight=False)
    name = config.name or f"{shortened(config.features.stem)}--{label_name(config.of_label)}"
    prints = {"file": _print_of(config.features), "rows_file": None if config.rows is None else _print_of(config.rows)}
    settings = config.model_dump(mode="json") | {"name": name, **prints}
    path = config.out.resolve() / name
    kept = config.out.resolve() / f".{name}.fits"
    if (path / "values" / f"{MARKER}.json").is_file():
        result = _finished(Run.open(path), settings)
        console.print(f"{path.name} is finished already.", markup=False, soft_wrap=True)
    else:
        Run.require_free(config.out, name)
        if not can_write(config.out):
            raise PermissionError(f"{config.out.absolute()} cannot be written to. Give another folder of runs (--out).")
        with _alone(kept, path):
            if (path / "values" / f"{MARKER}.json").is_file():  # another process was faster
                result = _finished(Run.open(path), settings)
            else:
                result = _probed(config, name, settings, kept, progress=not as_json)
            shutil.rmtree(kept, ignore_errors=True)
    if as_json:
        columns = [column for column in BEST_COLUMNS if column in result.table]
        best = result.best(10)[columns]
        print(json.dumps({"run": str(path), "best": json.loads(best.to_json(orient="records", double_precision=15))}))
        return result
    print_best(console, result)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    console.print(f"Report: {shown / 'report.html'}", markup=False, soft_wrap=True)
    return result


@contextmanager
def _alone(kept: Path, path: Path) -> Iterator[None]:
    """Hold the run, so that no two processes write it. Raises FileExistsError if another one does."""
    kept.mkdir(parents=True, exist_ok=True)
    lock = FileLock(kept / "lock")
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        said = f"another process works on {path}"
        raise FileExistsError(f"{said}. Wait for it, or give this run another name (--name).") from error
    try:
        yield
    finally:
        (kept / "lock").unlink(missing_ok=True)
        lock.release()
        if kept.is_dir() and not any(kept.iterdir()):
            kept.rmdir()


def features_of(config: ProbeConfig) -> Activations:
    """The features of a store, a saved folder or a file, with the columns of `rows` beside them."""
    if not config.features.exists():
        raise FileNotFoundError(f"there is no {config.features}; the working directory is {Path.cwd()}.")
    if not config.features.is_dir():
        return read_features(config.features, columns=config.columns, rows=config.rows)
    activations = Store.open(config.features) if is_store(config.features) else Activations.load(config.features)
    if config.columns is not None:
        raise ValueError("columns names feature columns of a table; of a folder of activations give sites.")
    if config.rows is None:
        return activations
    read = pd.read_parquet if config.rows.suffix.lower() == ".parquet" else pd.read_csv
    table = read(config.rows)
    if len(table) != activations.n_rows:
        raise ValueError(
            f"{config.rows} has {len(table)} rows, {config.features} {activations.n_rows}. They must agree."
        )
    rows = activations.rows.assign(**{column: table[column].to_numpy() for column in table})
    return Activations(rows, activations.tensors, activations.provenance)


def _probed(config: ProbeConfig, name: str, settings: dict, kept: Path, *, progress: bool) -> Sweep:
    started = time.perf_counter()
    activations = features_of(config)
    if config.where is not None:
        activations = activations.select_rows(config.where)
    for column in (config.label, *([] if config.group == ROWS else [config.group])):
        if column not in activations.rows:
            raise KeyError(f"there is no column {column!r}; the rows have {list(activations.rows)}.")
    label = grid_label(activations.rows[config.label], config.of_label)
    if len(label.rows) < activations.n_rows:
        activations = activations.select_rows(label.rows)
    kept.parent.mkdir(parents=True, exist_ok=True)
    result = sweep(
        activations,
        label.values,
        groups=ROWS if config.group == ROWS else config.group,
        sites=config.sites,
        target=label.kind,
        probe=config.method,
        class_weight=config.class_weight,
        types=config.types,
        folds=config.folds,
        inner_folds=config.inner_folds,
        permutations=config.permutations,
        bootstraps=config.bootstraps,
        seed=config.seed,
        checkpoint=kept,
        progress=progress,
    )
    run = Run.create(config.out, name, config, seed=config.seed)
    figures = result.plot()
    run.write_table("sites", result.table)
    run.write_table("baselines", result.baselines)
    for figure_name, figure in figures.items():
        run.write_figure(figure_name, figure)
    result.save(run.path / "sweep")
    run.record(features=activations.provenance, label=label.says, seconds=result.provenance["seconds"])
    lead = (
        f"A {result.provenance['settings']['probe']} probe at every site of {config.features}, for {config.label}. "
        "Scores are out of fold, folds keep groups together, intervals are from a bootstrap over groups; this took "
        f"{spoken_seconds(time.perf_counter() - started)}."
    )
    run.write_report(
        html_report(
            f"{config.features.stem}: {label_name(config.of_label)}",
            sweep_sections(result, figures),
            lead=lead,
            headline=sweep_headline(result),
            provenance=run.provenance,
            command=f"microtome probe {run.path / 'config.yaml'}",
        )
    )
    run.write_json(MARKER, {"settings": settings})
    return result


def _finished(run: Run, settings: dict) -> Sweep:
    held = run.json(MARKER)["settings"]
    changed = [key for key in settings if held.get(key) != settings[key]]
    if changed:
        said = "; ".join(f"{key} was {held.get(key)}, is {settings[key]}" for key in changed[:3])
        raise FileExistsError(f"{run.path} was made with other settings ({said}). Give this run another name (--name).")
    return Sweep.load(run.path / "sweep")


def _print_of(features: Path) -> list[int] | None:
    """Size and time of the file, or of what lists a folder's contents: another file is another run."""
    if features.is_dir():
        features = features / "manifest.json"
    if not features.exists():
        return None
    held = features.stat()
    return [held.st_size, held.st_mtime_ns]

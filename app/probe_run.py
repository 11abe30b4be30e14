"""`microtome probe FEATURES`: a sweep over activations or features that are on disk, as a run folder with a report.

    <out>/<name>/          config.yaml, provenance, tables, figures, sweep/, report.html, values/probe.json
    <out>/.<name>.fits/    what is fitted so far

How a run is stopped, resumed and finished: `run_folder.py`. Two runs are of the same settings if the contents of their
files are (by hash), wherever these lie.
"""

import json
import shlex
import time
from pathlib import Path
from typing import Any

from microtome.app.grid_cells import label_name, shortened
from microtome.app.grid_labels import grid_label
from microtome.app.probe_config import ProbeConfig
from microtome.app.repeatable import repeatable
from microtome.app.run_folder import RunFolder
from microtome.app.sweep_words import print_best, sweep_headline, sweep_sections
from microtome.capture import Store
from microtome.capture.activations import Activations
from microtome.capture.feature_columns import read_rows, require_column, said_columns
from microtome.capture.feature_leaks import features_that_tell, said_leaks
from microtome.capture.feature_tables import read_named_features
from microtome.capture.fingerprint import file_fingerprint, new_fingerprint
from microtome.capture.store_files import is_store, read_log
from microtome.data.runs import Run
from microtome.data.spoken import spoken_seconds
from microtome.figures.report import html_report
from microtome.probes.groups import ROWS
from microtome.probes.sweep import sweep
from microtome.probes.sweep_result import BEST_COLUMNS, Sweep


def run_probe_of(config: ProbeConfig, *, as_json: bool = False) -> Sweep:
    """Probe it and print the strongest sites with intervals and controls.

    Raises FileNotFoundError for features that are not there, FileExistsError for another run of that name,
    BlockingIOError for one that another process is making, and what reading, the label and the sweep raise.
    """
    from rich.console import Console  # late: importing rich draws from Python's random generator

    console = Console(stderr=as_json, highlight=False)
    for place in (config.features, config.rows):
        if place is not None and not place.expanduser().exists():
            raise FileNotFoundError(f"there is no {place}; the working directory is {Path.cwd()}.")
    name = config.name or _default_name(config)
    settings = _compared(config, name)
    folder = RunFolder.at(config.out, name, "probe")
    if folder.is_finished:
        result = _finished(folder, config, settings)
        console.print(f"{name} is finished already.", markup=False, soft_wrap=True)
    else:
        folder.require_free()
        result = _probed(config, folder, settings, console, progress=not as_json)
    if as_json:
        columns = [column for column in BEST_COLUMNS if column in result.table]
        best = result.best(10)[columns]
        print(
            json.dumps(
                {"run": str(folder.path), "best": json.loads(best.to_json(orient="records", double_precision=15))}
            )
        )
        return result
    print_best(console, result)
    console.print(f"Report: {folder.shown / 'report.html'}", markup=False, soft_wrap=True)
    return result


def features_of(config: ProbeConfig) -> tuple[Activations, dict[str, list[str]]]:
    """The features of a store, a saved folder or a file, with the columns of `rows` beside them; of a file that has
    names, also those by site."""
    features = config.features.expanduser()
    if not features.is_dir():
        return read_named_features(features, columns=config.columns, rows=config.rows, beside=config.no_features)
    activations = Store.open(features) if is_store(features) else Activations.load(features)
    if config.columns is not None:
        raise ValueError("columns names feature columns of a table; of a folder of activations give sites (--site).")
    if config.rows is None:
        return activations, {}
    if config.rows.suffix.lower() not in (".csv", ".parquet"):
        raise ValueError(f"{config.rows} has the suffix {config.rows.suffix!r}. Give a .csv or .parquet file of rows.")
    table = read_rows(config.rows.expanduser())
    if len(table) != activations.n_rows:
        raise ValueError(
            f"{config.rows} has {len(table)} rows, {config.features} {activations.n_rows}. They must agree."
        )
    rows = activations.rows.assign(**{column: table[column].to_numpy() for column in table})
    return Activations(rows, activations.tensors, activations.provenance), {}


def _probed(config: ProbeConfig, folder: RunFolder, settings: dict, console: Any, *, progress: bool) -> Sweep:
    started = time.perf_counter()
    activations, names = features_of(config)
    if names:
        console.print(said_columns(names), markup=False, soft_wrap=True)
    if config.where is not None:
        activations = activations.select_rows(config.where)
    for column in (config.label, *([] if config.group == ROWS else [config.group])):
        require_column(activations.rows, column, config.rows or config.features)
    label = grid_label(activations.rows[config.label], config.of_label)
    if len(label.rows) < activations.n_rows:
        activations = activations.select_rows(label.rows)
    leaks = features_that_tell(activations.tensors, label.values, names) if config.features.is_file() else []
    if leaks:
        console.print(f"Beware: {said_leaks(leaks)} Leave it out (--columns).", markup=False, soft_wrap=True)
    with folder.alone():
        if folder.is_finished:  # by a process that was at it a moment ago
            return _finished(folder, config, settings)
        result = sweep(
            activations,
            label.values,
            groups=config.group,
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
            checkpoint=folder.kept,
            progress=progress,
        )
        lead = (
            f"A {result.provenance['settings']['probe']} probe at every site of {config.features.name}, for "
            f"{config.label}. Scores are out of fold, folds keep groups together, intervals are from a bootstrap over "
            f"groups; this took {spoken_seconds(time.perf_counter() - started)}."
        )
        if leaks:
            lead += f" Beware: {said_leaks(leaks)}"
        run = Run.create(
            folder.kept,
            folder.path.name,
            repeatable(config, "features", "rows", "out"),
            seed=config.seed,
            overwrite=True,
        )
        run.record(features=activations.provenance, label=label.says, seconds=result.provenance["seconds"])
        _write(run, folder.path, result, lead, f"{config.features.stem}: {label_name(config.of_label)}")
        folder.finish(run, settings)
    return result


def _write(run: Run, path: Path, result: Sweep, lead: str, title: str) -> None:
    """Tables, figures, the sweep and the report of a run that will be moved to `path`."""
    figures = result.plot()
    run.write_table("sites", result.table)
    run.write_table("baselines", result.baselines)
    for name, figure in figures.items():
        run.write_figure(name, figure)
    result.save(run.path / "sweep")
    run.write_report(
        html_report(
            title,
            sweep_sections(result, figures),
            lead=lead,
            headline=sweep_headline(result),
            provenance=run.provenance,
            command=f"microtome probe {shlex.quote(str(path / 'config.yaml'))}",
        )
    )


def _default_name(config: ProbeConfig) -> str:
    parts = (shortened(config.features.stem), label_name(config.of_label), shortened(config.method or ""))
    return "--".join(part for part in parts if part)


def _compared(config: ProbeConfig, name: str) -> dict:
    """What makes two runs the same: the settings, with the contents of the files instead of their places."""
    settings = config.model_dump(mode="json", exclude={"features", "rows", "out"}) | {"name": name}
    rows = None if config.rows is None else _content(config.rows.expanduser())
    return settings | {"features": _content(config.features.expanduser()), "rows": rows}


def _finished(folder: RunFolder, config: ProbeConfig, settings: dict) -> Sweep:
    held = folder.held()["settings"]
    changed = [key for key in settings if held.get(key) != settings[key]]
    for key in ("features", "rows"):
        if key in changed and held.get(key) is not None and settings[key] is not None:
            place = getattr(config, key)
            raise FileExistsError(
                f"{place} has changed since {folder.path} was made of it. Give this run another name (--name)."
            )
    folder.require_same(settings, model=str(config.features))
    return Sweep.load(folder.path / "sweep")


def _content(place: Path) -> str | None:
    """XXH3-128 of a file; of a store, of the hashes of its shards; of saved activations, of their manifest."""
    if not place.is_dir():
        return file_fingerprint(place)
    if is_store(place):
        digest = new_fingerprint()
        for _, record in sorted(read_log(place).items()):
            digest.update(f"{record.tensors_digest} {record.table_digest}\n".encode())
        return digest.hexdigest()
    manifest = place / "manifest.json"
    return file_fingerprint(manifest) if manifest.is_file() else None

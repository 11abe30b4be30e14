"""`microtome heads`: the roles of a model's attention heads, as a run folder with a report.

    <out>/<name>/          config.yaml, provenance, tables/heads, figures, report.html, values/heads.json
    <out>/.<name>.heads/   passes while they run, and the folder while it is written; deleted at the end
    <out>/.<name>.lock     held by the one process that makes the run

Stopped or killed at any moment, the same command goes on where it was; the run folder appears whole. A run of the same
settings and texts is not made again.
"""

import json
import os
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock, Timeout

from microtome.app.grid_cells import shortened
from microtome.app.heads_config import HeadsConfig
from microtome.app.heads_words import heads_headline, heads_sections, print_heads
from microtome.app.machine import can_write
from microtome.capture.models import load_model
from microtome.data.catalogue import DATA_SETS, load_data
from microtome.data.runs import Run
from microtome.data.spoken import spoken_seconds
from microtome.data.table import read_table, table_sha256
from microtome.figures.report import html_report
from microtome.lenses.head_roles import ROLE_SCORES, HeadRoles, head_roles

MARKER = "heads"


def run_heads(config: HeadsConfig, *, as_json: bool = False) -> HeadRoles:
    """Find the roles and print the strongest heads of each with intervals and controls.

    Raises FileExistsError for another run of that name, BlockingIOError for one that another process is making, and
    what reading the texts, loading the model and `head_roles` raise.
    """
    from rich.console import Console  # late: importing rich draws from Python's random generator

    console = Console(stderr=as_json, highlight=False)
    table, facts = _texts(config)
    name = config.name or f"heads--{shortened(Path(config.model).name)}--{shortened(Path(config.data).stem)}"
    settings = config.model_dump(mode="json", exclude={"out", "data", "name"}) | {
        "texts_sha256": facts["table_sha256"][:12]
    }
    path = config.out.expanduser().resolve() / name
    if _is_finished(path):
        found = _finished(path, settings)
        console.print(f"{path.name} is finished already.", markup=False, soft_wrap=True)
    else:
        _require_free(path)
        if not can_write(path.parent):
            raise PermissionError(f"{path.parent} cannot be written to. Give another folder of runs (--out).")
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path):
            if _is_finished(path):  # by a process that was at it a moment ago
                found = _finished(path, settings)
            else:
                found = _made(config, table, facts, settings, path, progress=not as_json)
    if as_json:
        print(json.dumps({"run": str(path), "thresholds": dict(found.thresholds), "heads": _strongest(found)}))
        return found
    print_heads(console, found)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    console.print(f"Report: {shown / 'report.html'}", markup=False, soft_wrap=True)
    return found


def _texts(config: HeadsConfig) -> tuple[pd.DataFrame, dict]:
    """The texts drawn, columns text and group, and what they are."""
    if config.data in DATA_SETS:
        drawn = load_data(config.data, texts=min(config.texts, DATA_SETS[config.data].rows), seed=config.seed)
        return drawn.table.rename(columns={DATA_SETS[config.data].group: "group"}), drawn.facts
    table = read_table(config.data, text=config.text_column, label=None, group=config.group_column)
    if len(table) > config.texts:
        table = table.sample(config.texts, random_state=config.seed).sort_index().reset_index(drop=True)
    if "group" not in table:
        table = table.assign(group=range(len(table)))
    kept = table[["text", "group"]]
    return kept, {"name": Path(config.data).name, "texts": len(kept), "table_sha256": table_sha256(kept)}


def _made(
    config: HeadsConfig, table: pd.DataFrame, facts: dict, settings: dict, path: Path, *, progress: bool
) -> HeadRoles:
    started = time.perf_counter()
    kept = path.with_name(f".{path.name}.heads")
    found = head_roles(
        load_model(config.model),
        table["text"].tolist(),
        documents=pd.factorize(table["group"])[0].tolist(),
        thresholds=config.thresholds,
        copy_length=config.copy_length,
        made_texts=config.made_texts,
        with_fresh=config.untrained,
        bootstraps=config.bootstraps,
        seed=config.seed,
        max_length=config.max_length,
        checkpoint=kept / "passes",
        progress=progress,
    )
    seconds = time.perf_counter() - started
    absolute = {"out": config.out.expanduser().absolute()}
    if config.data not in DATA_SETS:
        absolute["data"] = str(Path(config.data).expanduser().absolute())
    run = Run.create(kept, path.name, config.model_copy(update=absolute), seed=config.seed, overwrite=True)
    run.record(data=facts, heads=found.provenance, seconds=round(seconds, 1))
    run.write_table("heads", found.table)
    sections = heads_sections(found)
    for number, section in enumerate(sections):
        if section.figure is not None:
            run.write_figure(("roles", "scores")[min(number, 1)], section.figure)
    command = f"microtome heads --config {shlex.quote(str(path / 'config.yaml'))}"
    lead = (
        f"What each attention head of {config.model} looks at, over {facts['texts']} texts of {facts['name']}, "
        f"repeated random tokens and texts with a needle; queries from position 8 on. This took "
        f"{spoken_seconds(seconds)}."
    )
    title = f"Heads of {Path(config.model).name}"
    run.write_report(
        html_report(
            title,
            sections,
            lead=lead,
            headline=heads_headline(found),
            provenance=run.provenance,
            command=command,
        )
    )
    run.write_json(MARKER, {"settings": settings, "thresholds": dict(found.thresholds)})
    _require_free(path)
    os.replace(run.path, path)
    shutil.rmtree(kept, ignore_errors=True)
    return found


def _strongest(found: HeadRoles) -> dict[str, list[dict]]:
    """The five strongest heads of each role, as plain values."""
    result = {}
    for role, score in ROLE_SCORES.items():
        columns = ["layer", "head", "kv_head", "roles", score, f"{score}_low", f"{score}_high", f"fresh_{score}"]
        rows = found.strongest(role, 5)
        rows = rows[[column for column in columns if column in rows]]
        result[role] = json.loads(rows.to_json(orient="records", double_precision=15))
    return result


def _is_finished(path: Path) -> bool:
    return (path / "values" / f"{MARKER}.json").is_file()


def _require_free(path: Path) -> None:
    if path.exists():
        raise FileExistsError(f"{path} is there and no finished run of heads. Give this run another name (--name).")
    Run.require_free(path.parent, path.name)


def _finished(path: Path, settings: dict[str, Any]) -> HeadRoles:
    run = Run.open(path)
    held = run.json(MARKER)
    if changed := [key for key in settings if held["settings"].get(key) != settings[key]]:
        said = "; ".join(f"{key} was {held['settings'].get(key)}, is {settings[key]}" for key in changed[:3])
        raise FileExistsError(f"{path} was made with other settings ({said}). Give this run another name (--name).")
    return HeadRoles(run.table("heads"), held["thresholds"], run.provenance["heads"])


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """The right to make a run, for one process at a time; a killed one loses it. BlockingIOError if another has it."""
    file = path.with_name(f".{path.name}.lock")
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise BlockingIOError(
            f"{path} is being made by another process. Wait for it, or give this run another name (--name)."
        ) from error
    try:
        yield
        file.unlink(missing_ok=True)
    finally:
        lock.release()

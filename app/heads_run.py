"""`microtome heads`: the roles of a model's attention heads, as a run folder with a report.

    <out>/<name>/          config.yaml, provenance, tables/heads, figures, report.html, values/heads.json
    <out>/.<name>.fits/    passes while they run

How a run is stopped, resumed and finished: `run_folder.py`.
"""

import json
import shlex
import time
from pathlib import Path
from typing import Any

import pandas as pd

from microtome.app.drawn_texts import drawn_texts
from microtome.app.grid_cells import shortened
from microtome.app.heads_config import HeadsConfig
from microtome.app.heads_words import heads_headline, heads_sections, print_heads
from microtome.app.run_folder import RunFolder
from microtome.capture.models import LoadedModel, load_model
from microtome.data.catalogue import DATA_SETS
from microtome.data.runs import Run
from microtome.data.spoken import spoken_seconds
from microtome.figures.report import html_report
from microtome.lenses.head_roles import ROLE_SCORES, HeadRoles, head_roles


def run_heads(config: HeadsConfig, *, as_json: bool = False) -> HeadRoles:
    """Find the roles and print the strongest heads of each with intervals and controls.

    Raises FileExistsError for another run of that name, BlockingIOError for one that another process is making, and
    what reading the texts, loading the model and `head_roles` raise.
    """
    from rich.console import Console  # late: importing rich draws from Python's random generator

    console = Console(stderr=as_json, highlight=False)
    table, facts = drawn_texts(
        config.data,
        texts=config.texts,
        text_column=config.text_column,
        group_column=config.group_column,
        seed=config.seed,
    )
    name = config.name or f"heads--{shortened(Path(config.model).name)}--{shortened(Path(config.data).stem)}"
    settings = config.model_dump(mode="json", exclude={"out", "data", "name"}) | {
        "texts_sha256": facts["table_sha256"][:12]
    }
    folder = RunFolder.at(config.out, name, "heads")
    if not folder.is_finished:
        folder.require_free()
    model = load_model(config.model)
    if folder.is_finished:
        found = _finished(folder, settings, model)
        console.print(f"{name} is finished already.", markup=False, soft_wrap=True)
    else:
        with folder.alone():
            if folder.is_finished:  # by a process that was at it a moment ago
                found = _finished(folder, settings, model)
            else:
                found = _made(config, model, table, facts, settings, folder, progress=not as_json)
    if as_json:
        print(json.dumps({"run": str(folder.path), "thresholds": dict(found.thresholds), "heads": _strongest(found)}))
        return found
    print_heads(console, found)
    console.print(f"Report: {folder.shown / 'report.html'}", markup=False, soft_wrap=True)
    return found


def _made(
    config: HeadsConfig,
    model: LoadedModel,
    table: pd.DataFrame,
    facts: dict,
    settings: dict,
    folder: RunFolder,
    *,
    progress: bool,
) -> HeadRoles:
    started = time.perf_counter()
    found = head_roles(
        model,
        table["text"].tolist(),
        documents=pd.factorize(table["group"])[0].tolist(),
        thresholds=config.thresholds,
        copy_length=config.copy_length,
        made_texts=config.made_texts,
        with_fresh=config.untrained,
        bootstraps=config.bootstraps,
        seed=config.seed,
        max_length=config.max_length,
        checkpoint=folder.kept / "passes",
        progress=progress,
    )
    seconds = time.perf_counter() - started
    absolute = {"out": config.out.expanduser().absolute()}
    if config.data not in DATA_SETS:
        absolute["data"] = str(Path(config.data).expanduser().absolute())
    run = Run.create(
        folder.kept, folder.path.name, config.model_copy(update=absolute), seed=config.seed, overwrite=True
    )
    run.record(data=facts, heads=found.provenance, seconds=round(seconds, 1))
    run.write_table("heads", found.table)
    sections = heads_sections(found)
    for number, section in enumerate(sections):
        if section.figure is not None:
            run.write_figure(("roles", "scores")[min(number, 1)], section.figure)
    command = f"microtome heads --config {shlex.quote(str(folder.path / 'config.yaml'))}"
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
    weights = model.provenance.weight_sha256
    folder.finish(run, settings, weights=weights, thresholds=dict(found.thresholds))
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


def _finished(folder: RunFolder, settings: dict[str, Any], model: LoadedModel) -> HeadRoles:
    folder.require_same(settings, model=model.provenance.name, weights=model.provenance.weight_sha256)
    run = Run.open(folder.path)
    return HeadRoles(run.table("heads"), folder.held()["thresholds"], run.provenance["heads"])

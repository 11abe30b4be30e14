"""`microtome lens`: what the depths of a model say in words, as a run folder with tables, figures and a report.

    <out>/<name>/          config.yaml, provenance, tables, figures, report.html, values/lens.json, tuned/ (if trained)
    <out>/.<name>.fits/    moments, training and statistics so far

How a run is stopped, resumed and finished: `run_folder.py`. Where a lens is fitted, three of five documents are for
that and the curves are of the others.
"""

import hashlib
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from microtome.app.drawn_texts import drawn_texts
from microtome.app.kept_fits import made_once
from microtome.app.lens_config import LensConfig
from microtome.app.repeatable import repeatable
from microtome.app.run_folder import RunFolder
from microtome.capture.fingerprint import file_fingerprint
from microtome.capture.models import LoadedModel, load_model
from microtome.data.runs import Run
from microtome.data.spoken import spoken_seconds
from microtome.figures.lens_curves import lens_curves
from microtome.figures.lens_table import lens_table as lens_table_figure
from microtome.figures.report import Section, html_report
from microtome.lenses.early_exit import early_exits
from microtome.lenses.lens import Lens, depths_of, logit_lens_of
from microtome.lenses.lens_statistics import LensStatistics, join_statistics, lens_statistics
from microtome.lenses.lens_statistics_files import read_statistics, write_statistics
from microtome.lenses.lens_table import lens_table
from microtome.lenses.ridge_lens import ridge_to_last, translated_lens
from microtome.lenses.tuned_files import FACTS
from microtome.lenses.tuned_lens import TunedLens
from microtome.lenses.tuned_training import TunedSettings, fit_tuned_lens

TEXTS_OF_A_PART = 16
FITTED_SHARE = 0.6
SHOWN_TOKENS = 14


@dataclass(frozen=True, eq=False)
class LensRun:
    """A finished run: its folder, and its tables by name (`cells`, `curves`, `early_exit`, `training`)."""

    path: Path
    tables: dict[str, pd.DataFrame]


def run_lens(config: LensConfig, *, progress: bool = True, say: Any = print) -> LensRun:
    """Make the run, or read it if it is there already.

    Raises FileExistsError for another run of that name, BlockingIOError for one that another process makes, ValueError
    and KeyError for a model, data set or lens that cannot be used.
    """
    folder = RunFolder.at(config.out, config.name or _default_name(config), "lens")
    table, facts = _drawn(config)
    settings = _compared(config, facts)
    return made_once(
        folder,
        settings,
        lambda: load_model(config.model),
        lambda model: _made(config, model, table, facts, folder, settings, progress),
        lambda model: LensRun(
            folder.path,
            folder.finished_tables(settings, model=config.model, weights=model.provenance.weight_sha256),
        ),
        say,
    )


def _made(
    config: LensConfig,
    model: LoadedModel,
    table: pd.DataFrame | None,
    facts: dict,
    folder: RunFolder,
    settings: dict,
    progress: bool,
) -> LensRun:
    started, kept = time.perf_counter(), folder.kept
    fitting, reading = _shares(config, table)
    lenses, tuned = _lenses(config, model, fitting, kept, progress)
    tables: dict[str, pd.DataFrame] = {}
    if config.text is not None:
        found = lens_table(
            model,
            config.text,
            lenses,
            answers=config.target,
            top=config.top,
            truncate="right",
            max_length=config.max_length,
        )
        tables["cells"] = found.table
    if reading is not None:
        statistics = _statistics(config, model, lenses, reading, kept, progress)
        tables["curves"] = pd.concat(
            [each.curve(sinks=kind, seed=config.seed) for each in statistics.values() for kind in ("without", "with")],
            ignore_index=True,
        )
        if len(set(reading[1])) > 1:  # rules are tuned on some documents and tested on others
            tables["early_exit"] = early_exits(statistics, seed=config.seed).table
    if tuned is not None and config.fit_tuned:
        tables["training"] = tuned.history
    run = Run.create(kept, folder.path.name, repeatable(config, "tuned", "out"), seed=config.seed, overwrite=True)
    seconds = time.perf_counter() - started
    run.record(model=model.provenance.to_dict(), data=facts, seconds=round(seconds, 3))
    for name, table in tables.items():
        run.write_table(name, table)
    figures = _figures(tables)
    for name, figure in figures.items():
        run.write_figure(name, figure)
    if tuned is not None and config.fit_tuned:
        tuned.save(run.path / "tuned")
    run.write_report(
        html_report(
            f"{config.model}: {', '.join(config.lenses)} lens",
            _sections(tables, figures),
            lead=f"What the stream says at every depth when the model's own end reads it; this took "
            f"{spoken_seconds(seconds)}. KL and entropy in nats.",
            provenance=run.provenance,
            command=f"microtome lens --config {shlex.quote(str(folder.path / 'config.yaml'))}",
        )
    )
    folder.finish(run, settings, weights=model.provenance.weight_sha256)
    return LensRun(folder.path, tables)


def _drawn(config: LensConfig) -> tuple[pd.DataFrame | None, dict]:
    """The texts drawn, columns text and group, and what they are; None without data."""
    if config.data is None:
        return None, {}
    return drawn_texts(
        config.data,
        texts=config.texts,
        text_column=config.text_column,
        group_column=config.group_column,
        seed=config.seed,
    )


def _shares(
    config: LensConfig, table: pd.DataFrame | None
) -> tuple[tuple[list, list] | None, tuple[list, list] | None]:
    """(texts, documents) to fit on, and to read; None where there are none."""
    if table is None:
        return None, None
    documents = pd.factorize(table["group"])[0]
    texts = table["text"].tolist()
    if not (config.fit_tuned or "ridge" in config.lens):
        return None, (texts, documents.tolist())
    names = np.unique(documents)
    if len(names) < 5:
        raise ValueError(
            f"the {len(texts)} texts are of {len(names)} documents; fitting needs 5, as whole documents are held out. "
            "Give texts of more documents (--texts, --group-column)."
        )
    order = np.random.default_rng([config.seed, 7]).permutation(len(names))
    fitted = np.isin(documents, names[order[: round(FITTED_SHARE * len(names))]])

    def of(rows: np.ndarray) -> tuple[list, list]:
        return [text for text, keep in zip(texts, rows, strict=True) if keep], documents[rows].tolist()

    return of(fitted), of(~fitted)


def _lenses(
    config: LensConfig, model: LoadedModel, fitting: tuple[list, list] | None, kept: Path, progress: bool
) -> tuple[list[Lens], TunedLens | None]:
    last = len(depths_of(model)) - 1
    depths = None if config.depths is None else sorted(set(config.depths) - {last})
    if depths is not None and any(not 0 <= depth < last for depth in depths):
        raise ValueError(f"depths are {list(config.depths)}. This model has depths 0 to {last}.")
    cut = {"truncate": "right", "max_length": config.max_length}
    maps, tuned = None, None
    if "ridge" in config.lens or (config.fit_tuned and config.start == "ridge"):
        maps = ridge_to_last(
            model,
            fitting[0],
            documents=fitting[1],
            depths=depths,
            save=kept / "moments",
            checkpoint_minutes=2.0,
            seed=config.seed,
            progress=progress,
            **cut,
        )
    if config.fit_tuned:
        how = TunedSettings(
            steps=config.steps,
            tokens=config.tokens,
            optimizer=config.optimizer,
            rate=config.used_rate,
            seed=config.seed,
        )
        try:
            tuned = fit_tuned_lens(
                model,
                fitting[0],
                documents=fitting[1],
                depths=depths,
                start=maps if config.start == "ridge" else "zero",
                settings=how,
                checkpoint=kept / "training",
                progress=progress,
                **cut,
            )
        except FloatingPointError as error:
            raise ValueError(f"{error} (--rate, --start zero)") from error
    elif config.tuned is not None:
        tuned = TunedLens.load(config.tuned.expanduser())
    known = depths_of(model)
    sites = None if depths is None else [*(known[depth] for depth in depths), known[-1]]
    made = {
        "logit": lambda: logit_lens_of(model, sites),
        "ridge": lambda: translated_lens(model, maps),
        "tuned": lambda: tuned.lens(model),
    }
    return [made[name]() for name in config.lenses], tuned


def _statistics(
    config: LensConfig,
    model: LoadedModel,
    lenses: Sequence[Lens],
    reading: tuple[list, list],
    kept: Path,
    progress: bool,
) -> dict[str, LensStatistics]:
    """Part after part, each kept as soon as it is there."""
    folder = kept / "statistics"
    folder.mkdir(parents=True, exist_ok=True)
    texts, documents = reading
    parts: dict[str, list[LensStatistics]] = {lens.name: [] for lens in lenses}
    for start in range(0, len(texts), TEXTS_OF_A_PART):
        files = {lens.name: folder / f"{start:06d}-{lens.name}.safetensors" for lens in lenses}
        if all(file.is_file() for file in files.values()):
            found = {name: read_statistics(file) for name, file in files.items()}
        else:
            rows = slice(start, start + TEXTS_OF_A_PART)
            found = lens_statistics(
                model,
                texts[rows],
                lenses,
                documents=documents[rows],
                top=config.top,
                progress=progress,
                truncate="right",
                max_length=config.max_length,
            )
            for name, file in files.items():
                write_statistics(file, found[name])
        for name, each in found.items():
            parts[name].append(each)
    return {name: join_statistics(each) for name, each in parts.items()}


def _figures(tables: dict[str, pd.DataFrame]) -> dict[str, Any]:
    figures = {}
    if "cells" in tables:
        last = int(tables["cells"]["position"].max()) + 1
        for name, rows in tables["cells"].groupby("lens", sort=False):
            shown = (max(0, last - SHOWN_TOKENS), last)
            figures[f"table_{name}"] = lens_table_figure(rows, positions=shown)
    if "curves" in tables:
        plain = tables["curves"][tables["curves"]["sinks"] == "without"]
        for value in ("kl", "agrees", "cross_entropy"):
            figures[f"curve_{value}"] = lens_curves(plain, value=value)
    return figures


def _sections(tables: dict[str, pd.DataFrame], figures: dict[str, Any]) -> list[Section]:
    sections = []
    for name, figure in figures.items():
        kind, _, of = name.partition("_")
        if kind == "table":
            cells = tables["cells"][tables["cells"]["lens"] == of]
            followed = [name for name in cells if name.startswith(("prob of ", "rank of "))]
            columns = ["depth", "position", "token", "word", "prob", "kl", "entropy", "rank", "final_word", *followed]
            shown = cells[columns]
            sections.append(Section(f"The text under the {of} lens", figure=figure, table=shown, table_name=name))
        else:
            table = tables["curves"] if of == "kl" else None
            caption = "Without first tokens and BOS; bands are 95 % intervals of a bootstrap over documents."
            sections.append(
                Section(f"By depth: {of.replace('_', ' ')}", figure=figure, caption=caption, table=table, table_name=of)
            )
    if "early_exit" in tables:
        says = (
            "Thresholds are tuned on half of the documents and reported on the others. A product with the unembedding "
            "is counted at every depth that is tried (head_products); keys and values of skipped blocks are not made."
        )
        sections.append(Section("Early exit", text=says, table=tables["early_exit"], table_name="early_exit"))
    if "training" in tables:
        sections.append(Section("Training of the tuned lens", table=tables["training"], table_name="training"))
    return sections


def _default_name(config: LensConfig) -> str:
    data = [] if config.data is None else [_named(Path(config.data).stem)]
    parts = ["lens", _named(Path(config.model).stem) or "model", *data, *config.lenses]
    return "--".join([*parts, *([_slug(config.text)] if config.text else [])])


def _slug(text: str) -> str:
    """The first words of a text and a hash of it, for a name."""
    words = "-".join(re.findall(r"[a-z0-9]+", text.lower())[:4])[:24].strip("-")
    return f"{words or 'text'}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def _named(stem: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in stem).strip("-")


def _compared(config: LensConfig, facts: dict) -> dict:
    """What makes two runs the same but the model's weights: the settings, with contents of files for their places."""
    settings = config.model_dump(mode="json", exclude={"out", "name", "tuned", "data"})
    tuned = None if config.tuned is None else config.tuned.expanduser() / FACTS
    held = file_fingerprint(tuned) if tuned is not None and tuned.is_file() else None if tuned is None else str(tuned)
    return settings | {"tuned": held, "data": facts.get("name"), "texts_sha256": facts.get("table_sha256")}

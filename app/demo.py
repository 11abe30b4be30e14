"""`microtome demo`: texts to activations of every layer and head, a probe at each, and a report of what was found.

The run folder holds the settings, the provenance of model and data, the texts that were used, the table of all sites,
probe directions, figures, and one HTML page that opens offline.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from microtome.app.config import DemoConfig
from microtome.app.machine import can_write
from microtome.app.sweep_words import SHOWN, print_best, said_best_baseline
from microtome.capture.collect import capture
from microtome.capture.dissect import dissect
from microtome.capture.models import LoadedModel, load_model
from microtome.data.runs import Run
from microtome.data.sentiment import DOMAINS, SENTIMENT_ARCHIVE, sentiment
from microtome.data.table import read_table, table_sha256
from microtome.data.text_groups import text_groups
from microtome.data.toy import toy_sentiment
from microtome.figures.report import Section, html_report
from microtome.probes.folds import grouped_folds, nested_folds
from microtome.probes.groups import group_codes
from microtome.probes.sweep import Sweep, sweep

if TYPE_CHECKING:
    pass

SITES = ("resid_post", "z")


@dataclass(frozen=True)
class DemoResult:
    """What a demo run found.

    Attributes:
        run: its folder.
        sweep: scores, controls and null of every site.
        seconds: time of each step.
    """

    run: Run
    sweep: Sweep
    seconds: dict[str, float]


def demo_data(config: DemoConfig) -> pd.DataFrame:
    """The texts of a demo run: columns `text`, `label` (True for the positive class), `class_name`, `group`.

    Raises:
        ValueError: a file whose labels do not have exactly two values, or fewer texts than asked for.
    """
    if config.data == "sentiment":
        per_domain = 2 * round(config.texts / (2 * len(DOMAINS)))
        return _named(sentiment(per_domain=per_domain, seed=config.seed))
    if config.data == "toy":
        return _named(toy_sentiment(min(config.texts, 200), seed=config.seed))
    group = None if config.group_column == "texts" else config.group_column
    table = read_table(config.data, text=config.text_column, label=config.label_column, group=group)
    values = sorted(table["label"].unique())
    if len(values) != 2:
        raise ValueError(
            f"{config.data}: column {config.label_column!r} has {len(values)} values ({values[:5]}); a probe map "
            "needs two."
        )
    table = table.assign(label=table["label"] == values[1], class_name=table["label"].astype(str))
    if "group" not in table:
        table = table.assign(group=text_groups(table["text"].tolist()))
    return table if len(table) <= config.texts else table.sample(config.texts, random_state=config.seed).sort_index()


def _named(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(class_name=table["label"].map({True: "positive", False: "negative"}))


def run_demo(config: DemoConfig, *, as_json: bool = False) -> DemoResult:
    """Run it all and print the strongest sites; everything is written to `config.out / config.name`.

    Raises:
        ValueError, KeyError: settings or data that cannot be used; the message says which and why.
    """
    from rich.console import Console  # late: importing rich draws from Python's random generator

    console = Console(stderr=as_json, highlight=False)
    seconds: dict[str, float] = {}
    started = time.perf_counter()

    def took(step: str) -> None:
        nonlocal started
        seconds[step] = round(time.perf_counter() - started, 2)
        started = time.perf_counter()

    Run.require_free(config.out, config.name, overwrite=True)
    if not can_write(config.out):
        raise PermissionError(f"{config.out.absolute()} cannot be written to. Give another folder of runs (--out).")
    table = demo_data(config).reset_index(drop=True)
    _check_folds(table, config)
    took("data")
    loaded = load_model(config.model)
    took("load")
    anatomy = dissect(loaded)
    took("dissect")
    held = sum(i.holds for i in anatomy.proof)
    console.print(
        f"{loaded.provenance.name}: {anatomy.layers} layers, d_model {anatomy.d_model}, "
        f"{held} of {len(anatomy.proof)} identities hold; {len(table)} texts, {table['group'].nunique()} groups.",
        markup=False,
        soft_wrap=True,
    )
    activations = capture(
        loaded,
        table["text"].tolist(),
        SITES,
        config.position,
        labels=table.drop(columns="text"),
        truncate=config.truncate,
        progress=not as_json,
    )
    took("capture")
    result = sweep(
        activations,
        "label",
        groups="group",
        folds=config.folds,
        inner_folds=config.inner_folds,
        permutations=config.permutations,
        bootstraps=config.bootstraps,
        seed=config.seed,
        progress=not as_json,
    )
    took("sweep")
    run = Run.create(config.out, config.name, config, seed=config.seed, overwrite=True)
    write_run(run, config, loaded, table, activations.provenance, result, seconds)
    took("report")
    run.record(seconds=seconds)
    if as_json:
        print(json.dumps({"run": str(run.path), "seconds": seconds, "best": _records(result.best(SHOWN))}))
    else:
        print_best(console, result)
        report = _from_here(run.path) / "report.html"
        console.print(f"{sum(seconds.values()):.0f} s in all. Report: {report}", markup=False, soft_wrap=True)
        if run.previous.is_dir():
            said = f"The run of this name before it is kept in {_from_here(run.previous)}, until the next one."
            console.print(said, markup=False, soft_wrap=True)
    return DemoResult(run, result, seconds)


def _check_folds(table: pd.DataFrame, config: DemoConfig) -> None:
    """Raise now what the sweep would raise after the capture: leaking groups, too few of them for the folds."""
    labels = table["label"].to_numpy().astype(np.int64)
    codes = group_codes(table["group"], n_rows=len(table), texts=table["text"])
    test = grouped_folds(labels, codes, folds=config.folds, seed=config.seed)
    nested_folds(labels, codes, test, folds=config.inner_folds, seed=config.seed)


def write_run(
    run: Run,
    config: DemoConfig,
    loaded: LoadedModel,
    table: pd.DataFrame,
    captured: dict,
    result: Sweep,
    seconds: dict[str, float],
) -> None:
    """Tables, arrays, figures and the report of a demo run."""
    figures = result.plot()
    run.write_table("sites", result.table)
    run.write_table("texts", table)
    run.write_table("best_site_null", pd.DataFrame({"largest_statistic": result.null}))
    run.write_table("proof", dissect(loaded).proof_table())
    for name, figure in figures.items():
        run.write_figure(name, figure)
    result.save(run.path / "sweep")
    run.record(model=loaded.provenance.to_dict(), data=_data_facts(config, table), capture=captured)
    run.write_report(demo_report(run, config, loaded, table, result, figures, seconds))


def _data_facts(config: DemoConfig, table: pd.DataFrame) -> dict[str, str | int]:
    facts: dict[str, str | int] = {"source": config.data, "rows": len(table), "table_sha256": table_sha256(table)}
    facts["positive_class"] = str(table.loc[table["label"].astype(bool), "class_name"].iloc[0])
    if config.data == "sentiment":
        facts |= {"package": SENTIMENT_ARCHIVE.requirement, "archive_sha256": SENTIMENT_ARCHIVE.sha256}
    return facts


def demo_report(
    run: Run,
    config: DemoConfig,
    loaded: LoadedModel,
    table: pd.DataFrame,
    result: Sweep,
    figures: dict[str, go.Figure],
    seconds: dict[str, float],
) -> str:
    """The run as one HTML page."""
    best_head, best_layer = (_best_of(result.table, heads=heads) for heads in (True, False))
    beyond = result.table[result.table["p_best_site"] < 0.05]
    heads, streams = (
        int(rows.notna().sum()) for rows in (beyond["head"], beyond["layer"].where(beyond["head"].isna()))
    )
    headline = {
        "best layer": _said(best_layer),
        "best head": _said(best_head),
        "beyond the best of 5 % of permuted labellings": f"{heads} heads, {streams} layers",
        "texts": f"{len(table)} in {table['group'].nunique()} groups",
        "without the model, at best": said_best_baseline(result),
    }
    sections = [
        Section("Which heads", _HEADS, figures["head_map"], _MAP, _kind(result.table, "z"), "heads"),
        Section("Which layers", _LAYERS, figures["layer_curve"], _CURVE, _kind(result.table, "resid_post"), "layers"),
        Section("Texts that the best site gets wrong", _WRONG, table=_most_wrong(result, table), table_name="wrong"),
        Section("What it took", table=pd.DataFrame({"step": list(seconds), "seconds": list(seconds.values())})),
    ]
    positive = table.loc[table["label"].astype(bool), "class_name"].iloc[0]
    lead = (
        f"A linear probe at every layer's residual stream and every head of {loaded.provenance.name}, at the "
        f"{config.position} token of {len(table)} texts ({config.data}). Scores are out of fold, folds keep groups "
        "together, the penalty's strength is chosen inside each fold; intervals are from a bootstrap over groups, and "
        f"beside every site stands the same pipeline on shuffled labels. Scores above 0 speak for the class {positive}."
    )
    return html_report(
        f"{config.data}: probe map of {config.model}",
        sections,
        lead=lead,
        headline=headline,
        provenance=run.provenance,
        command=f"microtome demo --config {_from_here(run.path)}/config.yaml",
    )


_HEADS = (
    "Each cell is one head's z (its attention-weighted values, before the output projection). A crossed head does not "
    "stand out from the best of all sites under permuted labels."
)
_MAP = "Area under the ROC curve, out of fold. 0.5 is chance."
_LAYERS = "The residual stream after each block, with its interval, and the best head of each layer."
_CURVE = "The dashed line across is what the best of all sites reaches in 5 % of permuted labellings."
_WRONG = "Out-of-fold scores at the site with the highest AUROC; the score is the log-odds of the positive label."


def _best_of(table: pd.DataFrame, *, heads: bool) -> pd.Series | None:
    rows = table[table["head"].notna() == heads]
    return None if rows.empty else rows.loc[rows["auroc"].idxmax()]


def _said(row: pd.Series | None) -> str:
    return (
        "none"
        if row is None
        else f"{row['site']}: {row['auroc']:.3f} [{row['auroc_low']:.3f}, {row['auroc_high']:.3f}]"
    )


def _from_here(path: Path) -> Path:
    """The path as one would type it in the folder in which the run was made."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _kind(table: pd.DataFrame, kind: str) -> pd.DataFrame:
    return table[table["kind"] == kind].reset_index(drop=True)


def _most_wrong(result: Sweep, table: pd.DataFrame) -> pd.DataFrame:
    best = int(result.table["auroc"].to_numpy().argmax())
    label = table["label"].to_numpy(dtype=bool)
    score = pd.Series(result.scores[best])
    shown = table.assign(score=score.round(2), wrong_by=score.where(~label, -score))
    shown = shown[shown["wrong_by"] > 0].sort_values("wrong_by", ascending=False)
    columns = [c for c in ("text", "class_name", "score", "domain", "rating") if c in shown]
    return shown[columns].head(15).reset_index(drop=True)


def _records(table: pd.DataFrame) -> list[dict]:
    return json.loads(table.to_json(orient="records"))

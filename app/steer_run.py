"""`microtome steer`: steered beside unsteered, as a run folder with records, vectors, figures and a report.

    <out>/<name>/          config.yaml, provenance, tables, artefacts/, figures, report.html, values/steer.json
    <out>/.<name>.fits/    records and searches so far

Depth and strength are chosen on development prompts and passages, under a limit of KL; what is told is of the test
prompts and of other passages. How a run is stopped, resumed and finished: `run_folder.py`.
"""

import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from microtome.app.grid_cells import shortened
from microtome.app.kept_fits import kept_table, made_once
from microtome.app.repeatable import contents_of, repeatable
from microtome.app.run_folder import RunFolder
from microtome.app.steer_config import SteerConfig
from microtome.app.steer_data import lines_of, steering_task_of
from microtome.app.steer_words import condition_of, steer_figures, steer_headline, steer_sections
from microtome.capture.generated import Generation
from microtome.capture.models import LoadedModel, load_model
from microtome.capture.sites import Site
from microtome.data.runs import Run
from microtome.data.spoken import spoken_seconds
from microtome.figures.report import html_report
from microtome.interventions.artefact import Artefact
from microtome.interventions.contrast import contrast
from microtome.interventions.controls import (
    asked,
    covariance_directions,
    random_directions,
    sign_flip,
)
from microtome.interventions.evaluation import Evaluation, EvaluationRecord, mean_interval
from microtome.interventions.matched_effort import effort_of, strength_for_effort
from microtome.interventions.methods import (
    FittedMethod,
    MethodFits,
    depths_to_try,
    fit_method,
    methods_named,
    strength_at_limit,
    strengths_about,
    strengths_tried,
)
from microtome.interventions.steering import Steering, anatomy_of
from microtome.interventions.steering_task import SteeringTask, neutral_passages
from microtome.interventions.targets import AttributeWords, ProbeScore, Target, VaderScore
from microtome.interventions.trade_off import best_within, trade_off_table

LEAST_FOR_PROBE = 20  # texts of either class
NEUTRAL_PROMPT = 8  # tokens by which a gate decides on a neutral passage
NEAREST = 3  # random directions that are let write


@dataclass(frozen=True, eq=False)
class SteerRun:
    """A finished run: its folder and its tables by name (`chosen`, `conditions`, `development`, `depths`, `strengths`,
    `random`, `layers`, `texts`)."""

    path: Path
    tables: dict[str, pd.DataFrame]


def run_steer(config: SteerConfig, *, progress: bool = True, say: Any = print) -> SteerRun:
    """Make the run, or read it if it is there already.

    Raises FileExistsError for another run of that name, BlockingIOError for one that another process makes, ValueError
    and KeyError for a model, data, method or site that cannot be used.
    """
    methods_named(config.methods)
    name = config.name or f"steer--{shortened(Path(config.model).name)}--{shortened(Path(config.data).stem)}"
    folder = RunFolder.at(config.out, name, "steer")
    task, facts = steering_task_of(config)
    settings = _compared(config, facts)
    return made_once(
        folder,
        settings,
        lambda: load_model(config.model),
        lambda model: _made(config, model, task, facts, folder, settings, progress),
        lambda model: SteerRun(
            folder.path,
            folder.finished_tables(settings, model=config.model, weights=model.provenance.weight_sha256),
        ),
        say,
    )


@dataclass(eq=False)
class _Bench:
    """What the conditions of one run share."""

    config: SteerConfig
    model: LoadedModel
    task: SteeringTask
    kept: Path
    bar: tqdm
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)

    @cached_property
    def prompts(self) -> list[str]:
        if self.config.prompt_file is not None:
            return lines_of(self.config.prompt_file, self.config.text_column)
        return self.task.prompts["test"]["text"].tolist()

    @cached_property
    def passages(self) -> tuple[list[str], list[str]]:
        """Neutral text for development, and for the test."""
        if self.config.neutral_file is not None:
            lines = lines_of(self.config.neutral_file, self.config.text_column)
            if len(lines) < 2:
                raise ValueError(f"neutral_file: {len(lines)} passage; give two at least.")
            return lines[: max(len(lines) // 4, 1)], lines[max(len(lines) // 4, 1) :]
        known = set(self.task.neutral)
        rest = [text for text in neutral_passages(80, seed=self.config.seed) if text not in known]
        return rest[:12], self.task.neutral

    @cached_property
    def probe_site(self) -> str:
        """About the middle of the depths, and another than that of the settings."""
        middle = anatomy_of(self.model).layers // 2
        steered = None if self.config.site is None else Site.parse(self.config.site).layer
        return f"resid_post.{max(middle - 1, 0) if middle == steered else middle}"

    @cached_property
    def targets(self) -> list[Target]:
        found: list[Target] = []
        other, config = self.task.other, self.config
        if len(other) and other["label"].value_counts().reindex([True, False], fill_value=0).min() >= LEAST_FOR_PROBE:
            found.append(ProbeScore.fit(self.model, other, self.probe_site, seed=config.seed))
        if config.data == "sentiment":
            found.append(VaderScore())
        words = (config.wanted, config.unwanted) if config.wanted else self.task.words
        if all(words):
            found.append(AttributeWords.of(self.model, list(words[0]), list(words[1])))
        if not found:
            raise ValueError(
                f"{config.data}: nothing to measure by. {len(other)} texts are left for an independent probe, which "
                f"needs {LEAST_FOR_PROBE} of either class: give more texts, a smaller --contrast, or words of either "
                "class (--wanted, --unwanted)."
            )
        return found

    @cached_property
    def evaluations(self) -> dict[str, Evaluation]:
        settings = Generation(max_new_tokens=self.config.tokens)
        prompts = {"dev": self.task.prompts["dev"]["text"].tolist(), "test": self.prompts}
        return {
            split: Evaluation(
                self.model,
                prompts[split],
                self.targets,
                passages,
                settings,
                neutral_prompt=NEUTRAL_PROMPT,
                cache=self.kept / "records" / split,
            )
            for split, passages in zip(("dev", "test"), self.passages, strict=True)
        }

    def kl(self, steering: Steering) -> float:
        """On the development passages."""
        return float(self.evaluations["dev"].clean.kl(steering.edits(self.model)).kl.mean())

    def record(
        self, split: str, name: str, steering: Steering | None, prompts: list[str] | None = None, **facts: Any
    ) -> EvaluationRecord:
        found = self.evaluations[split].run(name, steering, prompts=prompts, facts=facts)
        self.bar.set_postfix_str(name[:30])
        self.bar.update()
        return found

    def strengths(self, name: str, method: FittedMethod) -> tuple[float, ...]:
        """Those that were asked for, or five about the one whose KL is the limit."""
        if self.config.strengths:
            return self.config.strengths

        table = kept_table(self.kept / "searches", name, lambda: strengths_tried(method, self.kl, self.config.limit))
        self.tables["strengths"] = pd.concat(
            [self.tables.get("strengths"), table.rename(columns={"side_effect": "kl"}).assign(method=name)]
        )
        if not strength_at_limit(table):
            raise ValueError(
                f"{name}: even the weakest strength tried has a KL above {self.config.limit:g} nats. Allow more "
                "(--limit), or name strengths (--strength)."
            )
        return strengths_about(table)


def _made(
    config: SteerConfig,
    model: LoadedModel,
    task: SteeringTask,
    facts: dict,
    folder: RunFolder,
    settings: dict,
    progress: bool,
) -> SteerRun:
    started = time.perf_counter()
    with tqdm(desc="conditions", unit="", disable=not progress) as bar:
        bench = _Bench(config, model, task, folder.kept, bar)
        fits = _fits(bench)
        methods = _methods(bench, fits)
        base = {split: bench.record(split, "unsteered", None) for split in ("dev", "test")}
        rows, development, records = [], [], []
        for name, method in methods.items():
            strengths = bench.strengths(name, method)
            tried = _tried(bench, "dev", name, method, strengths, fits.site)
            development += tried
            best, is_within = _best(tried, bench.targets[0].name, config.limit)
            records += _tried(bench, "test", name, method, strengths, fits.site)
            strength = float(best.facts["strength"])
            rows.append({"method": name, "strength": strength, "unit": method.unit, "within_limit": is_within})
        controls = _controls(bench, next(iter(methods.values())), rows[0]["strength"], fits)
    tables = _tables(bench, base, records, development, controls, pd.DataFrame(rows))
    run = Run.create(
        folder.kept,
        folder.path.name,
        repeatable(config, "out", "artefact", "prompt_file", "neutral_file"),
        seed=config.seed,
        overwrite=True,
    )
    seconds = time.perf_counter() - started
    run.record(model=model.provenance.to_dict(), data=facts, site=fits.site, seconds=round(seconds, 3))
    for name, table in tables.items():
        run.write_table(name, table)
    for name, method in methods.items():
        if method.artefact is not None:
            method.artefact.save(run.path / "artefacts" / name)
    figures = steer_figures(tables, [target.name for target in bench.targets], config.limit)
    for name, figure in figures.items():
        run.write_figure(name, figure)
    run.write_report(
        html_report(
            f"{Path(config.model).name}: from {task.names[1]} to {task.names[0]}",
            steer_sections(tables, figures),
            lead=f"{len(bench.prompts)} prompts, {config.tokens} tokens each, at {fits.site}; depth and strength "
            f"chosen on other prompts and passages, KL up to {config.limit:g} nats. It took {spoken_seconds(seconds)}.",
            headline=steer_headline(tables),
            provenance=run.provenance,
            command=f"microtome steer --config {shlex.quote(str(folder.path / 'config.yaml'))}",
        )
    )
    folder.finish(run, settings, weights=model.provenance.weight_sha256)
    return SteerRun(folder.path, tables)


def _fits(bench: _Bench) -> MethodFits:
    """Of the settings' site, or of the depth that moves the first target most at the limit, on development prompts."""
    config, model = bench.config, bench.model
    fits = MethodFits(model, bench.task, "resid_post.0", positions=config.positions, seed=config.seed)
    if config.site is not None:
        anatomy_of(model).expand(config.site)
        return fits.at(config.site)
    if config.artefact is not None:
        return fits.at(Artefact.load(config.artefact).sites[0])
    found = []
    good = [site for site in depths_to_try(model, fits.rows, 5) if site != bench.probe_site]
    for site in good or [site for site in fits.rows.sites if site != bench.probe_site]:
        vector = contrast(model, fits.rows, sites=[site], positions=config.positions)
        method = FittedMethod("mean", _at_strength(vector, model), (0.5, 1.0, 2.0, 3.0, 4.0), vector)
        strengths = bench.strengths(f"depth {site}", method)
        strength = strengths[min(3, len(strengths) - 1)]
        record = bench.record("dev", f"depth {site}", method.steer(strength), strength=strength, site=site)
        means = {target.name: float(record.texts[target.name].mean()) for target in bench.targets}
        found.append({"site": site, "strength": strength, "kl": record.kl, **means})
    table = pd.DataFrame(found)
    name = bench.targets[0].name
    best = str(table.loc[table[name].idxmax(), "site"])
    bench.tables["depths"] = table.assign(chosen=table["site"] == best)
    return fits.at(best)


def _at_strength(artefact: Artefact, model: LoadedModel) -> Callable[[float], Steering]:
    return lambda strength: artefact.steering(model, strength=strength)


def _methods(bench: _Bench, fits: MethodFits) -> dict[str, FittedMethod]:
    config = bench.config
    if config.artefact is None:
        return {name: fit_method(name, fits) for name in config.methods}
    given = Artefact.load(config.artefact)
    name = given.method or "given"
    grid = (0.5, 1.0, 2.0, 3.0, 4.0)
    return {name: FittedMethod(name, _at_strength(given, bench.model), grid, given, unit="the vector's own")}


def _tried(
    bench: _Bench, split: str, name: str, method: FittedMethod, strengths: tuple[float, ...], site: str
) -> list[EvaluationRecord]:
    return [
        bench.record(
            split, condition_of(name, strength), method.steer(strength), method=name, strength=strength, site=site
        )
        for strength in strengths
    ]


def _best(records: list[EvaluationRecord], target: str, limit: float) -> tuple[EvaluationRecord, bool]:
    """The best within the limit; the cheapest where none is."""
    if any(record.kl <= limit for record in records):
        return best_within(records, target, limit), True
    return min(records, key=lambda record: record.kl), False


def _controls(bench: _Bench, method: FittedMethod, strength: float, fits: MethodFits) -> list[EvaluationRecord]:
    """The same push the other way, elsewhere, from shuffled labels, by feedback, in words, and along random directions.

    Only vectors that are added have them; words need an instruction.
    """
    vector, model, config = method.artefact, bench.model, bench.config
    found = []
    if config.instruction is not None:
        words_first = asked(bench.prompts, config.instruction)
        found.append(bench.record("test", "prompt only", None, words_first, method="prompt only"))
    if vector is None or vector.operation != "add":
        return found
    others = {"sign flip": sign_flip(vector)} | _elsewhere(vector, model) | _of_shuffled_labels(vector, fits)
    for name, one in others.items():
        steering = one.steering(model, strength=strength)
        found.append(bench.record("test", name, steering, method=name, strength=strength))
    if config.artefact is None and Site.parse(fits.site).kind == "resid_post":
        found += _by_feedback(bench, vector.steering(model, strength=strength), fits)
    if not config.random:
        return found
    drawn = {f"random {n}": one for n, one in enumerate(random_directions(vector, config.random))}
    if all(site in fits.rows.activations for site in vector.sites):
        rows = [fits.rows.activations[site] for site in vector.sites]
        more = covariance_directions(vector, rows, config.random)
        drawn |= {f"covariance {n}": one for n, one in enumerate(more)}
    words = next((target for target in bench.targets if isinstance(target, AttributeWords)), None)

    def make() -> pd.DataFrame:
        clean = None if words is None else words.log_odds(model, bench.prompts, None)
        rows = []
        for name, one in {"steered": vector, **drawn}.items():
            steering = one.steering(model, strength=strength)
            row: dict[str, Any] = {"direction": name, "kl": bench.kl(steering)}
            if words is not None and clean is not None:
                odds = mean_interval(words.log_odds(model, bench.prompts, steering) - clean)
                row |= dict(zip(("word_odds_gain", "word_odds_low", "word_odds_high"), odds, strict=True))
            rows.append(row)
        return pd.DataFrame(rows)

    table = kept_table(bench.kept / "searches", f"random {strength:.4g}", make)
    bench.tables["random"] = table
    gap = (table["kl"] - table["kl"].iloc[0]).abs()[1:]
    for name in table.loc[gap.nsmallest(NEAREST).index, "direction"]:
        steering = drawn[name].steering(model, strength=strength)
        found.append(bench.record("test", name, steering, method=name, strength=strength))
    return found


def _elsewhere(vector: Artefact, model: LoadedModel) -> dict[str, Artefact]:
    """The same vectors a third of the depth away."""
    layers = anatomy_of(model).layers
    sites = [Site.parse(site) for site in vector.sites]
    if any(site.layer is None for site in sites):
        return {}
    step = max(layers // 3, 1)
    moved = [str(replace(site, layer=(int(site.layer or 0) - step) % layers)) for site in sites]
    return {"wrong layer": vector.moved(moved)}


def _of_shuffled_labels(vector: Artefact, fits: MethodFits) -> dict[str, Artefact]:
    """Where the vector has one site, of the stream."""
    if len(vector.sites) != 1 or vector.sites[0] not in fits.rows.activations:
        return {}
    return {"shuffled labels": fits.of_shuffled_labels(vector)}


def _by_feedback(bench: _Bench, steering: Steering, fits: MethodFits) -> list[EvaluationRecord]:
    """A proportional controller over many depths that pushes as hard on the development passages; none if none can."""
    passages, method = bench.passages[0], fit_method("p", fits)

    def make() -> pd.DataFrame:
        effort = effort_of(bench.model, steering, passages, prompt_tokens=2)
        level = strength_for_effort(method.steer, effort, bench.model, passages, prompt_tokens=2, start=2.0)
        return pd.DataFrame({"effort": [effort], "level": [level]})

    name = "P, equal effort"
    try:
        level = float(kept_table(bench.kept / "searches", name, make)["level"].iloc[0])
    except ValueError as error:
        bench.bar.write(f"{name} is left out: {error}", file=sys.stderr)
        return []
    return [bench.record("test", name, method.steer(level), method=name, strength=level)]


def _tables(
    bench: _Bench,
    base: dict[str, EvaluationRecord],
    records: list[EvaluationRecord],
    development: list[EvaluationRecord],
    controls: list[EvaluationRecord],
    chosen: pd.DataFrame,
) -> dict[str, pd.DataFrame]:
    all_of = trade_off_table([*records, *controls], base["test"])
    names = {record.name for record in controls}
    all_of.insert(1, "control", all_of["condition"].isin(names))
    picked = [condition_of(row.method, row.strength) for row in chosen.itertuples()]
    told = all_of.set_index("condition").loc[picked].reset_index(drop=True)
    shown = [name for name in told if name not in ("method", "strength", "site", "positions", "control")]
    shown_records = {record.name: record for record in [base["test"], *records, *controls]}
    layers = [
        record.layers.assign(condition=name)
        for name, record in shown_records.items()
        if name in (*picked, *names) and len(record.layers)
    ]
    texts = pd.concat(
        [record.texts.assign(condition=name) for name, record in shown_records.items()], ignore_index=True
    )
    return {
        "chosen": pd.concat([chosen, told[shown]], axis=1),
        "conditions": all_of,
        "development": trade_off_table(development, base["dev"]),
        "layers": pd.concat(layers, ignore_index=True) if layers else pd.DataFrame({"condition": []}),
        "texts": texts,
        **bench.tables,
    }


def _compared(config: SteerConfig, facts: dict) -> dict:
    """What makes two runs the same but the model's weights: the settings, with contents of files for their places."""
    settings = config.model_dump(
        mode="json", exclude={"out", "name", "data", "artefact", "prompt_file", "neutral_file"}
    )
    for name in ("artefact", "prompt_file", "neutral_file"):
        settings[name] = contents_of(getattr(config, name))
    return settings | {"data": facts["name"], "tables_sha256": facts["tables_sha256"]}

"""One record per run: what steering achieved, how hard it pushed, what it cost.

Per prompt: the targets, effort and relative size, nats of what was written by the unsteered model, variety and
repetition. On neutral text: KL to the unsteered model and cross-entropy. What is of the unsteered model alone is
computed once, in an `Evaluation`, and shared by all records.

    evaluation = Evaluation(model, prompts, targets, neutral=passages, generation=Generation(32))
    base = evaluation.run("unsteered")
    record = evaluation.run("mean x 2", artefact.steering(model, strength=2.0))
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from microtome.capture.anatomy import Anatomy
from microtome.capture.batches import MAX_TOKENS
from microtome.capture.generated import Generation
from microtome.capture.models import LoadedModel
from microtome.data.replaced_file import replaced_file
from microtome.interventions.generation import generate
from microtome.interventions.read_back import read_back
from microtome.interventions.steering import Steering, anatomy_of
from microtome.interventions.targets import Target, Written
from microtome.interventions.text_measures import pooled_distinct, text_measures
from microtome.lenses.documents import document_draws
from microtome.lenses.next_token import CleanTexts

DRAWS = 2000
PARTS = ("texts", "neutral", "layers")
Interval = tuple[float, float, float]


@dataclass(frozen=True, eq=False)
class EvaluationRecord:
    """What one condition did.

    Attributes:
        name: of the condition.
        facts: JSON-able: method, strength, site, settings of generation, seconds, tokens, whatever was noted.
        targets: columns of `texts` that are targets.
        texts: a row per prompt: text, prompt, completion, tokens, ended, the targets, nll, nll_whole and their tokens,
            effort, relative, distinct_n, repetition, empty.
        neutral: a row per neutral passage: kl, clean_nll, edited_nll, rows.
        layers: a row per site: relative, largest, effort (per token), before, after.
    """

    name: str
    facts: Mapping[str, Any]
    targets: tuple[str, ...]
    texts: pd.DataFrame
    neutral: pd.DataFrame
    layers: pd.DataFrame

    def __repr__(self) -> str:
        said = ", ".join(f"{name} {self.texts[name].mean():.3g}" for name in self.targets)
        return f"EvaluationRecord({self.name}: {said}; KL {self.kl:.3g}, perplexity {self.perplexity:.4g})"

    @cached_property
    def kl(self) -> float:
        """KL(unsteered || steered) on neutral text, nats a token."""
        return _weighted(self.neutral, "kl", "rows")

    @cached_property
    def perplexity(self) -> float:
        """Of the continuations, by the unsteered model."""
        return float(np.exp(self.texts["nll"].sum() / max(self.texts["tokens_read"].sum(), 1)))

    def to_frame(self, *, draws: int = DRAWS, seed: int = 0) -> pd.DataFrame:
        """One row: means, with 95 % bootstrap intervals over prompts (targets) and passages (KL)."""
        row: dict[str, Any] = {"condition": self.name}
        row |= {key: self.facts[key] for key in ("method", "strength", "site", "positions") if key in self.facts}
        for name in self.targets:
            row[name], row[f"{name}_low"], row[f"{name}_high"] = mean_interval(self.texts[name], draws, seed)
        row["kl"], row["kl_low"], row["kl_high"] = ratio_interval(
            self.neutral["kl"] * self.neutral["rows"], self.neutral["rows"], draws, seed
        )
        clean, edited = (_weighted(self.neutral, f"{which}_nll", "targets") for which in ("clean", "edited"))
        row |= {"cross_entropy": edited, "cross_entropy_added": edited - clean}
        for name, nats, tokens in (
            ("perplexity", "nll", "tokens_read"),
            ("perplexity_whole", "nll_whole", "tokens_whole"),
        ):
            found = ratio_interval(self.texts[nats], self.texts[tokens], draws, seed)
            row[name], row[f"{name}_low"], row[f"{name}_high"] = np.exp(found)
        for n in (1, 2, 3):
            row[f"distinct_{n}"] = pooled_distinct(self.texts["completion"].tolist(), n)
        row |= {
            "repetition": float(self.texts["repetition"].mean()),
            "empty": float(self.texts["empty"].mean()),
            "tokens": float(self.texts["tokens"].mean()),
            "effort": float(self.texts["effort"].mean()),
            "relative": float(self.texts["relative"].mean()),
            "tokens_per_second": float(self.facts.get("tokens_per_second", np.nan)),
        }
        return pd.DataFrame([row])

    def save(self, folder: str | Path) -> None:
        """Write tables and facts to a folder; the facts last, so that a folder with them is whole."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for part in PARTS:
            with replaced_file(folder / f"{part}.parquet") as scratch:
                getattr(self, part).to_parquet(scratch)
        said = {"name": self.name, "targets": list(self.targets), "facts": dict(self.facts)}
        with replaced_file(folder / "record.json") as scratch:
            scratch.write_text(json.dumps(said, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> "EvaluationRecord":
        """Read what `save` wrote. FileNotFoundError where there is none, or an unfinished one."""
        folder = Path(folder)
        said = json.loads((folder / "record.json").read_text(encoding="utf-8"))
        tables = {part: pd.read_parquet(folder / f"{part}.parquet") for part in PARTS}
        return cls(said["name"], said["facts"], tuple(said["targets"]), **tables)


@dataclass(eq=False)
class Evaluation:
    """Prompts, targets and neutral text on which conditions are compared.

    Attributes:
        model: unsteered.
        prompts: strings.
        targets: what to achieve.
        neutral: passages for KL and cross-entropy.
        generation: the same in all conditions.
        max_tokens: padded tokens of a batch.
        cache: folder of records that are not made again; None keeps none.
    """

    model: LoadedModel
    prompts: Sequence[str]
    targets: Sequence[Target]
    neutral: Sequence[str]
    generation: Generation = field(default_factory=lambda: Generation(max_new_tokens=32))
    max_tokens: int = MAX_TOKENS
    cache: Path | None = None

    def __post_init__(self):
        if not len(self.prompts) or not len(self.neutral):
            raise ValueError(f"{len(self.prompts)} prompts, {len(self.neutral)} neutral passages: give some of each.")
        names = [target.name for target in self.targets]
        if len(set(names)) < len(names) or not names:
            raise ValueError(f"targets are named {names}: give at least one, each a name of its own.")

    @cached_property
    def anatomy(self) -> Anatomy:
        """Of the model."""
        return anatomy_of(self.model)

    @cached_property
    def clean(self) -> CleanTexts:
        """The neutral text, as the unsteered model takes it."""
        return CleanTexts.of(self.model, list(self.neutral), anatomy=self.anatomy, max_tokens=self.max_tokens)

    def neutral_effect(self, steering: Steering) -> pd.DataFrame:
        """A row per passage: kl, clean_nll, edited_nll, rows, targets (tokens with a next one)."""
        frame = self.clean.kl(steering.edits(self.anatomy)).to_frame()
        frame["targets"] = frame["clean_nll"].notna().astype(int)
        grouped = frame.groupby("text")
        found = grouped[["kl", "clean_nll", "edited_nll"]].mean()
        return found.assign(rows=grouped.size(), targets=grouped["targets"].sum()).reset_index()

    def run(
        self,
        name: str,
        steering: Steering | None = None,
        *,
        prompts: Sequence[str] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> EvaluationRecord:
        """The record of one condition; read from the cache if it is there.

        Args:
            steering: what acts; None is the unsteered model.
            prompts: in place of the evaluation's own (as many), for conditions that ask in words.
            facts: noted in the record: method, strength, site.
        """
        held = None if self.cache is None else self.cache / _file_name(name)
        if held is not None and (held / "record.json").is_file():
            return EvaluationRecord.load(held)
        record = self._measured(name, steering, list(self.prompts if prompts is None else prompts), dict(facts or {}))
        if held is not None:
            record.save(held)
        return record

    def _measured(
        self, name: str, steering: Steering | None, prompts: list[str], facts: dict[str, Any]
    ) -> EvaluationRecord:
        if len(prompts) != len(self.prompts):
            raise ValueError(f"{len(prompts)} prompts for an evaluation of {len(self.prompts)}: conditions are paired.")
        said = generate(
            self.model, prompts, steering, self.generation, anatomy=self.anatomy, max_tokens=self.max_tokens
        )
        sites = list(dict.fromkeys(site for target in self.targets for site in target.sites))
        read = read_back(
            self.model, said.prompt_ids, said.token_ids, sites, anatomy=self.anatomy, max_tokens=self.max_tokens
        )
        written = Written(
            self.model, self.anatomy, steering, prompts, said.prompt_ids, said.token_ids, said.completions, read
        )
        texts = said.table.join(read.table.rename(columns={"tokens": "tokens_read"}))
        for target in self.targets:
            texts[target.name] = np.asarray(target.score(written), dtype=float)
        texts = texts.join(text_measures(said.completions))
        effort = _effort(said.ledger.by_text(), len(texts))
        texts = texts.join(effort)
        layers = said.ledger.by_layer()
        if steering is None:
            neutral = self._untouched()
        else:
            neutral = self.neutral_effect(steering)
        count = int(texts["tokens"].sum())
        facts |= {
            "generation": said.settings,
            "seconds": said.seconds,
            "tokens": count,
            "tokens_per_second": count / said.seconds,
            "generation_settings": asdict(self.generation),
        }
        return EvaluationRecord(name, facts, tuple(target.name for target in self.targets), texts, neutral, layers)

    def _untouched(self) -> pd.DataFrame:
        """The neutral text under no edit: KL 0, both cross-entropies alike."""
        from microtome.lenses.next_token import text_nll

        found = text_nll(self.model, list(self.neutral), anatomy=self.anatomy, max_tokens=self.max_tokens).per_text()
        nll = found["nats"] / found["tokens"]
        return pd.DataFrame(
            {
                "text": found["text"],
                "kl": 0.0,
                "clean_nll": nll,
                "edited_nll": nll,
                "rows": found["tokens"] + 1,
                "targets": found["tokens"],
            }
        )


def _effort(by_text: pd.DataFrame, n: int) -> pd.DataFrame:
    """By text: effort (|delta|^2 summed over layers, per edited token) and relative (mean over sites)."""
    if not len(by_text):
        return pd.DataFrame({"effort": np.zeros(n), "relative": np.zeros(n)})
    weighted = by_text.assign(relative=by_text["relative"] * by_text["tokens"])
    by_site = weighted.groupby(["text", "site", "name"])[["effort", "relative", "tokens"]].sum()
    by_site = by_site[by_site["tokens"] > 0]
    per_token = by_site[["effort", "relative"]].div(by_site["tokens"], axis=0)
    found = per_token.groupby("text").agg(effort=("effort", "sum"), relative=("relative", "mean"))
    return found.reindex(range(n), fill_value=0.0).reset_index(drop=True)


def _weighted(frame: pd.DataFrame, value: str, weight: str) -> float:
    known = frame[value].notna()
    return float((frame[value] * frame[weight])[known].sum() / frame[weight][known].sum())


def mean_interval(values: pd.Series | np.ndarray, draws: int = DRAWS, seed: int = 0, level: float = 0.95) -> Interval:
    """Mean and percentile bootstrap interval over rows; NaN rows are left out."""
    held = np.asarray(values, dtype=float)
    held = held[~np.isnan(held)]
    return ratio_interval(held, np.ones(len(held)), draws, seed, level)


def ratio_interval(
    numerators: pd.Series | np.ndarray,
    denominators: pd.Series | np.ndarray,
    draws: int = DRAWS,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Sum over sum, and its percentile bootstrap interval, drawing rows of both together."""
    above, below = np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)
    if not len(above):
        return (np.nan, np.nan, np.nan)
    counts = document_draws(len(above), draws, seed)
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn = (counts @ above) / (counts @ below)
        low, high = np.nanquantile(drawn, [(1 - level) / 2, (1 + level) / 2])
        return float(above.sum() / below.sum()), float(low), float(high)


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "._-+" else "_" for letter in name)

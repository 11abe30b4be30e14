"""One record per run: what steering achieved, how hard it pushed, what it cost.

Per prompt: the targets, effort and relative size, nats of what was written by the unsteered model, variety and
repetition. On neutral text: KL to the unsteered model and cross-entropy. What is of the unsteered model alone is
computed once, in an `Evaluation`, and shared by all records.

    evaluation = Evaluation(model, prompts, targets, neutral=passages, generation=Generation(32))
    base = evaluation.run("unsteered")
    record = evaluation.run("mean x 2", artefact.steering(model, strength=2.0))
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from microtome.capture.anatomy import Anatomy
from microtome.capture.batches import MAX_TOKENS
from microtome.capture.generated import Generation
from microtome.capture.models import LoadedModel
from microtome.capture.text_source import TextSource, text_source
from microtome.interventions.artefact import made_on
from microtome.interventions.evaluation_record import DRAWS as DRAWS
from microtome.interventions.evaluation_record import EvaluationRecord
from microtome.interventions.evaluation_record import mean_interval as mean_interval
from microtome.interventions.evaluation_record import ratio_interval as ratio_interval
from microtome.interventions.generation import generate
from microtome.interventions.measured_on import fingerprint_of
from microtome.interventions.read_back import read_back
from microtome.interventions.steering import Steering, anatomy_of
from microtome.interventions.targets import Target, Written
from microtome.interventions.text_measures import text_measures
from microtome.lenses.next_token import CleanTexts, text_nll

MEASURED_ON = "measured_on"


@dataclass(eq=False)
class Evaluation:
    """Prompts, targets and neutral text on which conditions are compared.

    Attributes:
        model: unsteered.
        prompts: strings.
        targets: what to achieve.
        neutral: passages for KL and cross-entropy.
        generation: the same in all conditions.
        neutral_prompt: first tokens of a passage that count as its prompt (half of a short one at most): what gates and
            edits at "prompt" look at. With 1, edits at "generated" act on every token of it.
        max_tokens: padded tokens of a batch.
        cache: folder of records that are not made again; None keeps none.
    """

    model: LoadedModel
    prompts: Sequence[str]
    targets: Sequence[Target]
    neutral: Sequence[str]
    generation: Generation = field(default_factory=lambda: Generation(max_new_tokens=32))
    neutral_prompt: int = 1
    max_tokens: int = MAX_TOKENS
    cache: Path | None = None

    def __post_init__(self):
        if not len(self.prompts) or not len(self.neutral):
            raise ValueError(f"{len(self.prompts)} prompts, {len(self.neutral)} neutral passages: give some of each.")
        names = [target.name for target in self.targets]
        if self.neutral_prompt < 1:
            raise ValueError(f"neutral_prompt={self.neutral_prompt}: give 1 token or more.")
        if len(set(names)) < len(names) or not names:
            raise ValueError(f"targets are named {names}: give at least one, each a name of its own.")

    @cached_property
    def anatomy(self) -> Anatomy:
        """Of the model."""
        return anatomy_of(self.model)

    @cached_property
    def neutral_prompts(self) -> list[int]:
        """Tokens of each passage that count as its prompt."""
        source = text_source(list(self.neutral), self.model)
        assert isinstance(source, TextSource)
        lengths = [row.length for row in source.encode(0, len(source)).rows]
        return [max(min(self.neutral_prompt, length // 2), 1) for length in lengths]

    @cached_property
    def clean(self) -> CleanTexts:
        """The neutral text, as the unsteered model takes it."""
        return CleanTexts.of(
            self.model,
            list(self.neutral),
            prompt_tokens=self.neutral_prompts,
            anatomy=self.anatomy,
            max_tokens=self.max_tokens,
        )

    def neutral_effect(self, steering: Steering) -> pd.DataFrame:
        """A row per passage: kl, clean_nll, edited_nll, rows, targets (tokens with a next one)."""
        frame = self.clean.kl(steering.edits(self.anatomy)).to_frame()
        frame["targets"] = frame["clean_nll"].notna().astype(int)
        grouped = frame.groupby("text")
        found = grouped[["kl", "clean_nll", "edited_nll"]].mean()
        return found.assign(rows=grouped.size(), targets=grouped["targets"].sum()).reset_index()

    def measured_on(self, steering: Steering | None, prompts: Sequence[str]) -> dict[str, Any] | None:
        """What a record depends on, part by part: model, prompts, neutral, targets, generation, batches, steering.

        None where a part does not say what it is (a function among the edits): such a record is never read again.
        """
        model = made_on(self.model)
        try:
            return {
                "model": {key: model[key] for key in ("weight_sha256", "template_sha256", "dtype")},
                "prompts": fingerprint_of(list(prompts)),
                "neutral": fingerprint_of(list(self.neutral)),
                "targets": {target.name: fingerprint_of(target) for target in self.targets},
                "generation": fingerprint_of(asdict(self.generation)),
                "neutral_prompt": self.neutral_prompt,
                "max_tokens": self.max_tokens,
                "steering": None if steering is None else fingerprint_of(steering),
            }
        except TypeError:
            return None

    def run(
        self,
        name: str,
        steering: Steering | None = None,
        *,
        prompts: Sequence[str] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> EvaluationRecord:
        """The record of one condition; read from the cache if it is there and was measured on the same.

        Args:
            steering: what acts; None is the unsteered model.
            prompts: in place of the evaluation's own (as many), for conditions that ask in words.
            facts: noted in the record: method, strength, site.

        Raises:
            ValueError: another number of prompts; strengths by text, which the neutral passages have none of.
            TypeError: facts that JSON cannot hold.
        """
        asked = list(self.prompts if prompts is None else prompts)
        if len(asked) != len(self.prompts):
            raise ValueError(f"{len(asked)} prompts for an evaluation of {len(self.prompts)}: conditions are paired.")
        if by_text := [one.name for one in steering or () if isinstance(one.strength, tuple)]:
            raise ValueError(
                f"{by_text[0]} has a strength for each text, and the neutral passages are others: a condition has one "
                "strength. Evaluate each by itself."
            )
        noted, wanted = dict(facts or {}), self.measured_on(steering, asked)
        held = None if self.cache is None else self.cache / _file_name(name)
        json.dumps(noted)
        if held is not None and wanted is not None and (record := _kept(held, name, wanted)) is not None:
            return replace(record, facts={**record.facts, **noted})
        record = self._measured(name, steering, asked, noted | {MEASURED_ON: wanted})
        if held is not None:
            record.save(held)
        return record

    def _measured(
        self, name: str, steering: Steering | None, prompts: list[str], facts: dict[str, Any]
    ) -> EvaluationRecord:
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
        found = text_nll(
            self.model,
            list(self.neutral),
            prompt_tokens=self.neutral_prompts,
            anatomy=self.anatomy,
            max_tokens=self.max_tokens,
        ).per_text()
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


def _kept(folder: Path, name: str, wanted: Mapping[str, Any]) -> EvaluationRecord | None:
    """The record of a folder if it is whole, of this condition and measured on the same; else None."""
    try:
        record = EvaluationRecord.load(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if record.name == name and record.facts.get(MEASURED_ON) == wanted else None


def _file_name(name: str) -> str:
    """A folder's name that no other condition has, on systems that do not tell capitals apart either."""
    plain = "".join(letter if letter.isalnum() or letter in "._-+" else "_" for letter in name)
    return f"{plain[:80]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"

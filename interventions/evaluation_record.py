"""What one condition did: tables by prompt, by neutral passage and by layer, and one row of means with intervals."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from microtome.data.replaced_file import replaced_file
from microtome.interventions.text_measures import pooled_distinct
from microtome.lenses.documents import document_draws

DRAWS = 2000
PARTS = ("texts", "neutral", "layers")
RECORD = "record.json"
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
        """Of the continuations, by the unsteered model; NaN where nothing was written."""
        tokens = self.texts["tokens_read"].sum()
        return float(np.exp(self.texts["nll"].sum() / tokens)) if tokens else float("nan")

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
        (folder / RECORD).unlink(missing_ok=True)
        for part in PARTS:
            with replaced_file(folder / f"{part}.parquet") as scratch:
                getattr(self, part).to_parquet(scratch)
        said = {"name": self.name, "targets": list(self.targets), "facts": dict(self.facts)}
        with replaced_file(folder / RECORD) as scratch:
            scratch.write_text(json.dumps(said, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> "EvaluationRecord":
        """Read what `save` wrote. FileNotFoundError where there is none, or an unfinished one."""
        folder = Path(folder)
        said = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        tables = {part: pd.read_parquet(folder / f"{part}.parquet") for part in PARTS}
        return cls(said["name"], said["facts"], tuple(said["targets"]), **tables)


def _weighted(frame: pd.DataFrame, value: str, weight: str) -> float:
    """Mean by weight of the rows that have a value; NaN where none has."""
    known = frame[value].notna()
    total = frame[weight][known].sum()
    return float((frame[value] * frame[weight])[known].sum() / total) if total else float("nan")


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
    """Sum over sum, and its percentile bootstrap interval, drawing rows of both together.

    Rows in which either is NaN are left out; all is NaN where the denominators are 0.
    """
    above, below = np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)
    known = ~np.isnan(above) & ~np.isnan(below)
    above, below = above[known], below[known]
    if not below.any():
        return (np.nan, np.nan, np.nan)
    counts = document_draws(len(above), draws, seed)
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn = (counts @ above) / (counts @ below)
    low, high = np.nanquantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return float(above.sum() / below.sum()), float(low), float(high)

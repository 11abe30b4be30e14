"""Conditional steering: act on the texts that meet a condition, and leave the others alone (Lee et al. 2024, "CAST").

    h    mean of the prompt's tokens at one site, or its last token
    sim  cos(h, tanh(c c'h / c'c)), c the condition's direction
    act  sim > threshold (or below it)

A gate decides by text in a generation's first forward, and the decision is kept for what is written, with a cache or
without (`generate`; a model's own `generate` without a cache is a new forward at each step, decided anew). `fit_gate`
takes the layer and threshold with the best F1, or the best recall within a budget of false alarms.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from microtome.capture.collect import capture
from microtome.capture.live_taps import EditContext
from microtome.capture.models import LoadedModel


@dataclass(frozen=True, eq=False)
class CosineGate:
    """The condition of CAST. `decisions` tells what was decided, by text.

    Attributes:
        site: where it looks, such as resid_pre.7.
        direction: of the condition.
        threshold: of the similarity.
        above: acts above the threshold; otherwise below it.
        pooling: "mean" over the prompt's tokens, or its "last".
        softness: width of a sigmoid about the threshold; 0 is a hard decision.
        measure: "tanh" is the published similarity, "cosine" that of h and the direction itself.
        log: a row per decision: text, similarity, gate.
    """

    site: str
    direction: Float[Tensor, " d"]
    threshold: float
    above: bool = True
    pooling: Literal["mean", "last"] = "mean"
    softness: float = 0.0
    measure: Literal["tanh", "cosine"] = "tanh"
    log: list[tuple[int, float, float]] = field(default_factory=list, compare=False)

    def __post_init__(self):
        if not bool(torch.isfinite(self.direction).all()) or not bool(self.direction.any()):
            raise ValueError("The condition's direction is zero or not finite.")
        if self.softness < 0 or not np.isfinite(self.threshold):
            raise ValueError(f"threshold={self.threshold}, softness={self.softness}: give a number, and 0 or more.")

    def decide(self, value: Tensor, at: EditContext) -> Tensor:
        """Asked once per generation, with the prompt."""
        call = at.call
        if call is None:
            raise ValueError("A gate needs to know which tokens are the prompt's: use it through Steering.")
        prompt = call.is_real & (call.positions < call.prompt_tokens[:, None])
        h = pooled(value, prompt.to(value.device), call.positions.to(value.device), self.pooling)
        found = similarity(h, self.direction.to(h), self.measure)
        gap = (found - self.threshold) * (1 if self.above else -1)
        gate = torch.sigmoid(gap / self.softness) if self.softness else (gap > 0).to(h.dtype)
        self.log.extend(zip(call.texts.tolist(), found.tolist(), gate.tolist(), strict=True))
        return gate

    def decisions(self) -> pd.DataFrame:
        """What was decided since the gate was made: text, similarity, gate."""
        return pd.DataFrame(self.log, columns=["text", "similarity", "gate"])


def pooled(
    value: Float[Tensor, "batch token d"], mask: Tensor, positions: Tensor, pooling: str
) -> Float[Tensor, "batch d"]:
    """Mean over the masked tokens, or the last of them; padding has no part in it."""
    x = value.float() if value.dtype not in (torch.float32, torch.float64) else value
    if pooling == "mean":
        weight = mask.to(x)[..., None]
        return (x * weight).sum(1) / weight.sum(1).clamp_min(1)
    last = torch.where(mask, positions, -1).argmax(1)
    return x[torch.arange(len(x), device=x.device), last]


def similarity(
    h: Float[Tensor, "row d"], direction: Float[Tensor, " d"], measure: str = "tanh"
) -> Float[Tensor, " row"]:
    """cos(h, tanh(c c'h / c'c)), or cos(h, c)."""
    if measure == "cosine":
        return torch.cosine_similarity(h, direction[None], dim=1)
    projected = (h @ direction)[:, None] * direction / (direction @ direction)
    return torch.cosine_similarity(h, torch.tanh(projected), dim=1)


@dataclass(frozen=True, eq=False)
class GateFit:
    """Thresholds that were tried, and the gate that was chosen.

    Attributes:
        table: site, threshold, above, f1, recall, false_alarms; of the fit texts.
        gate: the best.
    """

    table: pd.DataFrame
    gate: CosineGate


def fit_gate(
    model: LoadedModel,
    yes: Sequence[Any],
    no: Sequence[Any],
    directions: dict[str, Tensor],
    *,
    pooling: Literal["mean", "last"] = "mean",
    measure: Literal["tanh", "cosine"] = "tanh",
    false_alarms: float | None = None,
    thresholds: int = 101,
) -> GateFit:
    """Choose site, threshold and side on texts that should and should not be steered.

    Args:
        directions: of the condition, by site.
        false_alarms: the largest share of `no` texts that may be steered; then the highest recall is chosen, else the
            best F1.
        thresholds: how many are tried at most; they lie between similarities that were met.

    Raises:
        ValueError: no texts of a side, no direction, or no threshold within the budget.
    """
    if not len(yes) or not len(no) or not directions:
        raise ValueError(f"{len(yes)} yes, {len(no)} no texts, {len(directions)} directions: give some of each.")
    labels = np.array([True] * len(yes) + [False] * len(no))
    position = "mean" if pooling == "mean" else "last"
    acts = capture(model, [*yes, *no], list(directions), position, include_special=True, progress=False)
    rows = []
    for site, direction in directions.items():
        found = similarity(acts[site].float(), direction.float(), measure).numpy()
        for threshold in _between(found, thresholds):
            for above in (True, False):
                fires = found > threshold if above else found < threshold
                hit, alarm = fires[labels].mean(), fires[~labels].mean()
                precision = fires[labels].sum() / max(fires.sum(), 1)
                f1 = 2 * precision * hit / max(precision + hit, 1e-12)
                rows.append((site, float(threshold), above, float(f1), float(hit), float(alarm)))
    table = pd.DataFrame(rows, columns=["site", "threshold", "above", "f1", "recall", "false_alarms"])
    allowed = table if false_alarms is None else table[table["false_alarms"] <= false_alarms]
    if allowed.empty or not allowed["recall"].max() > 0:
        raise ValueError(
            f"No threshold steers any of the texts it should with false alarms of {false_alarms} or less. Allow "
            "more, or give other directions."
        )
    best = allowed.loc[allowed["f1" if false_alarms is None else "recall"].idxmax()]
    site = str(best["site"])
    gate = CosineGate(
        site, directions[site].float(), float(best["threshold"]), bool(best["above"]), pooling, measure=measure
    )
    return GateFit(table, gate)


def _between(similarities: np.ndarray, most: int) -> np.ndarray:
    """Middles of neighbouring similarities, and one below all of them."""
    ordered = np.unique(similarities.astype(float))
    middles = np.concatenate([[ordered[0] - 1e-3], (ordered[1:] + ordered[:-1]) / 2])
    return middles[np.unique(np.linspace(0, len(middles) - 1, min(most, len(middles))).round().astype(int))]

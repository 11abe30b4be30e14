"""Easy-to-hard: strata of a hardness measure, and how much of the supervision gap easy training recovers.

    recovered = (easy -> hard - unsupervised) / (hard -> hard - unsupervised)            (Hase et al. 2024)

Train a probe on the easy rows, one on hard rows (`transfer` with `hardness_strata` as domains), test both on the same
hard rows; `unsupervised` is what needs no labels there: 0.5, or the scores of a prompt. The measure must not come from
the probed model, or it tells what that model finds hard to represent.

Beware: where supervision on hard rows gains little, the ratio divides by almost nothing. Its interval is then without
bounds here, and the plain difference easy -> hard minus hard -> hard is what can be read.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from microtome.probes.bootstrap import bootstrap_accuracy, bootstrap_auroc, cross_validation_stretch
from microtome.probes.metrics import accuracy, fold_auroc

_TAIL = torch.tensor([0.025, 0.975], dtype=torch.float64)


@dataclass(frozen=True)
class GapRecovered:
    """Share of the gap (1: all), the gap itself, and the difference of both probes, each with a 95 % interval."""

    recovered: float
    recovered_low: float  # -inf and inf where the interval of the gap holds 0
    recovered_high: float
    gap: float  # hard -> hard minus unsupervised
    gap_low: float
    gap_high: float
    difference: float  # easy -> hard minus hard -> hard
    difference_low: float
    difference_high: float


def hardness_strata(values, *, easy: float = 0.3, hard: float = 0.3) -> np.ndarray:
    """ "easy" for rows in the lowest share `easy` of the values, "hard" in the highest share `hard`, else "middle".

    Raises ValueError for shares that overlap, values that are no finite numbers, and ties that put one value into both.
    """
    values = np.asarray(values, dtype=np.float64)
    if not (0 < easy < 1 and 0 < hard < 1 and easy + hard <= 1):
        raise ValueError(f"easy={easy}, hard={hard}; give shares above 0 that are 1 or less together.")
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(f"values has shape {values.shape}; give one finite number per row.")
    low, high = np.quantile(values, [easy, 1 - hard])
    if low >= high:
        raise ValueError(
            f"Too many rows have the value {low:g}: it would be easy and hard. Take a finer measure, or smaller shares."
        )
    return np.where(values <= low, "easy", np.where(values >= high, "hard", "middle"))


def gap_recovered(
    easy: Float64[Tensor, " example"],
    hard: Float64[Tensor, " example"],
    positive: Bool[Tensor, " example"],
    groups: Int64[Tensor, " example"],
    test: Bool[Tensor, "fold example"],
    *,
    unsupervised: float | Float64[Tensor, " example"] = 0.5,
    metric: Literal["auroc", "accuracy"] = "auroc",
    draws: int = 2000,
    seed: int = 0,
) -> GapRecovered:
    """Supervision gap recovered on hard rows, from logits of the probes trained on easy and on hard rows.

    unsupervised: its score, or scores of the rows. Intervals are of draws of groups shared by all, widened for
    cross-validation. Raises ValueError for NaN scores and as `bootstrap_auroc`.
    """
    rows = [easy, hard] + ([unsupervised] if isinstance(unsupervised, Tensor) else [])
    scores = torch.stack(rows)
    if metric == "auroc":
        values = fold_auroc(scores, positive, test)
        drawn = bootstrap_auroc(scores, positive, groups, test, draws=draws, seed=seed).double()
    else:
        values = accuracy(scores, positive)
        drawn = bootstrap_accuracy((scores > 0) == positive, groups, draws=draws, seed=seed).double()
    if not isinstance(unsupervised, Tensor):
        values = torch.cat([values, torch.tensor([float(unsupervised)], dtype=torch.float64)])
        drawn = torch.cat([drawn, torch.full((1, draws), float(unsupervised), dtype=torch.float64)])
    stretch = cross_validation_stretch(len(test))
    drawn = values[:, None] + stretch * (drawn - values[:, None])
    gap, difference = values[1] - values[2], values[0] - values[1]
    gap_low, gap_high = torch.quantile(drawn[1] - drawn[2], _TAIL).tolist()
    difference_low, difference_high = torch.quantile(drawn[0] - drawn[1], _TAIL).tolist()
    if gap_low > 0 or gap_high < 0:
        ratio = (drawn[0] - drawn[2]) / (drawn[1] - drawn[2])
        low, high = torch.quantile(ratio, _TAIL).tolist()
    else:
        low, high = -float("inf"), float("inf")
    return GapRecovered(
        recovered=((values[0] - values[2]) / gap).item() if gap != 0 else float("nan"),
        recovered_low=low,
        recovered_high=high,
        gap=gap.item(),
        gap_low=gap_low,
        gap_high=gap_high,
        difference=difference.item(),
        difference_low=difference_low,
        difference_high=difference_high,
    )

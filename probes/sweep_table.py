"""A sweep's numbers: a table row per probe from its out-of-fold logits, and what choosing the best site is worth."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from microtome.capture.sites import Site
from microtome.probes.bootstrap import (
    Intervals,
    bootstrap_accuracy,
    bootstrap_auroc,
    cross_validation_stretch,
    percentile_intervals,
)
from microtome.probes.metrics import accuracy, balanced_accuracy, fold_auroc, log_loss_bits, majority_rate
from microtome.probes.nested_fit import NestedFit
from microtome.probes.permutation import BestSiteNull
from microtome.probes.sweep_result import SelectedSite


def interval_stretch(folds: int) -> float:
    """How much intervals of a sweep are widened; see `bootstrap`."""
    return cross_validation_stretch(folds)


def sweep_table(
    probes: Sequence[Site],
    fits: Sequence[NestedFit],
    labellings: Bool[Tensor, "labelling example"],
    groups: Int64[Tensor, " example"],
    test: Bool[Tensor, "fold example"],
    null: BestSiteNull | None,
    *,
    draws: int,
    seed: int,
) -> pd.DataFrame:
    """One row per probe; `Sweep` says what the columns mean. `labellings` are the real labels and the shuffled ones."""
    real, control = (torch.stack([fit.scores[number] for fit in fits]) for number in (0, 1))
    positive, shuffled = labellings
    auroc, correct = _intervals(real, positive, groups, test, draws=draws, seed=seed)
    control_auroc, control_correct = _intervals(control, shuffled, groups, test, draws=draws, seed=seed)
    missing = np.full(len(probes), math.nan)
    return pd.DataFrame(
        {
            "site": [str(probe) for probe in probes],
            "kind": [str(replace(probe, layer=None, head=None)) for probe in probes],
            "layer": pd.array([probe.layer for probe in probes], dtype="Int64"),
            "head": pd.array([probe.head for probe in probes], dtype="Int64"),
            **_columns("auroc", auroc),
            **_columns("accuracy", correct),
            "balanced_accuracy": balanced_accuracy(real, positive).numpy(),
            "bits": log_loss_bits(real, positive).numpy(),
            **_columns("control_auroc", control_auroc),
            **_columns("control_accuracy", control_correct),
            "selectivity": (auroc.estimate - control_auroc.estimate).numpy(),
            "p_best_site": missing if null is None else null.p_value.numpy(),
            "ridge_auroc": missing if null is None else null.statistic.numpy(),
            "strength": [fit.strength for fit in fits],
            "width": [len(fit.coefficients) for fit in fits],
            "majority_rate": majority_rate(positive),
        }
    )


def selected_site(
    probes: Sequence[Site],
    fits: Sequence[NestedFit],
    positive: Bool[Tensor, " example"],
    groups: Int64[Tensor, " example"],
    test: Bool[Tensor, "fold example"],
    *,
    draws: int,
    seed: int,
) -> SelectedSite:
    """Score each outer fold by the probe with the lowest inner loss in it, which saw none of the fold's rows."""
    choice = torch.stack([fit.inner_loss[0] for fit in fits]).argmin(dim=0)
    scores = torch.empty(1, len(positive), dtype=torch.float64)
    for fold, rows in enumerate(test):
        scores[0, rows] = fits[choice[fold]].scores[0, rows]
    auroc, correct = _intervals(scores, positive, groups, test, draws=draws, seed=seed)
    values = {**_columns("auroc", auroc), **_columns("accuracy", correct)}
    return SelectedSite(
        sites=tuple(str(probes[number]) for number in choice.tolist()),
        **{name: column.item() for name, column in values.items()},
    )


def _intervals(
    scores: Float64[Tensor, "probe example"],
    positive: Bool[Tensor, " example"],
    groups: Int64[Tensor, " example"],
    test: Bool[Tensor, "fold example"],
    *,
    draws: int,
    seed: int,
) -> tuple[Intervals, Intervals]:
    """Of AUROC and of accuracy."""
    stretch = interval_stretch(len(test))
    of_auroc = bootstrap_auroc(scores, positive, groups, test, draws=draws, seed=seed)
    of_accuracy = bootstrap_accuracy((scores > 0) == positive, groups, draws=draws, seed=seed)
    return (
        percentile_intervals(fold_auroc(scores, positive, test), of_auroc, stretch=stretch),
        percentile_intervals(accuracy(scores, positive), of_accuracy, stretch=stretch),
    )


def _columns(name: str, intervals: Intervals) -> dict[str, np.ndarray]:
    return {
        name: intervals.estimate.numpy(),
        f"{name}_low": intervals.low.numpy(),
        f"{name}_high": intervals.high.numpy(),
    }

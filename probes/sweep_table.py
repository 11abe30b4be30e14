"""A sweep's numbers: a table row per probe from its out-of-fold scores, and what choosing the best site is worth."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64, Shaped
from torch import Tensor

from microtome.capture.sites import Site
from microtome.probes.bootstrap import Intervals
from microtome.probes.measures import Resampling, baseline_rate, intervals_of, others_of
from microtome.probes.nested_fit import NestedFit
from microtome.probes.permutation import BestSiteNull
from microtome.probes.sweep_result import SelectedSite
from microtome.probes.target import MAIN, Kind

CONTROLS = ("control", "control_task")  # shuffled labels; one label per type


def sweep_table(
    probes: Sequence[Site],
    fits: Sequence[NestedFit],
    labellings: Shaped[Tensor, "labelling example"],
    kind: Kind,
    rows: Resampling,
    null: BestSiteNull | None,
) -> pd.DataFrame:
    """One row per probe; `Sweep` says what the columns mean. `labellings` are the real labels, shuffled ones and, if
    there is one, a control task."""
    main = MAIN[kind]
    real = measured(torch.stack([fit.scores[0] for fit in fits]), labellings[0], kind, rows)
    columns: dict = {
        "site": [str(probe) for probe in probes],
        "kind": [str(replace(probe, layer=None, head=None)) for probe in probes],
        "layer": pd.array([probe.layer for probe in probes], dtype="Int64"),
        "head": pd.array([probe.head for probe in probes], dtype="Int64"),
        **real,
    }
    for number, name in enumerate(CONTROLS, start=1):
        if number < len(labellings):
            scores = torch.stack([fit.scores[number] for fit in fits])
            intervals = intervals_of(scores, labellings[number], kind, rows)
            columns |= {f"{name}_{column}": value for column, value in _columns(intervals).items()}
            gain = "selectivity" if number == 1 else f"{name}_selectivity"
            columns[gain] = real[main] - columns[f"{name}_{main}"]
    missing = np.full(len(probes), math.nan)
    columns |= {
        "p_best_site": missing if null is None else null.p_value.numpy(),
        f"ridge_{main}": missing if null is None else null.statistic.numpy(),
        "strength": [fit.strength for fit in fits],
        "width": [fit.coefficients.shape[-1] for fit in fits],
        "majority_rate": baseline_rate(labellings[0], kind),
    }
    return pd.DataFrame(columns)


def baseline_table(
    fits: Mapping[str, NestedFit], truth: Shaped[Tensor, " example"], kind: Kind, rows: Resampling
) -> pd.DataFrame:
    """One row per baseline, with the measures of a sweep."""
    if not fits:
        return pd.DataFrame({"baseline": pd.Series(dtype="str")})
    scores = torch.stack([fit.scores[0] for fit in fits.values()])
    return pd.DataFrame({"baseline": list(fits), **measured(scores, truth, kind, rows)})


def selected_site(
    probes: Sequence[Site],
    fits: Sequence[NestedFit],
    truth: Shaped[Tensor, " example"],
    kind: Kind,
    rows: Resampling,
) -> SelectedSite:
    """Score each outer fold by the probe with the lowest inner loss in it, which saw none of the fold's rows."""
    choice = torch.stack([fit.inner_loss[0] for fit in fits]).argmin(dim=0)
    scores = torch.empty_like(fits[0].scores[:1])
    for fold, is_test in enumerate(rows.test):
        scores[0, is_test] = fits[choice[fold]].scores[0, is_test]
    values = _columns(intervals_of(scores, truth, kind, rows))
    return SelectedSite(
        sites=tuple(str(probes[number]) for number in choice.tolist()),
        measures={name: column.item() for name, column in values.items()},
    )


def measured(
    scores: Float64[Tensor, "probe example *output"], truth: Shaped[Tensor, " example"], kind: Kind, rows: Resampling
) -> dict[str, np.ndarray]:
    """Every measure of `measures` as a column, the main one first."""
    others = others_of(scores, truth, kind, rows.test)
    return _columns(intervals_of(scores, truth, kind, rows)) | {name: value.numpy() for name, value in others.items()}


def _columns(intervals: Mapping[str, Intervals]) -> dict[str, np.ndarray]:
    columns = {}
    for name, interval in intervals.items():
        columns[name] = interval.estimate.numpy()
        columns[f"{name}_low"], columns[f"{name}_high"] = interval.low.numpy(), interval.high.numpy()
    return columns

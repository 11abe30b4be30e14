"""Did erasure work, on rows it was not fitted on: the AUROC of refitted probes at every site, before and after.

In each outer fold the eraser and the probe see its training rows alone. `auroc_after` is the probe refitted on erased
training rows, judged on erased test rows. On its training rows no linear probe beats a constant, so what it still
learns is rounding: scores that spread by less than 1e-6 there count as constant (AUROC 0.5). `auroc_relearned` asks the
sharper question whether the concept is still there in rows the eraser never saw: the test rows of a fold, erased, are
halved by group, and a probe fitted on one half is judged on the other.

Beware: with few rows for the width, an eraser misses part of the concept in new rows, and auroc_relearned says so; it
also has fewer rows to learn from than `auroc_before`, so compare it with `auroc_relearned_before`, which has as many.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from microtome.probes.erasure_maps import Erasures
from microtome.probes.folds import grouped_folds
from microtome.probes.inlp import inlp
from microtome.probes.labelled_rows import labelled_rows
from microtome.probes.leace import leace, one_hot
from microtome.probes.logistic_solver import fit_logistic
from microtome.probes.metrics import fold_auroc

CONSTANT = 1e-6  # spread of scores, in logits


def erased_sweep_check(
    activations,
    labels,
    *,
    groups,
    sites: Sequence | None = None,
    method: str = "leace",
    iterations: int = 10,
    C: int | float | None = None,
    folds: int = 5,
    seed: int = 0,
) -> pd.DataFrame:
    """One line per site (and head): site, kind, layer, head, auroc_before, auroc_after, auroc_relearned_before,
    auroc_relearned, rank (dimensions taken out, mean over folds), changed (mean squared change of a test row as a share
    of its mean squared distance from the mean).

    Args:
        activations: Activations, or a mapping of names to arrays `[row, d]` or `[row, head, d]`.
        labels: one of two values per row.
        groups: one key per row, or "rows": whole groups are held out.
        method: "leace" or "inlp" (at most `iterations`).
        C: inverse strength of the probes; None is 1 / width.

    Raises ValueError for other labels than two values, another method, and groups and folds that cannot be.
    """
    if method not in ("leace", "inlp"):
        raise ValueError(f"method={method!r}; give 'leace' or 'inlp'.")
    data = labelled_rows(activations, labels, groups=groups, sites=sites, target="binary")
    target, codes = data.target, data.groups
    test = grouped_folds(target.codes, codes, folds=folds, seed=seed)
    halves = _halves(test, target.codes, codes, seed)
    positive = target.values
    lines = []
    for block in data.blocks:
        features = block.features.double()
        strength = 1 / block.width if C is None else float(C)
        before = _held_out(features, positive, torch.from_numpy(test), strength)
        after, again, again_before = (torch.zeros_like(before) for _ in range(3))
        rank, moved = [], []
        for number, rows in enumerate(test):
            train = torch.from_numpy(~rows)
            if method == "leace":
                erasures = leace(features[:, train], one_hot(positive[train].long(), 2))
            else:
                options = {"iterations": iterations, "C": strength, "groups": codes[~rows], "seed": seed}
                erasures = inlp(features[:, train], positive[train].long(), **options).erasures
            erased = erasures.apply(features)
            after[:, ~train] = _scores(erased, positive, train, strength)[:, ~train]
            for half in halves[number]:
                fitted, judged = torch.from_numpy(half), ~train & ~torch.from_numpy(half)
                again[:, judged] = _scores(erased, positive, fitted, strength)[:, judged]
                again_before[:, judged] = _scores(features, positive, fitted, strength)[:, judged]
            rank.append(_ranks(erasures))
            distance = (features[:, ~train] - erasures.mean[:, None]).square().sum((1, 2))
            moved.append((erased - features)[:, ~train].square().sum((1, 2)) / distance)
        judged_by = torch.from_numpy(test), torch.from_numpy(halves.reshape(-1, halves.shape[-1]))
        columns = {
            "auroc_before": fold_auroc(before, positive, judged_by[0]),
            "auroc_after": fold_auroc(after, positive, judged_by[0]),
            "auroc_relearned_before": fold_auroc(again_before, positive, judged_by[1]),
            "auroc_relearned": fold_auroc(again, positive, judged_by[1]),
            "rank": torch.stack(rank).mean(0),
            "changed": torch.stack(moved).mean(0),
        }
        for number, site in enumerate(block.probes):
            place = {"site": str(site), "kind": site.kind, "layer": site.layer, "head": site.head}
            lines.append(place | {name: float(values[number]) for name, values in columns.items()})
    return pd.DataFrame(lines).astype({"layer": "Int64", "head": "Int64"})


def _held_out(
    features: Tensor, positive: Tensor, test: Bool[Tensor, "fold example"], strength: float
) -> Float64[Tensor, "site example"]:
    """Scores of every row by the probe of the fold that held it out; all folds in one call."""
    fits = fit_logistic(features, positive[None], ~test, [strength], class_weight="balanced")
    decision = fits.decision(features)[:, 0, :, 0]
    return torch.where(test, decision, 0.0).sum(1)


def _scores(
    features: Float64[Tensor, "site example feature"], positive: Tensor, train: Tensor, strength: float
) -> Float64[Tensor, "site example"]:
    """Scores of every row, 0 where those of the training rows are constant but for rounding."""
    fits = fit_logistic(features, positive[None], train, [strength], class_weight="balanced")
    scores = fits.decision(features)[:, 0, 0, 0]
    spread = scores[:, train].std(1, correction=0)
    return torch.where((spread > CONSTANT)[:, None], scores, 0.0)


def _ranks(erasures: Erasures) -> Float64[Tensor, " site"]:
    return (erasures.left != 0).any(1).sum(1).double()


def _halves(test: np.ndarray, labels: np.ndarray, codes: np.ndarray, seed: int) -> Bool[np.ndarray, "fold 2 example"]:
    """Two halves of each fold's test rows, groups whole, both classes in each."""
    found = np.zeros((len(test), 2, test.shape[1]), dtype=bool)
    for number, rows in enumerate(test):
        try:
            found[number][:, rows] = grouped_folds(labels[rows], codes[rows], folds=2, seed=seed + number)
        except ValueError as error:
            raise ValueError(
                f"The test rows of fold {number} cannot be halved; ask for fewer folds. {error}"
            ) from error
    return found

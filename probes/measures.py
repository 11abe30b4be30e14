"""What a sweep says of out-of-fold scores, by the kind of target: its main measure with intervals, and the rest.

Two classes: AUROC, accuracy (threshold: logit 0), balanced accuracy, average precision, log-loss in bits. Several
classes: the mean AUROC of each class against the others (macro), accuracy of the largest logit, mean recall (balanced
accuracy), macro-F1, log-loss in bits of the softmax. Both: the calibration error ECE beside its floor, what the same
probabilities would have if they were right (`calibration`). Numbers: R2 = 1 - sum (y - prediction)^2 / sum (y - mean
of the fold's training rows)^2, Spearman's rank correlation, and the root mean square error in the unit of the labels.

AUROC is over pairs of rows that one fit tested (`fold_auroc`); intervals are cluster-bootstrap ones, widened for
cross-validation (`bootstrap`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float32, Float64, Int64, Shaped
from torch import Tensor

from microtome.probes.bootstrap import (
    Intervals,
    bootstrap_accuracy,
    bootstrap_auroc,
    bootstrap_r2,
    cross_validation_stretch,
    percentile_intervals,
)
from microtome.probes.calibration import calibration_error, calibration_floor, stated
from microtome.probes.imbalance import average_precision, macro_f1
from microtome.probes.metrics import (
    average_ranks,
    balanced_accuracy,
    class_loss_bits,
    fold_auroc,
    log_loss_bits,
    majority_rate,
    refuse_nan,
)
from microtome.probes.target import Kind

SECOND: Mapping[Kind, str | None] = {"binary": "accuracy", "classes": "accuracy", "numbers": None}


@dataclass(frozen=True)
class Resampling:
    """How rows are resampled for intervals: groups, test folds, draws and their seed."""

    groups: Int64[Tensor, " example"]
    test: Bool[Tensor, "fold example"]
    draws: int
    seed: int

    @property
    def stretch(self) -> float:
        """By which intervals over these folds are widened."""
        return cross_validation_stretch(len(self.test))


def intervals_of(
    scores: Float64[Tensor, "probe example *output"],
    truth: Shaped[Tensor, " example"],
    kind: Kind,
    rows: Resampling,
) -> dict[str, Intervals]:
    """The measures that come with an interval, by name; the main one first.

    Raises ValueError for a NaN score and for labels of which no fold tests two classes.
    """
    value, draws = main_measure(scores, truth, kind, rows)
    if kind == "numbers":
        return {"r2": percentile_intervals(value, draws, stretch=rows.stretch, bounds=(-math.inf, 1.0))}
    is_right = right(scores, truth, kind)
    share = is_right.to(torch.float64).mean(dim=-1)
    shares = bootstrap_accuracy(is_right, rows.groups, draws=rows.draws, seed=rows.seed)
    return {
        "auroc": percentile_intervals(value, draws, stretch=rows.stretch),
        "accuracy": percentile_intervals(share, shares, stretch=rows.stretch),
    }


def main_measure(
    scores: Float64[Tensor, "probe example *output"],
    truth: Shaped[Tensor, " example"],
    kind: Kind,
    rows: Resampling,
) -> tuple[Float64[Tensor, " probe"], Float32[Tensor, "probe draw"]]:
    """AUROC (of classes the macro one) or R2 on the rows as they are, and in every draw of the groups.

    Probes share their draws. Raises as `intervals_of`.
    """
    how = {"draws": rows.draws, "seed": rows.seed}
    if kind == "numbers":
        errors, null = squared_errors(scores, truth, rows.test)
        return 1 - errors.sum(dim=1) / null.sum(), bootstrap_r2(errors, null, rows.groups, **how)
    one_by_one = against_rest(scores, truth)
    value = torch.stack([fold_auroc(one, is_it, rows.test) for one, is_it in one_by_one]).mean(dim=0)
    draws = sum(bootstrap_auroc(one, is_it, rows.groups, rows.test, **how) for one, is_it in one_by_one)
    return value, draws / len(one_by_one)


def against_rest(
    scores: Float64[Tensor, "probe example *output"], truth: Bool[Tensor, " example"] | Int64[Tensor, " example"]
) -> list[tuple[Float64[Tensor, "probe example"], Bool[Tensor, " example"]]]:
    """Scores of each class that rows have, and whether a row is of it; of two classes the positive one alone."""
    if truth.dtype == torch.bool:
        return [(scores, truth)]
    return [(scores[..., code], truth == code) for code in truth.unique().tolist()]


def others_of(
    scores: Float64[Tensor, "probe example *output"],
    truth: Shaped[Tensor, " example"],
    kind: Kind,
    test: Bool[Tensor, "fold example"],
) -> dict[str, Float64[Tensor, " probe"]]:
    """The measures without an interval, by name."""
    if kind == "numbers":
        errors, _ = squared_errors(scores, truth, test)
        return {"spearman": spearman(scores, truth), "rmse": errors.mean(dim=1).sqrt()}
    confidence, came_true = stated(scores, truth)
    calibration = {"ece": calibration_error(confidence, came_true), "ece_floor": calibration_floor(confidence)}
    if kind == "binary":
        return {
            "balanced_accuracy": balanced_accuracy(scores, truth),
            "average_precision": average_precision(scores, truth),
            "bits": log_loss_bits(scores, truth),
            **calibration,
        }
    recalls = torch.stack([came_true[:, truth == code].double().mean(dim=1) for code in truth.unique()])
    return {
        "balanced_accuracy": recalls.mean(dim=0),
        "macro_f1": macro_f1(scores.argmax(dim=-1), truth),
        "bits": class_loss_bits(scores, truth).mean(dim=-1),
        **calibration,
    }


def right(
    scores: Float64[Tensor, "probe example *output"], truth: Shaped[Tensor, " example"], kind: Kind
) -> Bool[Tensor, "probe example"]:
    """Whether the answer is right: the sign of a logit, or the class of the largest one."""
    refuse_nan(scores)
    return (scores > 0) == truth if kind == "binary" else scores.argmax(dim=-1) == truth


def squared_errors(
    predictions: Float64[Tensor, "probe example"],
    numbers: Float64[Tensor, " example"],
    test: Bool[Tensor, "fold example"],
) -> tuple[Float64[Tensor, "probe example"], Float64[Tensor, " example"]]:
    """Of each prediction, and of the mean of the rows its fold trained on."""
    refuse_nan(predictions)
    means = torch.stack([numbers[~rows].mean() for rows in test])
    null = (numbers - means[test.long().argmax(dim=0)]).square()
    return (predictions - numbers).square(), null


def spearman(
    scores: Float64[Tensor, "probe example"], numbers: Float64[Tensor, " example"]
) -> Float64[Tensor, " probe"]:
    """Correlation of ranks over all rows, ties at their mean rank; 0 for a constant score."""
    left, right = average_ranks(scores), average_ranks(numbers[None])
    left, right = left - left.mean(dim=1, keepdim=True), right - right.mean()
    size = left.square().sum(dim=1).sqrt() * right.square().sum().sqrt()
    return torch.where(size > 0, (left * right).sum(dim=1) / torch.where(size > 0, size, 1.0), 0.0)


def baseline_rate(truth: Shaped[Tensor, " example"], kind: Kind) -> float:
    """Accuracy of always answering the most frequent class; NaN for numbers, whose R2 has the mean built in."""
    if kind == "numbers":
        return math.nan
    return majority_rate(truth)

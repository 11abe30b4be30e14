"""Scores that a rare class does not flatter: average precision and macro-F1, of many probes at once.

    AP = sum_t (R_t - R_{t-1}) P_t        over the distinct scores t, descending; P precision, R recall at score >= t
    macro-F1 = mean_k 2 TP_k / (2 TP_k + FP_k + FN_k)

A useless score has AP equal to the share of positives (AUROC 0.5 whatever the share): show that beside it. AP is not
comparable between data of different shares. A class that is neither there nor answered counts F1 = 0, as in
scikit-learn's `zero_division=0`.
"""

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from microtome.probes.metrics import refuse_nan


def average_precision(
    scores: Float[Tensor, "*probe example"], positive: Bool[Tensor, "*#probe example"]
) -> Float64[Tensor, "*probe"]:
    """Area under precision over recall, a step per distinct score (no interpolation).

    Raises ValueError for a NaN score and labels without a positive.
    """
    refuse_nan(scores)
    if bool((~positive.any(dim=-1)).any()):
        raise ValueError("No label is positive, so there is no recall. Give rows of the positive class.")
    ordered, order = scores.sort(dim=-1, descending=True)
    is_true = positive.expand(scores.shape).gather(-1, order).double()
    found = is_true.cumsum(dim=-1)
    precision = found / torch.arange(1, scores.shape[-1] + 1)
    # equal scores are passed at once: each has the precision at the last of them
    is_last = torch.ones_like(ordered, dtype=torch.bool)
    is_last[..., :-1] = ordered[..., 1:] != ordered[..., :-1]
    place = torch.arange(scores.shape[-1]).expand(scores.shape)
    last = torch.where(is_last, place, scores.shape[-1] - 1).flip(-1).cummin(dim=-1).values.flip(-1)
    return (precision.gather(-1, last) * is_true).sum(dim=-1) / found[..., -1]


def macro_f1(
    answers: Int64[Tensor, "*probe example"], labels: Int64[Tensor, " example"], n_classes: int | None = None
) -> Float64[Tensor, "*probe"]:
    """Mean of the classes' F1. Answers and labels are class numbers 0..K-1; K is the largest of both plus 1 if None.

    Raises ValueError for numbers outside the classes.
    """
    n_classes = int(torch.maximum(answers.max(), labels.max())) + 1 if n_classes is None else n_classes
    for name, codes in (("answers", answers), ("labels", labels)):
        if int(codes.min()) < 0 or int(codes.max()) >= n_classes:
            raise ValueError(f"{name} hold {int(codes.min())} to {int(codes.max())}; classes are 0 to {n_classes - 1}.")
    number = torch.arange(n_classes)[:, None]
    answered, there = answers[..., None, :] == number, labels == number
    hits = (answered & there).sum(dim=-1).double()
    total = answered.sum(dim=-1) + there.sum(dim=-1)
    return (2 * hits / total.clamp(min=1)).mean(dim=-1)

"""Scores of many probes at once: AUROC by ranks, accuracy, balanced accuracy, log-loss in bits.

AUROC = U / (n_pos n_neg), U = sum of the positives' ranks - n_pos (n_pos + 1) / 2, ties at their mean rank
(Mann-Whitney; Hanley & McNeil 1982). Swapping the labels gives exactly 1 - AUROC, a constant score exactly 0.5.

Beware: scores of different folds come from different fits, so pooling them before ranking compares unlike things
(pooled AUROC of pure noise sits below 0.5, because a fold's intercept moves against its own class share).
`fold_auroc` therefore counts only pairs of rows tested by the same fit.
"""

import math

import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped
from torch import Tensor


def average_ranks(scores: Float[Tensor, "*probe example"]) -> Float64[Tensor, "*probe example"]:
    """Rank of each score within its row, from 1; equal scores share the mean of their ranks."""
    ordered, order = scores.sort(dim=-1)
    n = scores.shape[-1]
    place = torch.arange(1, n + 1, device=scores.device).expand(scores.shape)
    starts = torch.ones_like(place, dtype=torch.bool)
    starts[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    first = torch.where(starts, place, 0).cummax(dim=-1).values
    ends = starts.roll(-1, dims=-1)
    ends[..., -1] = True
    last = torch.where(ends, place, n + 1).flip(-1).cummin(dim=-1).values.flip(-1)
    ranks = torch.empty(scores.shape, dtype=torch.float64, device=scores.device)
    return ranks.scatter_(-1, order, (first + last).to(torch.float64) / 2)


def auroc(
    scores: Float[Tensor, "*probe example"], positive: Bool[Tensor, "*#probe example"]
) -> Float64[Tensor, "*probe"]:
    """Share of (positive, negative) pairs that the score orders rightly, a tie counting half.

    `positive` is one label row for all probes or one per probe. Raises ValueError for a NaN score and for labels that
    lack a class.
    """
    wins, pairs = _wins_and_pairs(scores, positive)
    _refuse_one_class(pairs, positive)
    return _share(wins, pairs)


def fold_auroc(
    scores: Float[Tensor, "*probe example"],
    positive: Bool[Tensor, "*#probe example"],
    test: Bool[Tensor, "fold example"],
) -> Float64[Tensor, "*probe"]:
    """AUROC over the pairs that lie in one test fold: the mean of the folds' AUROC, weighted by their pairs.

    Raises ValueError for a NaN score and if no fold holds both classes.
    """
    wins, pairs = 0.0, 0.0
    for rows in test:
        w, p = _wins_and_pairs(scores[..., rows], positive[..., rows])
        wins, pairs = wins + w, pairs + p
    _refuse_one_class(pairs, positive)
    return _share(wins, pairs)


def accuracy(
    scores: Float[Tensor, "*probe example"], positive: Bool[Tensor, "*#probe example"], *, threshold: float = 0.0
) -> Float64[Tensor, "*probe"]:
    """Share of rows on the right side of the threshold (score > threshold means positive)."""
    refuse_nan(scores)
    return ((scores > threshold) == positive).to(torch.float64).mean(dim=-1)


def balanced_accuracy(
    scores: Float[Tensor, "*probe example"], positive: Bool[Tensor, "*#probe example"], *, threshold: float = 0.0
) -> Float64[Tensor, "*probe"]:
    """Mean of the two classes' accuracies: 0.5 for a constant answer. Raises ValueError if a class is missing."""
    refuse_nan(scores)
    is_right = (scores > threshold) == positive
    n_positive, n = positive.sum(dim=-1), positive.shape[-1]
    _refuse_one_class(n_positive * (n - n_positive), positive)
    right_positive = (is_right & positive).sum(dim=-1) / n_positive.to(torch.float64)
    right_negative = (is_right & ~positive).sum(dim=-1) / (n - n_positive).to(torch.float64)
    return (right_positive + right_negative) / 2


def log_loss_bits(
    logits: Float[Tensor, "*probe example"], positive: Bool[Tensor, "*#probe example"]
) -> Float64[Tensor, "*probe"]:
    """Mean of -log2 p(label) per row, p the logistic function of the logit; 1 bit for a coin."""
    return logit_loss_bits(logits, positive).mean(dim=-1)


def logit_loss_bits(
    logits: Float[Tensor, "*probe example"], positive: Bool[Tensor, "*#probe example"]
) -> Float64[Tensor, "*probe example"]:
    """-log2 p(label) of each row, safe for any finite logit."""
    refuse_nan(logits)
    signed = torch.where(positive, -logits, logits).to(torch.float64)
    return torch.nn.functional.softplus(signed, threshold=40) / math.log(2)


def class_loss_bits(
    logits: Float[Tensor, "*probe example output"], codes: Int64[Tensor, "*#probe example"]
) -> Float64[Tensor, "*probe example"]:
    """-log2 of the softmax probability of each row's class, in bits; log2 K where all logits are the same."""
    refuse_nan(logits)
    logits = logits.to(torch.float64)
    chosen = logits.gather(-1, codes.expand(logits.shape[:-1])[..., None])[..., 0]
    return (logits.logsumexp(dim=-1) - chosen) / math.log(2)


def majority_rate(labels: Shaped[Tensor, " example"]) -> float:
    """Accuracy of always answering the most frequent class."""
    return labels.unique(return_counts=True)[1].max().item() / len(labels)


def _wins_and_pairs(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    refuse_nan(scores)
    n_positive = positive.sum(dim=-1).to(torch.float64)
    ranks = torch.where(positive, average_ranks(scores), 0.0).sum(dim=-1)
    return ranks - n_positive * (n_positive + 1) / 2, n_positive * (positive.shape[-1] - n_positive)


def _share(wins: Float64[Tensor, "*probe"], pairs: Float64[Tensor, "*#probe"]) -> Float64[Tensor, "*probe"]:
    """wins / pairs, computed from the larger side so that swapped labels give exactly one minus it."""
    larger = torch.maximum(wins, pairs - wins) / pairs
    return torch.where(2 * wins >= pairs, larger, 1 - larger)


def refuse_nan(scores: Tensor) -> None:
    """Raise ValueError if a score is NaN, naming the first."""
    if scores.isnan().any():
        where = tuple(scores.isnan().nonzero()[0].tolist())
        raise ValueError(
            f"{int(scores.isnan().sum())} of the scores are NaN (first at index {where}); a NaN has no rank."
        )


def _refuse_one_class(pairs: Tensor, positive: Tensor) -> None:
    if (pairs == 0).any():
        raise ValueError(
            f"No pair of a positive and a negative: {int(positive.sum())} of {positive.numel()} labels are positive. "
            "AUROC and balanced accuracy need rows of both classes."
        )

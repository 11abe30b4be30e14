"""Probes of one training domain at many sites: nested fits on its rows, scores for the rows of every domain.

Each outer fold is a call of the solver of its own, which gets no test row of it, so no bit of what it learns depends on
them.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from microtome.probes.control_task import shuffled_labels
from microtome.probes.logistic_solver import default_strengths, fit_logistic
from microtome.probes.metrics import logit_loss_bits

_TOLERANCE = 1e-6
_SHUFFLES_TRIED = 100


def source_scores(
    features: Float[Tensor, "site example feature"],
    labellings: Bool[Tensor, "labelling example"],
    test: Bool[Tensor, "fold example"],
    train: Bool[Tensor, "fold mask example"],
    strengths: Sequence[float] | None,
) -> tuple[Float64[Tensor, "site labelling example"], Float64[Tensor, "site fold"]]:
    """Logits of each row from the probes of its fold, and the mean inner loss of the chosen strength (real labels).

    The last mask of each fold is its whole training part; rows that it holds and another mask does not are inner test.
    """
    values = list(strengths or default_strengths(features.shape[2]))
    scores = torch.empty(len(features), len(labellings), features.shape[1], dtype=torch.float64)
    inner_loss = torch.empty(len(features), len(test), dtype=torch.float64)
    for fold, rows in enumerate(test):
        # a call per fold, so that no bit of a fold depends on its test rows
        logits = fit_logistic(features, labellings, train[fold], values, tolerance=_TOLERANCE).decision(features)
        whole = train[fold, -1]
        loss = torch.zeros(*logits.shape[:2], len(values), dtype=torch.float64)
        for number, mask in enumerate(train[fold, :-1]):
            held_out = whole & ~mask
            loss += logit_loss_bits(logits[:, :, number][..., held_out], labellings[:, None, held_out]).sum(dim=-1)
        best = loss.argmin(dim=-1)
        inner_loss[:, fold] = loss[:, 0].amin(dim=-1) / whole.sum()
        at_best = best[..., None, None].expand(*best.shape, 1, logits.shape[-1])
        scores[..., rows] = logits[:, :, -1].gather(2, at_best)[:, :, 0][..., rows]
    return scores, inner_loss


def with_shuffled(
    positive: Bool[Tensor, " example"],
    codes: Int64[np.ndarray, " own"],
    own: Int64[np.ndarray, " own"],
    train: Bool[Tensor, "fold mask example"],
    controls: int,
    seed: int,
) -> Bool[Tensor, "labelling example"]:
    """The labels, and the labels of one domain shuffled by group so that every training mask holds both classes."""
    labellings = [positive]
    for attempt in range(_SHUFFLES_TRIED * controls):
        shuffled = positive.clone()
        shuffled[own] = torch.from_numpy(shuffled_labels(positive.numpy()[own], codes, seed=seed + attempt))
        held = (train & shuffled).sum(dim=-1)
        if bool(((held > 0) & (held < train.sum(dim=-1))).all()):
            labellings.append(shuffled)
        if len(labellings) > controls:
            return torch.stack(labellings)
    raise ValueError(
        f"Hardly any of {_SHUFFLES_TRIED * controls} shuffles of a domain's labels leaves every training fold both "
        "classes. Too few of its groups carry one of the classes: add groups, or ask for fewer folds."
    )

"""Nested cross-validation of many sites' networks: inner folds choose the number of epochs, outer folds score it.

What `nested_fit` does for the strength of a linear probe, for the number of epochs of `fit_mlps`: in outer fold f the
network is trained on the training rows of each inner fold, its log-loss on the inner held-out rows taken after every
epoch; the epoch of lowest mean loss is the one at which the network trained on all of f's training rows scores f's test
rows. So both kinds of probe train on the same rows, choose by the same measure on the same rows, and are scored once.
NL-ITI keeps the epoch, and then ranks the heads, by accuracy on one validation set: that uses the set twice.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from microtome.probes.mlp_fits import fit_mlps
from microtome.probes.mlp_networks import MlpSettings


@dataclass(frozen=True, eq=False)
class MlpScores:
    """Held-out scores of many sites' networks under several labellings."""

    scores: Float64[Tensor, "site labelling example *output"]  # natural logits, from the fold that held the row out
    inner_bits: Float64[Tensor, "site labelling fold"]  # of the chosen epoch, mean over inner held-out rows
    epochs: Int64[Tensor, "site labelling fold"]  # the chosen one, from 1


def mlp_nested_fits(
    features: Float[Tensor, "site example feature"],
    labellings: Bool[Tensor, "labelling example"] | Int64[Tensor, "labelling example"],
    test: Bool[Tensor, "fold example"],
    nested: Bool[Tensor, "fold inner example"],
    *,
    settings: MlpSettings | None = None,
    seed: int = 0,
) -> MlpScores:
    """Score every site under every labelling over outer folds `test` and inner folds `nested` (`nested_folds`).

    Each outer fold's training gets no test row of it. Cost: folds x (inner folds + 1) trainings per site and labelling.
    Raises ValueError as `fit_mlps`.
    """
    scores, inner_bits, epochs = [], [], []
    order = []
    for rows, inner in zip(test, nested, strict=True):
        choosing = fit_mlps(
            features, labellings, ~rows & ~inner, validation=inner, settings=settings, seed=seed
        ).validation_bits
        share = inner.sum(1).double() / inner.sum()
        lowest = (choosing * share[:, None]).sum(2).min(-1)
        fits = fit_mlps(
            features, labellings, ~rows[None], keep=lowest.indices[..., None] + 1, settings=settings, seed=seed
        )
        scores.append(fits.logits(features[:, rows])[:, :, 0])
        inner_bits.append(lowest.values)
        epochs.append(lowest.indices + 1)
        order.append(rows.nonzero()[:, 0])
    back = torch.cat(order).argsort()
    return MlpScores(
        scores=torch.cat(scores, 2)[:, :, back],
        inner_bits=torch.stack(inner_bits, 2),
        epochs=torch.stack(epochs, 2),
    )

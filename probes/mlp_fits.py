"""Small ReLU networks for all sites x label sets x folds at once: the probe of NL-ITI, trained side by side.

Per probe, on features standardised with the training rows of its fold:

    a_0 = x̂,  a_l = max(0, W_l a_{l-1} + b_l),  logits = W a + b    (d -> 16 -> 1 by default),

cross-entropy averaged over a batch of 32 rows, batches in a fresh order every epoch, the incomplete last one dropped;
Adam with learning rate 5e-4 and 1e-4 of every parameter added to its gradient, 10 epochs: the settings of the code of
NL-ITI (Hoscilowicz et al. 2024), which normalises the hidden layer by batch instead. That makes an answer depend on the
rows it is asked beside, so here the features are standardised once, by training rows, and nothing else is.

A step of one probe is too small to fill a processor: called one by one, nearly all the time goes to the calls. Here a
block of sites that fits the cache takes each step together, forward and backward written out as batched products into
buffers made once, and takes all its steps before the next block begins.

Start values (uniform within ±1/sqrt(inputs), torch's own for a linear layer) and batches depend on the seed, the widths
and the number of training rows alone. They are the same at every site, and a probe's answer does not depend, beyond
the rounding of float32, on which others it is trained with.

Beware: no convergence is claimed. Ten epochs at this rate stop early, which holds the network back where rows are few;
loss falls on with more epochs or a larger rate, until it rises again on rows that were held out (`validation`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from torch import Tensor

from microtome.probes.metrics import logit_loss_bits
from microtome.probes.mlp_networks import MlpSettings, Networks
from microtome.probes.site_threads import side_by_side

_CACHE_BYTES = 2**20  # parameters with their gradients and moments, and one batch, of the sites that step together
_ROWS_BYTES = 2**26  # their standardised rows
_LARGEST = 1e100  # squares of features must not overflow


@dataclass(frozen=True, eq=False)
class MlpFits:
    """Trained networks. Logits are natural; axis `output` is one for two classes, else one per class."""

    weights: tuple[Float32[Tensor, "site label_set fold _ _"], ...]  # by layer: inputs, outputs
    biases: tuple[Float32[Tensor, "site label_set fold _"], ...]
    mean: Float64[Tensor, "site fold feature"]  # of the training rows
    scale: Float64[Tensor, "site fold feature"]  # their deviation; 1 where a feature is constant, and then it counts 0
    epochs: Int64[Tensor, "site label_set fold"]  # after which the parameters were kept
    validation_bits: Float64[Tensor, "site label_set fold epoch"]  # mean log-loss of the validation rows; NaN if none

    def logits(
        self, features: Float[Tensor, "site example feature"]
    ) -> Float64[Tensor, "site label_set fold example *output"]:
        """Of every row under every probe of its site; no axis `output` for two classes."""
        n_labels = self.weights[0].shape[1]
        two_classes = self.weights[-1].shape[-1] == 1
        rows = features.double()[:, None]
        values = ((rows - self.mean[:, :, None]) / self.scale[:, :, None])[:, None]
        values = values.expand(-1, n_labels, -1, -1, -1)
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            values = values @ weight.double() + bias[..., None, :].double()
            values = values if number == len(self.weights) - 1 else values.clamp_min(0)
        return values[..., 0] if two_classes else values


def fit_mlps(
    features: Float[Tensor, "site example feature"],
    labels: Bool[Tensor, "label_set _"] | Int64[Tensor, "label_set _"],
    train: Bool[Tensor, "fold _"],
    *,
    validation: Bool[Tensor, "_ _"] | None = None,
    keep: Int64[Tensor, "site label_set fold"] | None = None,
    settings: MlpSettings | None = None,
    seed: int = 0,
) -> MlpFits:
    """Train every site x label set x fold.

    Args:
        features: in any float dtype; standardised in float64, trained on in float32.
        labels: True or False, or class numbers 0..K-1.
        train: the rows each fold trains on; no other row, but the validation ones, is read.
        validation: rows whose log-loss after each epoch chooses the one that is kept. Not the rows to report on.
        keep: the epoch (from 1) whose parameters are kept instead; the last if neither is given.
        settings: `MlpSettings()` if None.
        seed: fixes start values and batches. Batches are `torch.randperm` over the training rows in ascending order,
            once per epoch, of a generator with this seed.

    Raises ValueError for NaN, infinite or enormous features, masks or labels of another length, a fold that trains on
    one class or validates on no row or on one it trains on, class numbers below 0, and epochs outside 1..epochs.
    """
    settings = settings or MlpSettings()
    n_outputs = 1 if labels.dtype == torch.bool else int(labels.max()) + 1
    _check(features, labels, train, validation, keep, settings)
    n_sites, _, width = features.shape
    sizes = (width, *settings.hidden, n_outputs)
    target = labels[..., None].float()
    if n_outputs > 1:
        target = torch.nn.functional.one_hot(labels, n_outputs).float()
    together = _sites_together(sizes, settings.batch, int(train.sum(1).max()))
    if features.device.type == "cpu":
        together = min(together, -(-n_sites // torch.get_num_threads()))
    tasks = [(fold, block) for fold in range(len(train)) for block in torch.arange(n_sites).split(together)]

    def fit(task: tuple[int, Tensor]) -> tuple:
        fold, block = task
        judged = None if validation is None else validation[fold]
        wanted = None if keep is None else keep[block][:, :, fold]
        return _fit_block(features[block], labels, target, train[fold], judged, wanted, sizes, settings, seed)

    parts = side_by_side(fit, tasks) if features.device.type == "cpu" else [fit(task) for task in tasks]
    per_fold = len(parts) // len(train)
    by_fold = [parts[start : start + per_fold] for start in range(0, len(parts), per_fold)]

    def arranged(field: int, axis: int) -> Tensor:
        return torch.stack([torch.cat([part[field] for part in of_fold]) for of_fold in by_fold], axis)

    n_layers = len(sizes) - 1
    mean, scale, epochs, bits = arranged(0, 1), arranged(1, 1), arranged(2, 2), arranged(3, 2)
    layers = tuple(arranged(4 + number, 2) for number in range(2 * n_layers))
    return MlpFits(
        weights=layers[:n_layers], biases=layers[n_layers:], mean=mean, scale=scale, epochs=epochs, validation_bits=bits
    )


def _fit_block(features, labels, target, train, validation, keep, sizes, settings, seed) -> tuple:
    """Mean, scale, epochs, validation bits, then weights and biases by layer, of some sites in one fold."""
    n_sites, n_labels = len(features), len(labels)
    rows = features[:, train].double()
    mean = rows.mean(1)
    deviation = rows.std(1, correction=0)
    # a constant column may leave a deviation of rounding errors
    is_constant = (rows == rows[:, :1]).all(1)
    mean, scale = torch.where(is_constant, rows[:, 0], mean), torch.where(is_constant, 1.0, deviation)
    rows = ((rows - mean[:, None]) / scale[:, None]).float()
    judged = None
    if validation is not None:
        judged = ((features[:, validation].double() - mean[:, None]) / scale[:, None]).float()
    rows = rows.transpose(0, 1).contiguous()
    kept: list[list[Tensor]] = []
    epochs = torch.full((n_sites, n_labels), settings.epochs, dtype=torch.int64, device=features.device)
    bits = torch.full((n_sites, n_labels, settings.epochs), torch.nan, dtype=torch.float64, device=features.device)
    for number in range(n_labels):
        networks = Networks(n_sites, sizes, seed, features.device)
        best = [tensor.clone() for tensor in networks.tensors]
        lowest = torch.full((n_sites,), torch.inf, dtype=torch.float64, device=features.device)
        for epoch in networks.epochs(rows, target[number, train], settings, seed):
            is_wanted = torch.full_like(lowest, epoch == settings.epochs, dtype=torch.bool)
            if judged is not None:
                bits[:, number, epoch - 1] = _bits(networks.logits(judged), labels[number, validation])
                is_wanted = bits[:, number, epoch - 1] < lowest
                lowest = torch.where(is_wanted, bits[:, number, epoch - 1], lowest)
            if keep is not None:
                is_wanted = keep[:, number] == epoch
            epochs[is_wanted, number] = epoch
            for tensor, value in zip(best, networks.tensors, strict=True):
                tensor[is_wanted] = value[is_wanted]
        kept.append(best)
    layers = [torch.stack(values, 1) for values in zip(*kept, strict=True)]
    n_layers = len(sizes) - 1
    return mean, scale, epochs, bits, *layers[:n_layers], *(bias[:, :, 0] for bias in layers[n_layers:])


def _bits(logits: Float32[Tensor, "site example output"], labels: Tensor) -> Float64[Tensor, " site"]:
    """Mean log-loss in bits."""
    if logits.shape[-1] == 1:
        return logit_loss_bits(logits[..., 0], labels).mean(-1)
    logs = logits.double().log_softmax(-1)
    return -logs.gather(-1, labels.expand(len(logits), -1)[..., None])[..., 0].mean(-1) / math.log(2)


def _sites_together(sizes: Sequence[int], batch: int, n_train: int) -> int:
    """Sites whose steps stay in the cache and whose rows stay in memory."""
    n_parameters = sum(n_in * n_out + n_out for n_in, n_out in pairwise(sizes))
    step = 4 * (4 * n_parameters + batch * (sizes[0] + 3 * sum(sizes[1:])))
    rows = 20 * n_train * sizes[0]
    return max(1, min(_CACHE_BYTES // step, _ROWS_BYTES // rows))


def _check(features, labels, train, validation, keep, settings) -> None:
    """Raise ValueError for input that no probe can be trained on."""
    n_rows = features.shape[1]
    for name, given in (("labels", labels), ("train", train), ("validation", validation)):
        if given is not None and given.shape[-1] != n_rows:
            raise ValueError(f"{name} covers {given.shape[-1]} rows, features have {n_rows}; give one entry per row.")
    for site, rows in enumerate(features):
        if not bool(rows.abs().amax() < _LARGEST):  # nor is NaN
            row, feature = (~(rows.abs() < _LARGEST)).nonzero()[0].tolist()
            raise ValueError(
                f"features hold NaN, inf or numbers past {_LARGEST:g}, first at site {site}, row {row}, "
                f"feature {feature}; drop the row or fix the capture."
            )
    if labels.dtype != torch.bool and int(labels.min()) < 0:
        raise ValueError(f"labels hold class number {int(labels.min())}; classes are 0..K-1 (pandas.factorize).")
    for fold, rows in enumerate(train):
        for number, label in enumerate(labels):
            if len(label[rows].unique()) < 2:
                raise ValueError(
                    f"fold {fold} trains label set {number} on {int(rows.sum())} rows of fewer than two classes; use "
                    "stratified folds, or more rows of the rare class."
                )
    if validation is not None:
        if len(validation) != len(train):
            raise ValueError(f"validation has {len(validation)} folds, train {len(train)}; give one row of each.")
        for fold, (held, rows) in enumerate(zip(validation, train, strict=True)):
            if not bool(held.any()) or bool((held & rows).any()):
                raise ValueError(
                    f"fold {fold} has {int(held.sum())} validation rows, {int((held & rows).sum())} of which it trains "
                    "on; give rows of their own, or validation=None."
                )
    if keep is not None and not bool(((keep >= 1) & (keep <= settings.epochs)).all()):
        raise ValueError(
            f"keep holds epochs {int(keep.min())} to {int(keep.max())}; they count from 1 to {settings.epochs}."
        )

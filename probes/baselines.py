"""What the words alone give: baselines without a model, on the very folds of a sweep.

    bag      logistic regression of the text's words (tf-idf; `word_features`)
    length   the same of its characters, words and tokens, and their logarithms
    position the same of the probed position in the text
    token    the probed token alone: p(class | token) = (n_class + a pi_class) / (n + a), pi the class shares of the
             training rows: a one-hot regression whose penalty is a, so a token never seen gets pi
    majority pi: AUROC one half, accuracy of the more frequent class

The strength (C, or 1/a) of each has the lowest loss on inner folds. With K classes the regressions are one against the
rest, their probabilities divided by their sum. Of numbers they are ridge regressions. Vocabulary, means and scales come
from the training rows of the outer fold.

Beware: a probe that does no better than the bag shows a label in the words, not in what the model makes of them. The
other way round proves little: a few hundred texts are few to learn a vocabulary from, and the model has seen many more.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float64, Int64, Shaped
from torch import Tensor

from microtome.probes.logistic_solver import fit_logistic
from microtome.probes.metrics import logit_loss_bits
from microtome.probes.nested_fit import NestedFit
from microtome.probes.word_features import WordFeatures, bag_of_words, lengths, numbers_and_logs

# of features whose total variance is 1, so C is the prior variance of a row's log odds
STRENGTHS = tuple(float(value) for value in np.logspace(-1.5, 2.5, 7))
WEIGHTS_OF_EVIDENCE = tuple(2.0**power for power in range(-5, 4))  # 1/a of the token's rates
_TOLERANCE = 1e-5

Labellings = Shaped[Tensor, "labelling example"]


@dataclass(frozen=True)
class _Model:
    """Scores of all rows under every labelling, training mask and strength, and the refit on all rows."""

    strengths: tuple[float, ...]
    path: Callable  # (training rows, masks [mask, example]) -> [labelling, mask, strength, example, *output]
    refit: Callable  # (strength) -> coefficients [*output, feature], intercept [*output] of the first labelling


def baselines(
    texts: Iterable | None,
    *,
    labellings: Bool[Tensor, "labelling example"]
    | Int64[Tensor, "labelling example"]
    | Float64[Tensor, "labelling example"],
    test: Bool[Tensor, "fold example"],
    nested: Bool[Tensor, "fold inner example"],
    rows: pd.DataFrame | None = None,
    token_counts: Iterable | None = None,
) -> dict[str, NestedFit]:
    """Out-of-fold scores of every baseline that the data allow, by name.

    Args:
        texts: one string per row, for `bag` and `length`; None leaves both out. A text may stand in several rows.
        labellings: as for `nested_fits`: bool, class numbers 0..K-1, or numbers; the real labels first.
        test, nested: outer and inner test rows (`grouped_folds`, `nested_folds`).
        rows: a row table; its columns `token` and `position`, where rows differ in them, give `token` and `position`.
        token_counts: tokens of each text, for `length`.

    Scores are natural logits, [labelling, example]; with K classes log-probabilities [labelling, example, class];
    predicted numbers for numbers. Coefficients are per raw feature of the refit on all rows.
    Texts that share no word tell nothing: their bag is a constant. Raises ValueError for texts that are not one string
    per row.
    """
    n_rows = labellings.shape[1]
    models = {}
    if texts is not None:
        texts = _strings(texts, n_rows)
        counts = None if token_counts is None else [int(count) for count in token_counts]
        models["bag"] = _regression(lambda train: bag_of_words(texts, train), labellings)
        models["length"] = _regression(lambda train: lengths(texts, counts, train), labellings)
    if rows is not None and "position" in rows and rows["position"].nunique() > 1 and (rows["position"] >= 0).all():
        columns = {"position": rows["position"].tolist()}
        models["position"] = _regression(lambda train: numbers_and_logs(columns, train), labellings)
    if rows is not None and "token" in rows and rows["token"].nunique() > 1:
        models["token"] = _rates(rows["token"], labellings)
    models["majority"] = _rates(pd.Series(["all"] * n_rows), labellings, strengths=(1.0,))
    return {name: _nested(model, labellings, test, nested) for name, model in models.items()}


def _nested(model: _Model, labellings: Labellings, test: Tensor, nested: Tensor) -> NestedFit:
    values = torch.tensor(model.strengths, dtype=torch.float64)
    shape = (len(labellings), len(test))
    chosen, inner_loss = torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.float64)
    outer_loss = torch.zeros(len(values), dtype=torch.float64)
    scores = None
    for fold, rows in enumerate(test):
        train = ~rows
        path = model.path(train, torch.cat([train & ~nested[fold], train[None]]))
        held_out = sum(
            _loss(path[:, number][:, :, inner], labellings[:, None, inner]) for number, inner in enumerate(nested[fold])
        )
        loss = held_out / train.sum()
        chosen[:, fold] = loss.argmin(dim=-1)
        inner_loss[:, fold] = loss.amin(dim=-1)
        scores = torch.zeros(path.shape[0], *path.shape[3:], dtype=torch.float64) if scores is None else scores
        for labelling, best in enumerate(chosen[:, fold].tolist()):
            scores[labelling, rows] = path[labelling, -1, best][rows]
        outer_loss += _loss(path[0, -1][:, rows], labellings[:1, rows])
    strength = model.strengths[int(outer_loss.argmin())]
    coefficients, intercept = model.refit(strength)
    return NestedFit(
        scores=scores,
        inner_loss=inner_loss,
        fold_strengths=values[chosen],
        strength=strength,
        coefficients=coefficients,
        intercept=intercept,
    )


def _regression(design: Callable, labellings: Labellings) -> _Model:
    """Logistic or ridge regression of `design(training rows)`; of nothing but a constant where that is None."""
    everyone = torch.ones(labellings.shape[1], dtype=torch.bool)

    def features(train: Tensor) -> WordFeatures:
        made = design(train)
        if made is not None:
            return made
        nothing = torch.zeros(len(train), 1, dtype=torch.float64)
        return WordFeatures(rows=nothing, axes=nothing[:1], mean=nothing[0], names=("nothing",))

    def path(train: Tensor, masks: Tensor) -> Tensor:
        rows = features(train).rows
        weights, intercepts = _weights(rows, labellings, masks, STRENGTHS)
        scores = torch.einsum("lms...d,nd->lmsn...", weights, rows) + intercepts[:, :, :, None]
        return _log_probabilities(scores) if labellings.dtype == torch.int64 else scores

    def refit(strength: float) -> tuple[Tensor, Tensor]:
        made = features(everyone)
        weights, intercepts = _weights(made.rows, labellings[:1], everyone[None], (strength,))
        return made.raw(weights[0, 0, 0], intercepts[0, 0, 0])

    return _Model(STRENGTHS, path, refit)


def _weights(rows: Tensor, labellings: Labellings, masks: Tensor, strengths: tuple) -> tuple[Tensor, Tensor]:
    """[labelling, mask, strength, *output, axis] and [labelling, mask, strength, *output]."""
    if labellings.dtype == torch.float64:
        return _ridge(rows, labellings, masks, strengths)
    if labellings.dtype == torch.bool:
        fits = fit_logistic(rows, labellings, masks, strengths, standardize=False, tolerance=_TOLERANCE)
        return fits.weights[0], fits.intercepts[0]
    n_classes = int(labellings.max()) + 1
    against_rest = (labellings[:, None] == torch.arange(n_classes)[:, None]).flatten(0, 1)
    fits = fit_logistic(rows, against_rest, masks, strengths, standardize=False, tolerance=_TOLERANCE)
    by_class = (len(labellings), n_classes)
    return fits.weights[0].unflatten(0, by_class).movedim(1, 3), fits.intercepts[0].unflatten(0, by_class).movedim(1, 3)


def _ridge(rows: Tensor, numbers: Tensor, masks: Tensor, strengths: tuple) -> tuple[Tensor, Tensor]:
    """argmin |y - b - Z w|^2 + |w|^2 / C per labelling, mask and strength."""
    penalty = 1 / torch.tensor(strengths, dtype=torch.float64)
    weights, intercepts = [], []
    for mask in masks:
        mean, level = rows[mask].mean(dim=0), numbers[:, mask].mean(dim=1)
        centred = rows[mask] - mean
        variance, axes = torch.linalg.eigh(centred.T @ centred)
        projected = axes.T @ centred.T @ (numbers[:, mask] - level[:, None]).T  # [axis, labelling]
        shrunk = projected / (variance.clamp(min=0) + penalty[:, None])[..., None]  # [strength, axis, labelling]
        weights.append(torch.einsum("da,sal->lsd", axes, shrunk))
        intercepts.append(level[:, None] - weights[-1] @ mean)
    return torch.stack(weights, dim=1), torch.stack(intercepts, dim=1)


def _rates(kinds: pd.Series, labellings: Labellings, strengths: tuple[float, ...] = WEIGHTS_OF_EVIDENCE) -> _Model:
    """Mean of the labels of each kind of row, drawn to the overall mean by a = 1 / strength rows of it."""
    codes = torch.from_numpy(pd.factorize(kinds, use_na_sentinel=False)[0].astype(np.int64))
    n_kinds = int(codes.max()) + 1
    is_number = labellings.dtype == torch.float64
    n_classes = 2 if labellings.dtype == torch.bool else int(labellings.max()) + 1
    values = labellings[..., None] if is_number else torch.nn.functional.one_hot(labellings.long(), n_classes).double()

    def rates(masks: Tensor, values: Tensor, strengths: tuple) -> tuple[Tensor, Tensor]:
        """[labelling, mask, strength, kind, column] and the overall means [labelling, mask, column]."""
        count = torch.zeros(n_kinds, len(masks), dtype=torch.float64).index_add_(
            0, codes, masks.double().T.contiguous()
        )
        held = torch.einsum("lnc,mn->nlmc", values, masks.double())
        total = torch.zeros(n_kinds, *held.shape[1:], dtype=torch.float64).index_add_(0, codes, held)
        overall = total.sum(dim=0) / count.sum(dim=0)[:, None]
        pseudo = 1 / torch.tensor(strengths, dtype=torch.float64)[:, None, None]  # [strength, 1, 1]
        total = total.movedim(0, 2)[:, :, None] + pseudo * overall[:, :, None, None]
        return total / (count.T[:, None, :, None] + pseudo), overall

    def scored(shares: Tensor) -> Tensor:
        if is_number:
            return shares[..., 0]
        shares = shares.clamp(min=1e-12).log()
        return shares[..., 1] - shares[..., 0] if labellings.dtype == torch.bool else shares

    def path(_: Tensor, masks: Tensor) -> Tensor:
        return scored(rates(masks, values, strengths)[0])[:, :, :, codes]

    def refit(strength: float) -> tuple[Tensor, Tensor]:
        by_kind, overall = rates(torch.ones(1, len(codes), dtype=torch.bool), values[:1], (strength,))
        level = scored(overall[0, 0])
        return torch.movedim(scored(by_kind[0, 0, 0]) - level, 0, -1), level

    return _Model(strengths, path, refit)


def _loss(scores: Shaped[Tensor, "..."], labels: Shaped[Tensor, "..."]) -> Float64[Tensor, "..."]:
    """Summed over rows: bits, or squared errors of numbers. scores [*, example, *output], labels [*, example]."""
    if labels.dtype == torch.float64:
        return (scores - labels).square().sum(dim=-1)
    if labels.dtype == torch.bool:
        return logit_loss_bits(scores, labels).sum(dim=-1)
    at = labels.expand(scores.shape[:-1])[..., None]
    return -scores.log_softmax(dim=-1).gather(-1, at)[..., 0].sum(dim=-1) / np.log(2)


def _log_probabilities(scores: Float64[Tensor, "..."]) -> Float64[Tensor, "..."]:
    """Of one-against-rest logits: each class's probability divided by their sum."""
    logs = torch.nn.functional.logsigmoid(scores)
    return logs - logs.logsumexp(dim=-1, keepdim=True)


def _strings(texts: Iterable, n_rows: int) -> list[str]:
    texts = list(texts)
    if len(texts) != n_rows:
        raise ValueError(f"texts has {len(texts)} entries for {n_rows} rows. Pass one string per row, or None.")
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"texts[{row}] is {text!r}, no string. Pass one string per row, or texts=None.")
    return texts

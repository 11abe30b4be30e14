"""What is known of a text without a model: its words, its lengths; as features whose scale comes from training rows.

Words (and punctuation marks) are weighted tf-idf with tf = 1 + log(count), rows of unit length. Features are then
centred, divided by their deviation (lengths) or left alone (words, or the rarest would weigh most), turned to their
principal axes and divided by one number so that the training rows have total variance 1:

    z = (x - mean) V / s,  s^2 = total variance of the training rows,

which an L2 penalty on z cannot tell from one on (x - mean) / s: with all axes it is exact. More than `MOST_AXES`
(beyond some 600 training rows) are cut off, the least varying first.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

MOST_AXES = 600
MOST_WORDS = 2000
_WORD = r"(?u)\w+|[^\w\s]"


@dataclass(frozen=True, eq=False)
class WordFeatures:
    """Rows on principal axes of the training rows, and the way back to a weight per raw feature."""

    rows: Float64[Tensor, "example axis"]
    axes: Float64[Tensor, "feature axis"]  # rows = (raw - mean) @ axes
    mean: Float64[Tensor, " feature"]
    names: tuple[str, ...]

    def raw(
        self, weights: Float64[Tensor, "*output axis"], intercept: Float64[Tensor, "*output"]
    ) -> tuple[Float64[Tensor, "*output feature"], Float64[Tensor, "*output"]]:
        """Weights and intercept per unit of the raw features."""
        weights = weights @ self.axes.T
        return weights, intercept - weights @ self.mean


def bag_of_words(texts: Sequence[str], train: Bool[Tensor, " example"]) -> WordFeatures | None:
    """tf-idf of the words that occur in two training texts or more, the `MOST_WORDS` most frequent of them.

    None if all training texts have the same of them, or none at all: then no word tells anything.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer  # importing it draws from Python's random state

    distinct = list(dict.fromkeys(texts))
    number = {text: place for place, text in enumerate(distinct)}
    trained = [texts[row] for row in train.nonzero()[:, 0].tolist()]
    n_holding = Counter(word for text in trained for word in set(re.findall(_WORD, text.lower())))
    if not any(count > 1 for count in n_holding.values()):
        return None
    vectors = TfidfVectorizer(min_df=2, max_features=MOST_WORDS, sublinear_tf=True, token_pattern=_WORD)
    vectors.fit(trained)
    raw = vectors.transform(distinct).toarray()[[number[text] for text in texts]]
    return _on_axes(torch.from_numpy(raw), train, tuple(vectors.get_feature_names_out()))


def lengths(
    texts: Sequence[str], token_counts: Sequence[int] | None, train: Bool[Tensor, " example"]
) -> WordFeatures | None:
    """Characters and words of each text, and tokens if they are given, each as it is and as log(1 + n), standardised.

    None if all training rows are of one length.
    """
    counts = {
        "characters": [len(text) for text in texts],
        "words": [len(re.findall(_WORD, text)) for text in texts],
    }
    if token_counts is not None:
        counts["tokens"] = list(token_counts)
    return numbers_and_logs(counts, train)


def numbers_and_logs(columns: dict[str, Sequence], train: Bool[Tensor, " example"]) -> WordFeatures | None:
    """Columns of numbers >= 0 and their log(1 + n), standardised; None if the training rows agree in all of them."""
    raw = np.stack([np.asarray(column, dtype=np.float64) for column in columns.values()], axis=1)
    raw = torch.from_numpy(np.concatenate([raw, np.log1p(raw)], axis=1))
    deviation = raw[train].std(dim=0, unbiased=False)
    names = (*columns, *(f"log {name}" for name in columns))
    return _on_axes(raw, train, names, divisor=torch.where(deviation > 0, deviation, torch.inf))


def _on_axes(
    raw: Float64[Tensor, "example feature"],
    train: Bool[Tensor, " example"],
    names: tuple[str, ...],
    divisor: Float64[Tensor, " feature"] | None = None,
) -> WordFeatures | None:
    mean = raw[train].mean(dim=0)
    divisor = torch.ones_like(mean) if divisor is None else divisor
    centred = (raw[train] - mean) / divisor
    if bool((raw[train] == raw[train][:1]).all()):
        return None
    if len(centred) < centred.shape[1]:
        variance, left = torch.linalg.eigh(centred @ centred.T)
        kept = _largest(variance)
        axes = centred.T @ left[:, kept] / variance[kept].sqrt()
    else:
        variance, right = torch.linalg.eigh(centred.T @ centred)
        axes = right[:, _largest(variance)]
    scale = (variance.sum() / len(centred)).sqrt()
    axes = axes / divisor[:, None] / scale
    return WordFeatures(rows=(raw - mean) @ axes, axes=axes, mean=mean, names=names)


def _largest(variance: Float64[Tensor, " axis"]) -> Bool[Tensor, " axis"]:
    """Which of the ascending variances are kept: the largest ones, and none that is rounding."""
    kept = variance > 1e-10 * variance[-1].clamp(min=1e-300)
    kept[: max(0, len(variance) - MOST_AXES)] = False
    return kept

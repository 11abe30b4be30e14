"""Sums over the queries of each text, by score, layer and head, and the averages and intervals that they give.

    score = sum over texts of sums / sum over texts of weights

A plain mean has a weight of one for each query. A sink-removed, renormalised score has the weight that is not on the
first token as its weight: a query that looks at little but the sink then counts little, where a mean of ratios would
let it decide. Ratios of sums are exact under any grouping of texts, so that passes can be stopped, added and drawn from
again: intervals are percentiles over documents drawn with replacement.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from microtome.lenses.documents import document_draws


@dataclass(frozen=True, eq=False)
class HeadSums:
    """names: of the scores. sums, weights: `[text, score, layer, head]`, float64."""

    names: tuple[str, ...]
    sums: np.ndarray
    weights: np.ndarray

    def means(self) -> dict[str, np.ndarray]:
        """By score `[layer, head]`; NaN where no query counts."""
        return {name: _ratio(self.sums[:, i].sum(0), self.weights[:, i].sum(0)) for i, name in enumerate(self.names)}

    def intervals(
        self, documents: Sequence[int] | np.ndarray, *, draws: int, seed: int, level: float = 0.95
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Low and high end of each score, by a bootstrap over documents (one number per text).

        NaN with fewer than two documents, of which nothing can be said.
        """
        codes = np.unique(np.asarray(documents), return_inverse=True)[1]
        shape, count = self.sums.shape[2:], int(codes.max()) + 1
        if count < 2:
            empty = np.full(shape, np.nan)
            return dict.fromkeys(self.names, (empty, empty))
        taken = document_draws(count, draws, seed)
        tails = [50 * (1 - level), 50 * (1 + level)]
        found = {}
        for i, name in enumerate(self.names):
            above, below = (_by_document(values[:, i], codes, count) for values in (self.sums, self.weights))
            drawn = _ratio(taken @ above, taken @ below)
            some = ~np.isnan(drawn).all(0)
            ends = np.full((2, drawn.shape[1]), np.nan)
            # of columns one by one, and slow: only where a draw may hold no document that counts
            percentile = np.nanpercentile if np.isnan(drawn[:, some]).any() else np.percentile
            ends[:, some] = percentile(drawn[:, some], tails, axis=0)
            found[name] = (ends[0].reshape(shape), ends[1].reshape(shape))
        return found


def _by_document(values: np.ndarray, codes: np.ndarray, count: int) -> np.ndarray:
    flat = np.zeros((count, values[0].size))
    np.add.at(flat, codes, values.reshape(len(values), -1))
    return flat


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(below > 0, above / below, np.nan)

"""The published scores of transported features: only the rows where the target's dictionary fires, as of one operator.

    a, a_hat of rows with encode(y)_f > 1e-6:   R2 = max(1 - sum (a - a_hat)^2 / sum (a - mean a)^2, -1e6)
    Pearson r;   cosine = sum a a_hat / sqrt(sum a^2 sum a_hat^2), not centred;   rms ratio = rms a_hat / rms a
    rubric of the rms ratio: 0.9 to 1.1 excellent, 0.8 to 1.25 good, 0.6 to 1.67 fair, else poor

Szablewski and Masiak 2025 (arXiv 2508.17540, methods sheet 2.4). Beware: conditioning on an outcome shrinks the
variance to explain, so R2 can be far below 0 for a direction that is transported well (2.8.6); a is a projection of the
stream, the dictionary's bias not taken off (2.8.8). `activation_r2` is that of the activation itself, z = encode(y)
against encode(y_hat), over all rows and about the mean of these rows.
"""

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

FIRES = 1e-6
WORST = -1e6
_RUBRIC = (("excellent", 0.9, 1.1), ("good", 0.8, 1.25), ("fair", 0.6, 1.67))


class ActiveSums:
    """An accumulator: `add` changes it. Sums are about a point p near the target, which `table` takes out again."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._rows = 0
        self._offset: Tensor | None = None

    def add(
        self,
        a: Float[Tensor, "row direction"],
        missed: Float[Tensor, "row direction"],
        offset: Float[Tensor, " direction"],
        z: Float[Tensor, "row direction"],
        z_hat: Float[Tensor, "row direction"],
    ) -> None:
        """a: (y - p).u; missed: a - a_hat; offset: p.u, the same in every call; z, z_hat: activations."""
        fires = (z > FIRES).to(a)
        there, wrong, z, z_hat = a * fires, missed * fires, z.to(a), z_hat.to(a)
        parts = (fires, there, there * a, wrong, wrong * missed, there * missed, z, z.square(), (z - z_hat).square())
        found = torch.stack([part.sum(0) for part in parts]).to("cpu", torch.float64)
        self._sums = found if self._sums is None else self._sums + found
        self._rows += len(a)
        self._offset = offset.to("cpu", torch.float64)

    def table(self) -> pd.DataFrame:
        """One row per direction: active_rows, published_r2, published_pearson, published_cosine, published_rms_ratio,
        published_rubric, activation_r2; NaN (and "never fires") where nothing is to be said."""
        assert self._sums is not None
        assert self._offset is not None
        n, a, aa, e, ee, ae, z, zz, z_missed = self._sums.numpy()
        p = self._offset.numpy()
        with np.errstate(invalid="ignore", divide="ignore"):
            hat, hat_hat, a_hat = a - e, aa - 2 * ae + ee, aa - ae  # sums of (a_hat - p), squared, times (a - p)
            spread, spread_hat = aa - a**2 / n, hat_hat - hat**2 / n
            r2 = np.where(spread > 0, np.maximum(1 - ee / spread, WORST), np.nan)
            pearson = (a_hat - a * hat / n) / np.sqrt(spread * spread_hat)
            raw, raw_hat = aa + 2 * p * a + n * p**2, hat_hat + 2 * p * hat + n * p**2
            cosine = (a_hat + p * (a + hat) + n * p**2) / np.sqrt(raw * raw_hat)
            ratio = np.sqrt(raw_hat / raw)
            total = zz - z**2 / self._rows
            activation = np.where(total > 0, 1 - z_missed / total, np.nan)
        is_within = [(ratio >= low) & (ratio <= high) for _, low, high in _RUBRIC]
        words = np.select(is_within, [word for word, _, _ in _RUBRIC], "poor")
        return pd.DataFrame(
            {
                "active_rows": n.astype(int),
                "published_r2": r2,
                "published_pearson": pearson,
                "published_cosine": cosine,
                "published_rms_ratio": ratio,
                "published_rubric": np.where(n > 0, words, "never fires"),
                "activation_r2": activation,
            }
        )

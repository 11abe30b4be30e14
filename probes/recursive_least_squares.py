"""Recursive least squares: ridge regression updated block by block, with older rows forgotten at a chosen rate.

After N rows the weights minimise

    J = Σ_i φ^(N-1-i) (y_i - w·x_i - b)² + λ φ^N |w|²,   0 < φ ≤ 1,

φ = 1 being ridge regression of all rows. With A the matrix of the normal equations and P = A⁻¹, a block X of n rows,
scaled by the root of its own weights, changes P by Woodbury's identity with P' = P/φⁿ:

    K = P'Xᵀ (I + X P'Xᵀ)⁻¹,   w += K (y - X w),   P = P' - K X P'

(Haykin, Adaptive Filter Theory, ch. 10, there row by row). b has no penalty, so P begins with the first block's
own inverse; features are taken about its mean. Cost d² per row, whatever came before.

Beware: λ ages with the rows, as in the textbook; with φ < 1 and features that stop varying, P grows without end.
"""

from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

_BLOCK = 128  # rows per update


class RecursiveLeastSquares(RegressorMixin, BaseEstimator):
    """Ridge regression that never sees a row twice.

    Parameters: penalty, λ of the sum of squares (scikit-learn's alpha), above 0; forgetting, φ per row.

    Attributes: coef_ `[feature]` or `[output, feature]`, intercept_; rows_seen_; inverse_ `[feature + 1, feature + 1]`,
    P, the intercept's row last, of features less offset_ `[feature]`.
    """

    def __init__(self, penalty=1.0, *, forgetting=1.0):
        self.penalty = penalty
        self.forgetting = forgetting

    def fit(self, X: Any, y: Any) -> "RecursiveLeastSquares":
        """Forget everything and go through these rows in their order."""
        self.__dict__.pop("inverse_", None)
        return self.partial_fit(X, y)

    def partial_fit(self, X: Any, y: Any) -> "RecursiveLeastSquares":
        """Go through further rows and numbers `[row]` or `[row, output]`, oldest first.

        Raises ValueError for a penalty that is not above 0, a forgetting outside (0, 1], and another number of features
        or outputs than before.
        """
        if not (np.isfinite(self.penalty) and self.penalty > 0):
            raise ValueError(f"penalty={self.penalty!r}; give a finite value above 0.")
        if not 0 < self.forgetting <= 1:
            raise ValueError(f"forgetting={self.forgetting!r}; give a factor per row above 0, at most 1.")
        is_first = not hasattr(self, "inverse_")
        X, y = validate_data(
            self, X, y, dtype=[np.float64, np.float32], multi_output=True, y_numeric=True, reset=is_first
        )
        targets = y.reshape(len(y), -1).astype(np.float64)
        if is_first:
            self._is_single, self.offset_, self.rows_seen_ = y.ndim == 1, X[:_BLOCK].mean(axis=0, dtype=np.float64), 0
        elif targets.shape[1] != self._weights.shape[1]:
            raise ValueError(f"y has {targets.shape[1]} outputs; earlier rows had {self._weights.shape[1]}.")
        rows = np.column_stack([X.astype(np.float64) - self.offset_, np.ones(len(X))])
        for start in range(0, len(rows), _BLOCK):
            self._count_in(rows[start : start + _BLOCK], targets[start : start + _BLOCK])
        weights = self._weights[:-1].T
        intercepts = self._weights[-1] - weights @ self.offset_
        self.coef_ = weights[0] if self._is_single else weights
        self.intercept_ = float(intercepts[0]) if self._is_single else intercepts
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The number of each row."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        return X.astype(np.float64) @ self.coef_.T + self.intercept_

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _count_in(self, rows: np.ndarray, targets: np.ndarray) -> None:
        n, width = rows.shape
        root = np.sqrt(self.forgetting ** np.arange(n - 1, -1, -1.0))[:, None]
        rows, targets, faded = rows * root, targets * root, self.forgetting**n
        if self.rows_seen_ == 0:
            penalty = np.append(np.full(width - 1, self.penalty * faded), 0.0)
            factor = cho_factor(rows.T @ rows + np.diag(penalty))
            self.inverse_ = cho_solve(factor, np.eye(width))
            self._weights = cho_solve(factor, rows.T @ targets)
        else:
            prior = self.inverse_ / faded
            spread = prior @ rows.T
            factor = cho_factor(np.eye(n) + rows @ spread)
            self._weights = self._weights + spread @ cho_solve(factor, targets - rows @ self._weights)
            inverse = prior - spread @ cho_solve(factor, spread.T)
            self.inverse_ = (inverse + inverse.T) / 2
        self.rows_seen_ += n

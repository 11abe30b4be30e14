"""Contrast-consistent search with scikit-learn's contract over `fit_ccs`, where loss, settings and traps are.

A row is a pair: a statement's features, then its negation's. Labels fix the sign of the direction and nothing else.
"""

from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from microtome.probes.ccs_fits import fit_ccs


class CCSProbe(ClassifierMixin, BaseEstimator):
    """Contrast-consistent search on pairs.

    Parameters: restarts, starts of which the best counts; steps, of AdamW; learning_rate and weight_decay, its; divide,
    whether each side is divided by its deviation as well as centred; seed, of the start values.

    Attributes: classes_ `[2]`, the second means that the positive side is true; coef_ `[1, 2 * feature]` and
    intercept_ `[1]`, of the difference of the two sides' logits, the sign fixed by y; direction_ `[feature]`, the
    positive side's weights at length 1; loss_, of the training pairs, the lowest of losses_ `[start]`; n_iter_.
    """

    def __init__(self, *, restarts=10, steps=1000, learning_rate=1e-3, weight_decay=0.01, divide=False, seed=0):
        self.restarts = restarts
        self.steps = steps
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.divide = divide
        self.seed = seed

    def fit(self, X: Any, y: Any) -> "CCSProbe":
        """Fit to pairs X `[pair, 2 * feature]`, the positive side's features first, then the negative side's.

        y `[pair]`, of two values, fixes the sign alone: the larger where the positive side is the true one. Raises
        ValueError for an odd number of features, one class or more than two, and as `fit_ccs`.
        """
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_ = np.unique(y)
        if len(self.classes_) != 2:
            raise ValueError(
                f"Only binary classification is supported. y has {len(self.classes_)} class(es) ({self.classes_[:5]}); "
                "it says of each pair whether the positive side is the true one, and must hold both answers."
            )
        if X.shape[1] % 2:
            raise ValueError(
                f"X has {X.shape[1]} features; CCSProbe needs an even number: the positive side's, then as many of the "
                "negative side's, X = np.hstack([x_positive, x_negative])."
            )
        sides = self._sides(X)
        fits = fit_ccs(
            *sides,
            torch.ones(1, len(y), dtype=torch.bool),
            torch.from_numpy(y == self.classes_[1]),
            restarts=self.restarts,
            steps=self.steps,
            learning_rate=float(self.learning_rate),
            weight_decay=float(self.weight_decay),
            divide=bool(self.divide),
            seed=self.seed,
        )
        self._fits = fits
        sign = float(fits.sign)
        ours, theirs = fits.coefficients[0, 0].numpy(), fits.negative_coefficients[0, 0].numpy()
        self.coef_ = sign * np.concatenate([ours, -theirs])[None]
        self.intercept_ = sign * (fits.intercept - fits.negative_intercept)[0].numpy()
        norm = np.linalg.norm(ours)
        self.direction_ = sign * ours / norm if norm > 0 else np.zeros_like(ours)
        self.loss_, self.losses_ = float(fits.loss), fits.losses[0, 0].numpy()
        self.n_iter_ = self.steps
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """2 answer - 1 of each pair `[pair]`, from -1 to 1; above 0 the positive side is taken for true."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        return self._fits.scores(*self._sides(X))[0, 0].numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The answer for each pair."""
        is_second = self.decision_function(X) > 0
        return self.classes_[is_second.astype(int)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """(p- + 1 - p+) / 2 and (p+ + 1 - p-) / 2 `[pair, 2]`; beware that nothing calibrates them."""
        answer = (self.decision_function(X) + 1) / 2
        return np.stack([1 - answer, answer], 1)

    def _sides(self, X: np.ndarray) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(np.require(X, requirements=["C", "W"]))[None]
        half = X.shape[1] // 2
        return rows[..., :half], rows[..., half:]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        tags.classifier_tags.poor_score = True  # labels do not choose the direction
        return tags

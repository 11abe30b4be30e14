"""What every linear classifier does once it is fitted: scores, the class they speak for, and its probability."""

from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted, validate_data


class LinearClassifier(ClassifierMixin, BaseEstimator):
    """Scores X coef_ᵀ + intercept_. Attributes of a fit: classes_ `[class]`, coef_ and intercept_, one row for two
    classes, one per class for more."""

    def decision_function(self, X: Any) -> np.ndarray:
        """Score `[row]` of the second of two classes, above 0 where it is chosen, or `[row, class]` of more."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        scores = X.astype(np.float64) @ self.coef_.T + self.intercept_
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict(self, X: Any) -> np.ndarray:
        """The class of the highest score."""
        check_is_fitted(self)
        scores = self.decision_function(X)
        return self.classes_[(scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)]


class LogitClassifier(LinearClassifier):
    """A linear classifier whose scores are log-odds of the second class, or logits of each class."""

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities `[row, class]`."""
        check_is_fitted(self)
        logits = torch.from_numpy(self.decision_function(X))
        if logits.ndim == 1:
            return torch.stack([torch.sigmoid(-logits), torch.sigmoid(logits)], 1).numpy()
        return logits.softmax(1).numpy()

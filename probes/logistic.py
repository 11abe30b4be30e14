"""L2-penalised logistic regression of two classes, with scikit-learn's contract over `fit_logistic`.

J(w, b) = |w|^2 / 2 + C sum_i s_i [softplus(z_i) - y_i z_i], z_i = w . x_i + b, the intercept without penalty:
scikit-learn's meaning of C. With `standardize` the penalty acts on the weights of features standardised in the
training rows; the weights kept are of the features as given.

Beware: on separable data the weights grow with C without end; `separated_` says so. C depends on the number of rows.
"""

from numbers import Integral
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from microtome.probes.logistic_solver import fit_logistic


class LogisticProbe(ClassifierMixin, BaseEstimator):
    """A linear probe.

    Parameters: C, the inverse strength of the penalty (finite, above 0); standardize, whether the penalty acts on
    features of mean 0 and deviation 1 in the training rows; class_weight, None, "balanced" (each class weighs the
    same) or a weight by class; tol, the largest gradient entry over C times the rows; max_iter, Newton steps.

    Attributes: classes_ `[2]`; coef_ `[1, feature]` and intercept_ `[1]`, of the features as given, log-odds of the
    second class; mean_ and scale_ `[feature]`, of the training rows; direction_ `[feature]`, coef_ at length 1;
    separated_, whether every training row is on its side; n_iter_, passes over the rows.
    """

    def __init__(
        self,
        C=1.0,
        *,
        standardize=True,
        class_weight=None,
        tol=1e-8,
        max_iter=100,
    ):
        self.C = C
        self.standardize = standardize
        self.class_weight = class_weight
        self.tol = tol
        self.max_iter = max_iter

    def fit(self, X: Any, y: Any) -> "LogisticProbe":
        """Fit to rows X `[row, feature]` and labels y `[row]` of two values.

        Raises ValueError for one class or more than two, and what `fit_logistic` raises.
        """
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_ = np.unique(y)
        if len(self.classes_) == 1:
            raise ValueError(
                f"y holds one class only ({self.classes_.tolist()[0]!r}); a probe needs rows of two classes."
            )
        if len(self.classes_) > 2:
            raise ValueError(
                f"Only binary classification is supported. y has {len(self.classes_)} classes ({self.classes_[:5]}). "
                "Fit one probe per class, against the others."
            )
        if not isinstance(self.max_iter, Integral) or self.max_iter < 1:
            raise ValueError(f"max_iter={self.max_iter!r}; give a whole number of Newton steps, at least 1.")
        positive = torch.tensor(y == self.classes_[1])
        weight, named = None, self.class_weight
        if isinstance(named, dict):
            weight = torch.tensor([float(named.get(label, 1.0)) for label in y.tolist()], dtype=torch.float64)
            named = None
        fits = fit_logistic(
            torch.from_numpy(np.require(X, requirements=["C", "W"])),
            positive,
            torch.ones(len(y), dtype=torch.bool),
            [float(self.C)],
            standardize=self.standardize,
            sample_weight=weight,
            class_weight=named,
            tolerance=float(self.tol),
            max_steps=self.max_iter,
        )
        self.coef_ = fits.raw_weights[0, 0, 0].numpy()
        self.intercept_ = fits.raw_intercepts[0, 0, 0].numpy()
        self.mean_, self.scale_ = fits.mean[0, 0].numpy(), fits.scale[0, 0].numpy()
        norm = np.linalg.norm(self.coef_)
        self.direction_ = self.coef_[0] / norm if norm > 0 else np.zeros_like(self.coef_[0])
        self.separated_ = bool(fits.separated[0, 0, 0, 0])
        self.n_iter_ = int(fits.passes[0, 0, 0, 0])
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Log-odds `[row]` of the second class."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        return X.astype(np.float64) @ self.coef_[0] + self.intercept_[0]

    def predict(self, X: Any) -> np.ndarray:
        """The likelier class of each row."""
        is_second = self.decision_function(X) > 0
        return self.classes_[is_second.astype(int)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities `[row, 2]` of the two classes."""
        logits = torch.tensor(self.decision_function(X))
        return torch.stack([torch.sigmoid(-logits), torch.sigmoid(logits)], 1).numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags

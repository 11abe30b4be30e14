"""L2-penalised logistic regression of two or more classes, with scikit-learn's contract over the batched solvers.

Two classes: J(w, b) = |w|^2 / 2 + C sum_i s_i [softplus(z_i) - y_i z_i], z_i = w . x_i + b. More:
J(W, b) = |W|^2 / 2 + C sum_i s_i [logsumexp(z_i) - z_i,y_i], z_ik = w_k . x_i + b_k, where all sum to zero over the
classes. The intercept is without penalty: scikit-learn's meaning of C. With `standardize` the penalty acts on the
weights of features standardised in the training rows; the weights kept are of the features as given.

Beware: on separable data the weights grow with C without end; `separated_` says so. C depends on the number of rows.
"""

from numbers import Integral
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, validate_data

from microtome.probes.linear_classifier import LogitClassifier
from microtome.probes.logistic_solver import fit_logistic
from microtome.probes.multinomial_solver import fit_multinomial


class LogisticProbe(LogitClassifier):
    """A linear probe.

    Parameters: C, the inverse strength of the penalty (finite, above 0); standardize, whether the penalty acts on
    features of mean 0 and deviation 1 in the training rows (by weight, where `fit` gets sample weights);
    class_weight, None, "balanced" (each class weighs the same) or a weight by class; tol, the largest gradient entry
    over C times the rows; max_iter, Newton steps.

    Attributes: classes_ `[class]`; coef_ `[1, feature]` and intercept_ `[1]`, of the features as given, log-odds of the
    second of two classes, or coef_ `[class, feature]` and intercept_ `[class]`, logits, of more; mean_ and scale_
    `[feature]`, of the training rows; direction_ `[feature]` or `[class, feature]`, coef_ at length 1; separated_,
    whether every training row is on its side; n_iter_, passes over the rows.
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

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "LogisticProbe":
        """Fit to rows X `[row, feature]`, labels y `[row]` and weights `[row]`: weight 2 is the row twice.

        Raises ValueError for one class, and what `fit_logistic` and `fit_multinomial` raise.
        """
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) == 1:
            raise ValueError(
                f"y holds one class only ({self.classes_.tolist()[0]!r}); a probe needs rows of two classes."
            )
        if not isinstance(self.max_iter, Integral) or self.max_iter < 1:
            raise ValueError(f"max_iter={self.max_iter!r}; give a whole number of Newton steps, at least 1.")
        if self.class_weight not in (None, "balanced") and not isinstance(self.class_weight, dict):
            raise ValueError(f'class_weight={self.class_weight!r}; give None, "balanced" or {{class: weight}}.')
        self.mean_, self.scale_ = None, None
        if sample_weight is not None:
            sample_weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
            if self.standardize:
                self.mean_, self.scale_ = _weighted_moments(X, sample_weight)
                X = (X - self.mean_) / np.where(self.scale_ > 0, self.scale_, np.inf)
        is_binary = len(self.classes_) == 2
        solve, labels = (fit_logistic, codes == 1) if is_binary else (fit_multinomial, codes)
        fits = solve(
            torch.from_numpy(np.require(X, requirements=["C", "W"])),
            torch.from_numpy(labels),
            torch.ones(len(y), dtype=torch.bool),
            [float(self.C)],
            standardize=self.standardize and self.mean_ is None,
            sample_weight=self._row_weights(y, sample_weight),
            class_weight="balanced" if self.class_weight == "balanced" else None,
            tolerance=float(self.tol),
            max_steps=self.max_iter,
        )
        coef = fits.raw_weights[0, 0, 0, 0].numpy()
        intercept = fits.raw_intercepts[0, 0, 0, 0].numpy()
        if self.mean_ is None:
            self.mean_, self.scale_ = fits.mean[0, 0].numpy(), fits.scale[0, 0].numpy()
        else:
            coef = coef / np.where(self.scale_ > 0, self.scale_, 1.0)
            intercept = intercept - coef @ self.mean_
        norm = np.linalg.norm(coef, axis=-1, keepdims=True)
        self.direction_ = coef / np.where(norm > 0, norm, 1.0)
        self.coef_, self.intercept_ = np.atleast_2d(coef), np.atleast_1d(intercept)
        self.separated_ = bool(fits.separated[0, 0, 0, 0])
        self.n_iter_ = int(fits.passes[0, 0, 0, 0])
        return self

    def _row_weights(self, y: np.ndarray, sample_weight: np.ndarray | None) -> torch.Tensor | None:
        """Sample weight times the weight of the class, if either is given by number."""
        if isinstance(self.class_weight, dict):
            of_class = np.array([float(self.class_weight.get(label, 1.0)) for label in y.tolist()])
            sample_weight = of_class if sample_weight is None else of_class * sample_weight
        return None if sample_weight is None else torch.from_numpy(sample_weight)


def _weighted_moments(
    X: np.ndarray, weight: Float64[np.ndarray, " example"]
) -> tuple[Float64[np.ndarray, " feature"], Float64[np.ndarray, " feature"]]:
    """Mean and deviation by weight; a deviation that is rounding noise of the mean is 0."""
    share = weight / weight.sum()
    pivot = X[weight.argmax()].astype(np.float64)
    offset = share @ (X - pivot)
    mean = pivot + offset
    deviation = np.sqrt(share @ (X - mean) ** 2)
    noise = np.finfo(np.float64).eps * len(X) * np.abs(mean)
    return mean, np.where(deviation > noise, deviation, 0.0)

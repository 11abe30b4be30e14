"""Ridge regression of numbers, and least squares on classes, with the strength chosen on left-out rows in closed form.

RidgeProbe minimises Σ s_i (y_i - w·x_i - b)² + ρ Σs |w|², b without penalty, features standardised in the training
rows; RidgeClassProbe does so with y = ±1, or one column of ±1 per class. Every strength ρ of the path is scored by the
residuals of rows (or groups) predicted without them (`ridge_path`), and the one of lowest mean square is kept.

Beware: leaving out a row of weight 2 is not leaving out one of two equal rows, so with several strengths weights and
repeats may choose differently (at one strength they agree). Rows that belong together must be given as `groups`, or
each is predicted with its twins at hand. Least squares on classes orders rows well, but its scores are no log-odds.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from microtome.probes.linear_classifier import LinearClassifier
from microtome.probes.moment_fits import DEFAULT_STRENGTHS
from microtome.probes.ridge_path import ridge_path


class RidgeProbe(RegressorMixin, BaseEstimator):
    """A linear probe of numbers.

    Parameters: strengths, ρ to choose from, penalties per training row, 0 or more (0, least squares, needs more rows
    than features); nine from 1e-4 to 100 if None. standardize, whether the penalty acts on features of mean 0 and
    deviation 1.

    Attributes: coef_ `[feature]` or `[output, feature]` and intercept_, of the features as given; strength_;
    left_out_r2_ `[strength]`, 1 less the squares of left-out residuals over those of the mean of the other rows;
    left_out_predictions_, of the training rows at strength_; direction_, coef_ at length 1.
    """

    def __init__(self, strengths=None, *, standardize=True):
        self.strengths = strengths
        self.standardize = standardize

    def fit(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> "RidgeProbe":
        """Fit to rows X `[row, feature]` and numbers y `[row]` or `[row, output]`.

        groups: one key per row, rows of a key are left out together; None leaves out single rows. Raises ValueError for
        one group, a negative strength or weight, NaN or infinity.
        """
        X, y = validate_data(
            self, X, y, dtype=[np.float64, np.float32], multi_output=True, y_numeric=True, ensure_min_samples=2
        )
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        targets = y.reshape(len(y), -1).astype(np.float64)
        found = _fit_path(X, targets, self.strengths, groups, weight, self.standardize)
        self.strength_, self.left_out_r2_ = found["strength"], found["r2"]
        is_single = y.ndim == 1
        self.coef_ = found["weights"][0] if is_single else found["weights"]
        self.intercept_ = float(found["intercepts"][0]) if is_single else found["intercepts"]
        self.left_out_predictions_ = found["predictions"][:, 0] if is_single else found["predictions"]
        self.direction_ = _unit(self.coef_)
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


class RidgeClassProbe(LinearClassifier):
    """A linear probe of classes by least squares.

    Parameters: strengths and standardize as of `RidgeProbe`; class_weight, None, "balanced" or a weight by class, times
    the rows' own.

    Attributes: classes_; coef_ `[1, feature]` (two classes, positive for the second) or `[class, feature]` and
    intercept_, of the features as given; strength_; left_out_accuracy_ and left_out_r2_ `[strength]`;
    left_out_scores_, decision values of the training rows at strength_; direction_, coef_ at length 1.
    """

    def __init__(self, strengths=None, *, standardize=True, class_weight=None):
        self.strengths = strengths
        self.standardize = standardize
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> "RidgeClassProbe":
        """Fit to rows X `[row, feature]` and labels y `[row]`. groups and errors as of `RidgeProbe.fit`; one class is
        refused."""
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], ensure_min_samples=2)
        check_classification_targets(y)
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        weight = weight * compute_sample_weight(self.class_weight, y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) == 1:
            raise ValueError(f"y holds one class only ({self.classes_.tolist()[0]!r}); a probe needs two or more.")
        targets = 2.0 * (codes[:, None] == np.arange(len(self.classes_))) - 1
        targets = targets[:, 1:] if len(self.classes_) == 2 else targets
        found = _fit_path(X, targets, self.strengths, groups, weight, self.standardize)
        self.strength_, self.left_out_r2_ = found["strength"], found["r2"]
        self.coef_, self.intercept_ = found["weights"], found["intercepts"]
        guessed = [_classes_of(scores) for scores in targets - found["residuals"]]
        self.left_out_accuracy_ = np.array([np.average(guess == codes, weights=weight) for guess in guessed])
        scores = found["predictions"]
        self.left_out_scores_ = scores[:, 0] if len(self.classes_) == 2 else scores
        self.direction_ = _unit(self.coef_[0] if len(self.coef_) == 1 else self.coef_)
        return self


def _fit_path(
    X: np.ndarray, targets: np.ndarray, strengths: Sequence[float] | None, groups: Any, weight: np.ndarray, scaled: bool
) -> dict[str, Any]:
    """The fit of the best strength and what the left-out rows say of all; rows of weight 0 take no part in it."""
    if groups is not None and len(groups) != len(X):
        raise ValueError(f"groups has {len(groups)} entries for {len(X)} rows. Pass one key per row.")
    values = np.asarray(DEFAULT_STRENGTHS if strengths is None else strengths, dtype=np.float64).reshape(-1)
    if not len(values) or not (np.isfinite(values) & (values >= 0)).all():
        raise ValueError(f"strengths={strengths!r}; give finite penalties per training row, 0 or more.")
    used = weight > 0
    codes = np.arange(len(X)) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    x, y, s, codes = X[used].astype(np.float64), targets[used], weight[used], codes[used]
    mean = np.average(x, axis=0, weights=s)
    deviation = np.sqrt(np.average((x - mean) ** 2, axis=0, weights=s))
    is_constant = deviation <= np.finfo(np.float64).eps * len(x) * np.abs(mean)
    scale = np.where(is_constant, 1.0, deviation if scaled else 1.0)
    # a constant feature is 0 at its mean: rounding noise must not be fitted
    standard = np.where(is_constant, 0.0, (x - mean) / scale)
    path = ridge_path(
        torch.from_numpy(standard)[None],
        torch.from_numpy(y),
        (values * s.sum()).tolist(),
        torch.from_numpy(codes),
        sample_weight=torch.from_numpy(s),
    )
    residuals = path.left_out_residuals[0].mT.numpy()  # [strength, row, output]
    squares = np.einsum("prk,r->pk", residuals**2, s)
    null = s @ (y - _means_without(y, s, codes)) ** 2
    with np.errstate(invalid="ignore", divide="ignore"):
        r2 = (1 - squares / null).mean(axis=1)
    total = np.where(np.isnan(squares), np.inf, squares / np.where(null > 0, null, 1.0)).sum(axis=1)
    best = int(total.argmin())
    weights = path.weights[0, best].numpy() / scale
    intercepts = path.intercepts[0, best].numpy() - weights @ mean
    every = np.broadcast_to(
        targets - (X.astype(np.float64) @ weights.T + intercepts), (len(values), *targets.shape)
    ).copy()
    every[:, used] = residuals
    return {
        "strength": float(values[best]),
        "r2": r2,
        "weights": weights,
        "intercepts": intercepts,
        "residuals": every,
        "predictions": targets - every[best],
    }


def _means_without(y: np.ndarray, weight: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """For each row, the weighted mean of the rows of other groups."""
    sums, counts = np.zeros((codes.max() + 1, y.shape[1])), np.bincount(codes, weights=weight)
    np.add.at(sums, codes, weight[:, None] * y)
    return ((sums.sum(axis=0) - sums) / (counts.sum() - counts)[:, None])[codes]


def _classes_of(scores: np.ndarray) -> np.ndarray:
    """Class numbers of `[row, 1]` or `[row, class]` scores."""
    return (scores[:, 0] > 0).astype(int) if scores.shape[1] == 1 else scores.argmax(axis=1)


def _unit(weights: np.ndarray) -> np.ndarray:
    norm = np.linalg.norm(weights, axis=-1, keepdims=True)
    return weights / np.where(norm > 0, norm, 1.0)

"""LDA and ridge from a stream of shards, for stores larger than memory.

Each `partial_fit` counts a shard into the moments (`moments`) and solves anew from them, so that after any shards in
any order the probe is the batch probe of all their rows: `LDAProbe` and `RidgeProbe` at that shrinkage or strength, to
rounding. A class that first appears later needs no earlier row again: in all of them its column was 0. Two probes of
different shards join exactly (`merged`).

Beware: memory is d² whatever the number of rows, and each call costs d³; give shards of more rows than features.
"""

from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from microtome.probes.lda import LDAProbe, checked_shrinkage, class_means, lda_weights
from microtome.probes.moment_probes import linear_path
from microtome.probes.moments import Moments


class StreamingLDA(LDAProbe):
    """`LDAProbe` at a given shrinkage, fitted a shard at a time.

    Attributes as of `LDAProbe`, and moments_, what the shards left. With one class so far there is no probe yet.
    """

    def __init__(self, shrinkage=0.1, *, standardize=True):
        self.shrinkage = shrinkage
        self.standardize = standardize

    def fit(self, X: Any, y: Any) -> "StreamingLDA":
        """Forget all shards and fit to these rows. Raises ValueError as `LDAProbe.fit`."""
        self._forget()
        self.partial_fit(X, y)
        if len(self.classes_) == 1:
            raise ValueError(f"y holds one class only ({self.classes_.tolist()[0]!r}); a probe needs two or more.")
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> "StreamingLDA":
        """Count in a shard. classes: not needed; classes_ are those of the rows so far."""
        is_first = not hasattr(self, "moments_")
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], reset=is_first)
        check_classification_targets(y)
        found, codes = np.unique(y, return_inverse=True)
        shard = Moments.empty(1, X.shape[1], len(found))
        hot = torch.nn.functional.one_hot(torch.from_numpy(codes), len(found)).double()
        shard.update(torch.from_numpy(np.require(X, requirements=["C", "W"]))[None], hot)
        if is_first:
            self.moments_, self.classes_ = shard, found
        else:
            self.moments_, self.classes_ = _joined(self.moments_, self.classes_, shard, found)
        self._solve()
        return self

    def merged(self, other: "StreamingLDA") -> "StreamingLDA":
        """The probe of both ones' rows, with this one's parameters. Raises ValueError for other numbers of features."""
        check_is_fitted(self, "moments_")
        check_is_fitted(other, "moments_")
        _refuse_other_width(self, other)
        result = type(self)(**self.get_params())
        result.n_features_in_ = self.n_features_in_
        result.moments_, result.classes_ = _joined(self.moments_, self.classes_, other.moments_, other.classes_)
        result._solve()
        return result

    def decision_function(self, X: Any) -> np.ndarray:
        """As of `LDAProbe`. Raises ValueError while only one class has been seen."""
        check_is_fitted(self)
        if len(self.classes_) == 1:
            raise ValueError(f"All rows so far are of class {self.classes_.tolist()[0]!r}; a probe needs two classes.")
        return super().decision_function(X)

    def _solve(self) -> None:
        self.shrinkage_ = checked_shrinkage(self.shrinkage)
        self.means_, self.priors_ = class_means(self.moments_).numpy(), self.moments_.target_mean[0].numpy().copy()
        if len(self.classes_) == 1:
            return
        self.coef_, self.intercept_ = lda_weights(self.moments_, self.shrinkage_, standardize=self.standardize)
        norm = np.linalg.norm(self.coef_, axis=1, keepdims=True)
        unit = self.coef_ / np.where(norm > 0, norm, 1.0)
        self.direction_ = unit[0] if len(unit) == 1 else unit

    def _forget(self) -> None:
        for name in ("moments_", "coef_", "intercept_", "direction_"):
            self.__dict__.pop(name, None)


class StreamingRidge(RegressorMixin, BaseEstimator):
    """`RidgeProbe` at one strength, fitted a shard at a time.

    Parameters: strength, penalty per training row; standardize, whether it acts on standardised features.

    Attributes: coef_ `[feature]` or `[output, feature]`, intercept_; moments_, what the shards left.
    """

    def __init__(self, strength=1.0, *, standardize=True):
        self.strength = strength
        self.standardize = standardize

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "StreamingRidge":
        """Forget all shards and fit to these rows."""
        self.__dict__.pop("moments_", None)
        return self.partial_fit(X, y, sample_weight)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> "StreamingRidge":
        """Count in a shard of rows and numbers `[row]` or `[row, output]`.

        Raises ValueError for a strength below 0, another number of features or outputs than before, and features
        without a unique solution at strength 0.
        """
        if not (np.isfinite(self.strength) and self.strength >= 0):
            raise ValueError(f"strength={self.strength!r}; give a finite penalty per training row, 0 or more.")
        is_first = not hasattr(self, "moments_")
        X, y = validate_data(
            self, X, y, dtype=[np.float64, np.float32], multi_output=True, y_numeric=True, reset=is_first
        )
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if is_first:
            self._is_single = y.ndim == 1
            self.moments_ = Moments.empty(1, X.shape[1], 1 if y.ndim == 1 else y.shape[1])
        elif (y.ndim == 1) != self._is_single:
            earlier = "one number" if self._is_single else "several numbers"
            raise ValueError(f"y has shape {y.shape}; rows of earlier shards had {earlier} each.")
        targets = torch.from_numpy(y.reshape(len(y), -1).astype(np.float64))
        rows = torch.from_numpy(np.require(X, requirements=["C", "W"]))[None]
        self.moments_.update(rows, targets, weights=torch.from_numpy(weight))
        self._solve()
        return self

    def merged(self, other: "StreamingRidge") -> "StreamingRidge":
        """The probe of both ones' rows, with this one's parameters. Raises ValueError for other numbers of features."""
        check_is_fitted(self, "moments_")
        check_is_fitted(other, "moments_")
        _refuse_other_width(self, other)
        result = type(self)(**self.get_params())
        result.n_features_in_, result._is_single = self.n_features_in_, self._is_single
        result.moments_ = self.moments_.merged(other.moments_)
        result._solve()
        return result

    def predict(self, X: Any) -> np.ndarray:
        """The number of each row."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        return X.astype(np.float64) @ self.coef_.T + self.intercept_

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _solve(self) -> None:
        strengths = torch.tensor([float(self.strength)], dtype=torch.float64)
        path = linear_path(self.moments_, strengths, method="ridge", standardize=self.standardize)
        weights, intercepts = path.weights[0, 0].numpy(), path.intercepts[0, 0].numpy()
        self.coef_ = weights[0] if self._is_single else weights
        self.intercept_ = float(intercepts[0]) if self._is_single else intercepts


def _joined(a: Moments, a_classes: np.ndarray, b: Moments, b_classes: np.ndarray) -> tuple[Moments, np.ndarray]:
    """Moments of both, one column per class of either, ascending."""
    classes = np.union1d(a_classes, b_classes)

    def spread(moments: Moments, own: np.ndarray) -> Moments:
        column = {name: number for number, name in enumerate(own.tolist())}
        return moments.with_outputs([column.get(name) for name in classes.tolist()])

    return spread(a, a_classes).merged(spread(b, b_classes)), classes


def _refuse_other_width(one: Any, other: Any) -> None:
    if one.n_features_in_ != other.n_features_in_:
        raise ValueError(f"The probes have {one.n_features_in_} and {other.n_features_in_} features; merge equal ones.")

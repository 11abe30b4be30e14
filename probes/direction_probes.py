"""Directions found without labels as classifiers: `PCADirection` and `KMeansDirection`, scikit-learn's contract.

    score = u . x - u . (m1 + m0) / 2

u is found without labels (`microtome.probes.direction_finders` has the formulas); labels fix the sign and, by the means
m0, m1 of the two classes, the threshold. So with many features there is next to nothing to overfit, and nothing to make
the direction the one that the labels are about.
"""

from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from microtome.probes.direction_finders import find_directions


class _DirectionClassifier(ClassifierMixin, BaseEstimator):
    """Fit of one named finder, sign and threshold from the labels."""

    def _fit(self, X: Any, y: Any, finder: str, *, pairs: Any = None, seed: int = 0) -> None:
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_ = np.unique(y)
        if len(self.classes_) == 1:
            raise ValueError(
                f"y holds one class only ({self.classes_.tolist()[0]!r}); a sign needs rows of two classes."
            )
        if len(self.classes_) > 2:
            raise ValueError(
                f"Only binary classification is supported. y has {len(self.classes_)} classes ({self.classes_[:5]})."
            )
        positive = y == self.classes_[1]
        pairs = None if pairs is None else torch.as_tensor(np.asarray(pairs), dtype=torch.int64)
        found = find_directions(
            torch.tensor(X, dtype=torch.float64)[None],
            torch.from_numpy(positive),
            finders=(finder,),
            pairs=pairs,
            seed=seed,
        )
        self.direction_ = found[finder][0].numpy().copy()
        middle = (X[positive].mean(0, dtype=np.float64) + X[~positive].mean(0, dtype=np.float64)) / 2
        self.coef_ = self.direction_[None].copy()
        self.intercept_ = np.array([-float(middle @ self.direction_)])

    def decision_function(self, X: Any) -> Any:
        """u . x less the threshold, in the units of the features; above 0 is the second class."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=[np.float64, np.float32])
        return X @ self.coef_[0] + self.intercept_[0]

    def predict(self, X: Any) -> Any:
        """The class on whose side each row is."""
        is_second = self.decision_function(X) > 0
        return self.classes_[is_second.astype(np.int64)]

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags


class PCADirection(_DirectionClassifier):
    """First principal component of the rows, or of the differences between the classes' rows.

    Parameters: of, "rows" (no labels in the direction) or "differences" (of the pairs given to `fit`, else of all pairs
    of rows of the two classes).

    Attributes: classes_; direction_ `[feature]`, of length 1, the second class on its positive side; coef_ `[1,
    feature]`, intercept_ `[1]`, of the features as given.
    """

    def __init__(self, of="rows"):
        self.of = of

    def fit(self, X: Any, y: Any, pairs: Any = None) -> "PCADirection":
        """Fit to rows X `[row, feature]`, labels y `[row]` of two values, and pairs `[pair, 2]` of row numbers (first
        class, second class).

        Raises ValueError for other labels, another `of`, pairs with of="rows", and pairs of other classes.
        """
        if self.of not in ("rows", "differences"):
            raise ValueError(f"of={self.of!r}; give 'rows' or 'differences'.")
        if pairs is not None and self.of == "rows":
            raise ValueError("pairs are of use with of='differences' only.")
        self._fit(X, y, "pca" if self.of == "rows" else "pca_difference", pairs=pairs)
        return self


class KMeansDirection(_DirectionClassifier):
    """Difference of the two centroids of K-means (10 starts).

    Parameters: seed, of the starts. Attributes as of `PCADirection`.
    """

    def __init__(self, *, seed=0):
        self.seed = seed

    def fit(self, X: Any, y: Any) -> "KMeansDirection":
        """Fit to rows X `[row, feature]` and labels y `[row]` of two values.

        Raises ValueError for other labels.
        """
        self._fit(X, y, "kmeans", seed=self.seed)
        return self

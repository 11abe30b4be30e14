"""Mass-mean probe: the difference of class means, plain or corrected by the covariance within classes.

    θ = m₁ - m₀,   score = θ·x - θ·(m₁ + m₀)/2 + log n₁/n₀             (plain)
    θ = W⁺ (m₁ - m₀), the rest alike                                    (corrected=True)

W is the pooled covariance within classes (divisor n) of standardised features, W⁺ its inverse without the directions of
variance up to `tolerance` (an average standardised feature has 1; the authors' code cuts at 1e-3 in activation units).
Several classes: score_k = (m_k - m)·W⁺·(x - (m_k + m)/2) + log n_k, the plain form with I for W⁺: the nearest mean.
Marks & Tegmark (2024), "The Geometry of Truth", section 5.1; they centre each data set in place of an intercept.

Beware: θ is the direction along which the label moves the features (their covariance with it), which interventions and
erasure want; as a classifier it is beaten by LDA wherever features have unlike variances. Plain scores are in squared
activation units, so that the log-odds in them weigh little or much by the features' size.
"""

from typing import Any

import numpy as np
import torch
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from microtome.probes.lda import class_means, class_moments
from microtome.probes.linear_classifier import LinearClassifier
from microtome.probes.moment_probes import TOLERANCE, linear_path


class MassMeanProbe(LinearClassifier):
    """A probe along the difference of class means.

    Parameters: corrected, whether θ is corrected by the covariance within classes; tolerance, variance of standardised
    features up to which the correction leaves a direction out.

    Attributes: classes_; coef_ `[1, feature]` (two classes, positive for the second) or `[class, feature]` and
    intercept_, of the features as given; means_ `[class, feature]`; direction_, coef_ at length 1.
    """

    def __init__(self, corrected=False, *, tolerance=TOLERANCE):
        self.corrected = corrected
        self.tolerance = tolerance

    def fit(self, X: Any, y: Any) -> "MassMeanProbe":
        """Fit to rows X `[row, feature]` and labels y `[row]`. Raises ValueError for one class, a negative tolerance,
        NaN or infinity."""
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) == 1:
            raise ValueError(f"y holds one class only ({self.classes_.tolist()[0]!r}); a probe needs two or more.")
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance={self.tolerance!r}; give a variance of 0 or more.")
        n_classes = len(self.classes_)
        moments = class_moments(X, codes, n_classes)
        self.means_ = class_means(moments).numpy()
        path = linear_path(
            moments,
            torch.zeros(1, dtype=torch.float64),
            method="mass_mean_corrected" if self.corrected else "mass_mean",
            classes=n_classes,
            tolerance=float(self.tolerance),
            priors=False,
        )
        self.coef_, self.intercept_ = path.weights[0, 0].numpy(), path.intercepts[0, 0].numpy()
        log_rows = np.log(np.bincount(codes) / len(codes))
        if n_classes == 2:
            self.coef_, self.intercept_ = np.diff(self.coef_, axis=0), np.diff(self.intercept_)
            log_rows = np.diff(log_rows)  # 0 for classes of equal size, so that small scores keep their digits
        self.intercept_ = self.intercept_ + log_rows
        norm = np.linalg.norm(self.coef_, axis=1, keepdims=True)
        unit = self.coef_ / np.where(norm > 0, norm, 1.0)
        self.direction_ = unit[0] if n_classes == 2 else unit
        return self

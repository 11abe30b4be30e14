"""Erasers with scikit-learn's contract: `LeaceEraser` and `InlpEraser` over `leace` and `inlp`, one feature table.

    eraser = LeaceEraser().fit(X, y);  eraser.transform(X)                       # no linear probe finds y there
    with taps(model, edits={"resid_post.12": eraser.edit()}): model(**inputs)    # nor in the running model

x' = x - A B (x - m): `left_` is A, `right_` B, `mean_` m.
Beware: an edit acts at every position of every row, also at those that no fitted row came from (a BOS token far away
from all others is moved as the linear map says).
"""

from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data

from microtome.probes.concept_moments import ConceptMoments, concept_moments
from microtome.probes.erasure_maps import Erasure, Erasures
from microtome.probes.inlp import inlp
from microtome.probes.leace import leace_from_moments


class _Eraser(TransformerMixin, BaseEstimator):
    """What both erasers do once they are fitted."""

    def edit(self) -> Erasure:
        """The erasure as an edit for `taps`: activations `[..., feature]` to the delta that is added to them."""
        check_is_fitted(self)
        parts = (self.mean_, self.left_, self.right_)
        return Erasure(*(torch.tensor(part, dtype=torch.float64) for part in parts))

    def transform(self, X: Any) -> Any:
        """Erased rows, in the dtype of X."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=[np.float64, np.float32])
        change = (X.astype(np.float64) - self.mean_) @ self.right_.T @ self.left_.T
        return (X - change).astype(X.dtype)

    def _keep(self, erasures: Erasures) -> None:
        self.mean_, self.left_, self.right_ = (
            getattr(erasures, name)[0].numpy().copy() for name in ("mean", "left", "right")
        )
        self.projection_ = np.eye(len(self.mean_)) - self.left_ @ self.right_
        self.rank_ = erasures[0].rank

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        return tags


class LeaceEraser(_Eraser):
    """Least-squares concept erasure in closed form (`microtome.probes.leace` has the formula).

    Parameters: concept, "classes" (any number of them), "numbers" (one column or several), or "auto" (numbers with a
    fraction are numbers, all else classes).

    Attributes: classes_ (None for numbers); mean_ `[feature]`, left_ `[feature, rank]`, right_ `[rank, feature]`,
    projection_ `[feature, feature]` = I - left_ right_; rank_, dimensions taken out; n_samples_seen_.
    """

    def __init__(self, *, concept="auto"):
        self.concept = concept

    def fit(self, X: Any, y: Any) -> "LeaceEraser":
        """Fit to rows X `[row, feature]` and a concept y `[row]`, or `[row, column]` for numbers.

        Raises ValueError for a concept with one value, missing or infinite entries, other lengths.
        """
        self._moments = None
        return self._add(X, y, reset=True)

    def partial_fit(self, X: Any, y: Any) -> "LeaceEraser":
        """Add rows: after all parts the same as `fit` on all rows, in any order; classes may come later.

        Until two values of the concept were seen, nothing is erased (rank_ is 0).
        """
        is_first = not hasattr(self, "_moments") or self._moments is None
        self._moments = None if is_first else self._moments
        return self._add(X, y, reset=is_first, is_part=True)

    def _add(self, X: Any, y: Any, *, reset: bool, is_part: bool = False) -> "LeaceEraser":
        X, y = validate_data(self, X, y, reset=reset, dtype=[np.float64, np.float32], multi_output=True)
        if not is_part and len(X) < 2:
            raise ValueError(f"X has {len(X)} sample; erasure needs at least 2.")
        if self.concept not in ("auto", "classes", "numbers"):
            raise ValueError(f"concept={self.concept!r}; give 'auto', 'classes' or 'numbers'.")
        if reset:
            is_numbers = self.concept == "numbers"
            if self.concept == "auto":
                is_numbers = type_of_target(y) in ("continuous", "continuous-multioutput")
            self.classes_ = None if is_numbers else np.empty(0)
        if self.classes_ is None:
            concept = np.asarray(y, dtype=np.float64).reshape(len(X), -1)
            if not reset and concept.shape[1] != len(self._moments.concept_mean):
                raise ValueError(
                    f"y has {concept.shape[1]} column(s), earlier parts {len(self._moments.concept_mean)}. Pass the "
                    "same columns in every part."
                )
        else:
            y = self._labels(y)
            seen = np.unique(y)
            known = seen if reset else np.union1d(self.classes_, seen)
            if not reset and len(known) > len(self.classes_):
                places = np.searchsorted(known, self.classes_).tolist()
                self._moments = self._moments.with_columns(places, len(known))
            self.classes_ = known
            concept = (y[:, None] == known).astype(np.float64)
        part = concept_moments(torch.tensor(X)[None], torch.from_numpy(concept))
        self._moments: ConceptMoments = part if reset else self._moments.joined(part)
        self.n_samples_seen_ = self._moments.count
        if is_part and not (self._moments.concept_scatter > 0).any():
            nothing = torch.zeros(1, X.shape[1], 1, dtype=torch.float64)
            self._keep(Erasures(self._moments.mean, nothing, nothing.mT))
        else:
            self._keep(leace_from_moments(self._moments))
        return self

    def _labels(self, y: np.ndarray) -> np.ndarray:
        y = np.ravel(y) if np.ndim(y) == 2 and np.shape(y)[1] == 1 else y
        if np.ndim(y) != 1:
            raise ValueError(f"y has shape {np.shape(y)}; classes are one per row. For numbers pass concept='numbers'.")
        check_classification_targets(y)
        return y


class InlpEraser(_Eraser):
    """Iterated null-space projection (`microtome.probes.inlp` says how it goes and when it stops).

    Parameters: iterations, at most; C, inverse strength of the penalty on standardised features; held_out, the share of
    rows on which a probe is judged to be at chance (0: all iterations are made); seed, of those rows.

    Attributes: classes_; directions_ `[iteration, output, feature]`, unit weights of every probe; auroc_ `[iteration]`
    on held-out rows (NaN where there are none), the last one at chance if it stopped early; n_iter_; mean_, left_,
    right_, projection_ (symmetric), rank_ as of `LeaceEraser`.
    """

    def __init__(self, iterations=10, *, C=1.0, held_out=0.25, seed=0):
        self.iterations = iterations
        self.C = C
        self.held_out = held_out
        self.seed = seed

    def fit(self, X: Any, y: Any, groups: Any = None) -> "InlpEraser":
        """Fit to rows X `[row, feature]` and classes y `[row]`; held-out rows are whole `groups` where given.

        Raises ValueError for one class and what `inlp` refuses.
        """
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y holds one class only ({self.classes_.tolist()[0]!r}); erasure needs two classes.")
        fit = inlp(
            torch.tensor(X)[None],
            torch.from_numpy(codes.astype(np.int64)),
            iterations=self.iterations,
            C=self.C,
            held_out=self.held_out,
            groups=None if groups is None else np.asarray(groups),
            seed=self.seed,
        )
        self._keep(fit.erasures)
        self.n_iter_ = int(fit.iterations[0])
        self.directions_ = fit.directions[0, : self.n_iter_].numpy().copy()
        tried = min(self.n_iter_ + 1, self.iterations)
        self.auroc_ = fit.held_out_auroc[0, :tried].numpy().copy()
        return self

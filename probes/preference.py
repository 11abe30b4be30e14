"""Pairwise preference: Bradley-Terry probes, P(a is preferred to b) = σ(w·(x_a - x_b)).

J(w) = ½|w|² + C Σ_pairs softplus(-w·x̂), x̂ the features of the preferred side minus those of the other, each divided by
its deviation about 0 with `standardize` (Bradley & Terry 1952; the reward w·x is determined up to a constant, so there
is no intercept). Swapping the sides of a pair flips its score exactly, and the fit is the same to the bit.

Beware: a pair belongs to two items. Rows are independent only if no item (prompt, text, answer) is on both sides of a
split: `pair_groups` joins pairs that share one, directly or through others. And an intercept, or a score that is not
antisymmetric, would measure which side is shown first.
"""

from collections.abc import Sequence
from functools import partial
from numbers import Integral
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int64
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_is_fitted, validate_data
from torch import Tensor

from microtome.probes.logistic_solver import fit_logistic
from microtome.probes.metrics import logit_loss_bits
from microtome.probes.nested_fit import NestedFit, nested_search


class PreferenceProbe(ClassifierMixin, BaseEstimator):
    """A linear reward fitted to preferences between two.

    Parameters: C, the inverse strength of the penalty (finite, above 0); standardize, whether the penalty acts on
    features divided by their root mean square over the training differences; tol, the largest gradient entry over C
    times the pairs; max_iter, Newton steps.

    Attributes: classes_ `[2]`, the second one where the first side is preferred; coef_ `[1, feature]`, log-odds per
    unit of the features as given; intercept_ `[1]`, 0; scale_ `[feature]`; direction_ `[feature]`, coef_ at length 1;
    separated_, whether the reward orders every training pair; n_iter_, passes over the pairs.
    """

    def __init__(self, C=1.0, *, standardize=True, tol=1e-8, max_iter=100):
        self.C = C
        self.standardize = standardize
        self.tol = tol
        self.max_iter = max_iter

    def fit(self, X: Any, y: Any) -> "PreferenceProbe":
        """Fit to differences X `[pair, feature]`, first side minus second, and y `[pair]` of two values.

        The larger value says that the first side is preferred. Raises ValueError for one class (then `fit_pairs`
        takes the two sides) or more than two, and what `fit_logistic` raises.
        """
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], ensure_min_samples=2)
        check_classification_targets(y)
        classes = np.unique(y)
        if len(classes) == 1:
            raise ValueError(
                f"y holds one class only ({classes.tolist()[0]!r}), so which side it prefers is unknown. Where the "
                "first side always is the preferred one, call fit_pairs(features, first, second)."
            )
        if len(classes) > 2:
            raise ValueError(
                f"Only binary classification is supported. y has {len(classes)} classes ({classes[:5]}); a pair has "
                "two sides. Leave ties out."
            )
        return self._fit(X, y == classes[1], classes)

    def fit_pairs(self, features: Any, first: Any, second: Any, preferred: Any = None) -> "PreferenceProbe":
        """Fit to items `[item, feature]` and pairs of their row numbers `[pair]`.

        `preferred` `[pair]` is True where the first is preferred; None says that it always is. Raises ValueError for
        row numbers that are not there, an item paired with itself, sizes that do not match.
        """
        features = check_array(features, dtype=[np.float64, np.float32])
        first, second = _items(first, len(features), "first"), _items(second, len(features), "second")
        preferred = np.ones(len(first), dtype=bool) if preferred is None else np.asarray(preferred)
        if not len(first) == len(second) == len(preferred):
            raise ValueError(
                f"first, second and preferred have {len(first)}, {len(second)} and {len(preferred)} entries; give one "
                "each per pair."
            )
        if preferred.dtype != bool:
            raise ValueError(f"preferred is of {preferred.dtype}; give True where the first item is preferred.")
        if (first == second).any():
            pair = int((first == second).argmax())
            raise ValueError(f"pair {pair} compares item {first[pair]} with itself; leave it out.")
        self.n_features_in_ = features.shape[1]
        return self._fit(features[first] - features[second], preferred, np.array([False, True]))

    def _fit(self, X: np.ndarray, is_first: np.ndarray, classes: np.ndarray) -> "PreferenceProbe":
        if not isinstance(self.max_iter, Integral) or self.max_iter < 1:
            raise ValueError(f"max_iter={self.max_iter!r}; give a whole number of Newton steps, at least 1.")
        # preferred minus other: swapped sides give the same rows
        rows = torch.from_numpy(np.ascontiguousarray(np.where(is_first[:, None], X, -X)))
        every = torch.ones(len(rows), dtype=torch.bool)
        fits = fit_logistic(
            rows,
            every,
            every,
            [float(self.C)],
            intercept=False,
            standardize=self.standardize,
            tolerance=float(self.tol),
            max_steps=self.max_iter,
        )
        self.classes_ = classes
        self.coef_, self.intercept_ = fits.raw_weights[0, 0, 0].numpy(), np.zeros(1)
        self.scale_ = fits.scale[0, 0].numpy()
        norm = np.linalg.norm(self.coef_)
        self.direction_ = self.coef_[0] / norm if norm > 0 else np.zeros_like(self.coef_[0])
        self.separated_ = bool(fits.separated[0, 0, 0, 0])
        self.n_iter_ = int(fits.passes[0, 0, 0, 0])
        return self

    def reward(self, features: Any) -> np.ndarray:
        """w·x `[item]` of items `[item, feature]`; differences of it are log-odds of preference."""
        return self.decision_function(features)

    def decision_function(self, X: Any) -> np.ndarray:
        """Log-odds `[pair]` that the first side is preferred, from differences `[pair, feature]`."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        return X.astype(np.float64) @ self.coef_[0]

    def predict(self, X: Any) -> np.ndarray:
        """classes_[1] where the first side is the likelier choice."""
        is_first = self.decision_function(X) > 0
        return self.classes_[is_first.astype(int)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities `[pair, 2]` of classes_."""
        logits = torch.from_numpy(self.decision_function(X))
        return torch.stack([torch.sigmoid(-logits), torch.sigmoid(logits)], 1).numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags


def pair_groups(first_group: Any, second_group: Any) -> Int64[np.ndarray, " pair"]:
    """Groups of pairs for splits: pairs that share an item (prompt, text) on either side, or through others, are one.

    `first_group` and `second_group` hold one key per pair, of the items on either side. Pass the result as `groups`.
    Raises ValueError for a missing key and lengths that differ. Beware: round-robin comparisons chain everything into
    one component, and then no honest split of pairs exists; group by prompt if items of different prompts never meet.
    """
    if len(first_group) != len(second_group):
        raise ValueError(
            f"first_group has {len(first_group)} entries, second_group {len(second_group)}; both need one key per pair."
        )
    keys = np.empty(2 * len(first_group), dtype=object)
    keys[:] = [*first_group, *second_group]
    codes = pd.factorize(keys)[0]
    if (codes < 0).any():
        side, pair = divmod(int((codes < 0).argmax()), len(first_group))
        raise ValueError(f"{('first', 'second')[side]}_group has no key for pair {pair}; a missing key is not a group.")
    first, second = np.split(codes, 2)
    size = int(codes.max()) + 1
    graph = coo_array((np.ones(len(first), dtype=np.int8), (first, second)), shape=(size, size))
    component = connected_components(graph, directed=False)[1][first]
    return pd.factorize(component)[0].astype(np.int64)


def preference_fits(
    differences: Float[Tensor, "site pair feature"],
    preferred: Bool[Tensor, "labelling pair"],
    test: Bool[Tensor, "fold pair"],
    nested: Bool[Tensor, "fold inner pair"],
    strengths: Sequence[float] | None = None,
) -> list[NestedFit]:
    """Nested cross-validation of many sites' preference probes: `nested_fits` without an intercept.

    Differences are first side minus second; `preferred` is True where the first is preferred. Folds split pairs by
    `pair_groups`. Raises what `fit_logistic` raises.
    """
    solve = partial(fit_logistic, intercept=False)
    return nested_search(differences, preferred, test, nested, strengths, solve=solve, loss=logit_loss_bits)


def _items(numbers: Any, n_items: int, name: str) -> Int64[np.ndarray, " pair"]:
    numbers = np.asarray(numbers)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or len(numbers) == 0:
        raise ValueError(f"{name} has shape {numbers.shape} of {numbers.dtype}; give one row number per pair.")
    if numbers.min() < 0 or numbers.max() >= n_items:
        raise ValueError(f"{name} holds row numbers {numbers.min()} to {numbers.max()}; there are {n_items} items.")
    return numbers.astype(np.int64)

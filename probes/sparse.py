"""k-sparse probes: a logistic regression that sees only the k features a filter ranks first (Gurnee et al. 2023).

The filter orders features on training rows alone, for two classes with means μ_1, μ_0 and pooled variance within them:

    "f_score"          |μ_1 - μ_0| / within deviation; in two classes the same order as the F statistic and as |t|
    "mean_difference"  |μ_1 - μ_0| in the units of the features: a few features of large scale come first whatever they
                       tell
    "logistic"         |weight| per deviation of the logistic probe on all features at C = 1 / features

Filters look at one feature at a time (the first two): k features that say the same are taken k times over, and features
that tell only together are missed. `random_coordinates` draws the control: how well any k features would have done.

Beware: which features are chosen is unstable where features are alike. Compare what is chosen over folds before reading
a meaning into it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from torch import Tensor

from microtome.probes.fold_basis import fold_moments
from microtome.probes.linear_classifier import LogitClassifier
from microtome.probes.logistic_fits import scores_of
from microtome.probes.logistic_solver import default_strengths, fit_logistic
from microtome.probes.metrics import logit_loss_bits
from microtome.probes.nested_fit import NestedFit, nested_fits, nested_search

Order = Literal["f_score", "mean_difference", "logistic"]
_ORDERS = ("f_score", "mean_difference", "logistic")


@dataclass(frozen=True)
class SparseFits:
    """Fits that use k features each; the weights of all others are 0."""

    raw_weights: Float64[Tensor, "site labelling mask strength feature"]  # log odds per unit of the features as given
    raw_intercepts: Float64[Tensor, "site labelling mask strength"]
    chosen: Int64[Tensor, "site labelling mask k"]  # ascending

    def decision(
        self, features: Float[Tensor, "site example feature"]
    ) -> Float64[Tensor, "site labelling mask strength example"]:
        """Log odds of all rows under every fit."""
        return scores_of(features, self.raw_weights, self.raw_intercepts)


def sparse_fits(
    features: Float[Tensor, "site example feature"],
    labellings: Bool[Tensor, "labelling example"],
    test: Bool[Tensor, "fold example"],
    nested: Bool[Tensor, "fold inner example"],
    strengths: Sequence[float] | None = None,
    *,
    k: int = 1,
    order: Order = "f_score",
    coordinates: Int64[Tensor, "_ chosen"] | None = None,
) -> list[NestedFit]:
    """Nested cross-validation of many sites' k-sparse probes, features chosen anew in every training fold.

    Args:
        features, labellings, test, nested: as `nested_fits` takes them.
        strengths: ascending C; `default_strengths` of k features if None.
        k: how many features; all if there are fewer.
        order: the filter; the module says which.
        coordinates: these features instead, the same in every fold (`random_coordinates`).

    Coefficients of features that the refit on all rows did not choose are 0. Raises what `fit_logistic` raises, and
    ValueError for k below 1, another order, coordinates that are not there.
    """
    _check_choice(k, order)
    _check_coordinates(coordinates, features)
    if coordinates is not None:
        return _fits_of_coordinates(features, labellings, test, nested, strengths, coordinates)

    def solve(features: Tensor, labellings: Tensor, train: Tensor, strengths: Tensor, *, tolerance: float):
        chosen = choose_features(features, labellings, train, k=k, order=order)
        return fit_chosen(features, labellings, train, strengths, chosen, tolerance=tolerance)

    strengths = strengths or default_strengths(min(k, features.shape[2]))
    return nested_search(features, labellings, test, nested, strengths, solve=solve, loss=logit_loss_bits)


def choose_features(
    features: Float[Tensor, "site example feature"],
    labellings: Bool[Tensor, "labelling example"],
    train: Bool[Tensor, "mask example"],
    *,
    k: int,
    order: Order = "f_score",
) -> Int64[Tensor, "site labelling mask chosen"]:
    """The k features (all if there are fewer) that the filter ranks first on each mask's rows, ascending.

    Ties go to the first feature; a feature constant on the rows comes last.
    """
    if order == "logistic":
        fits = fit_logistic(features, labellings, train, [1 / features.shape[2]], tolerance=1e-4)
        score = fits.weights[:, :, :, 0].abs()
    else:
        score = _filter_scores(features, labellings, train, is_scaled=order == "f_score")
    return score.sort(dim=-1, descending=True, stable=True).indices[..., :k].sort(dim=-1).values


def _filter_scores(
    features: Float[Tensor, "site example feature"],
    labellings: Bool[Tensor, "labelling example"],
    train: Bool[Tensor, "mask example"],
    *,
    is_scaled: bool,
) -> Float64[Tensor, "site labelling mask feature"]:
    """|μ_1 - μ_0| times what all features share, over the deviation if scaled: the order of the F statistic.

    With shares p and q of the classes, μ_1 lies q (μ_1 - μ_0) from the mean of all; and F grows with |μ_1 - μ_0| over
    the deviation of all rows as it does with that over the deviation within the classes.
    """
    rows = features.double()
    mean, deviation = fold_moments(rows.mT, train)
    scores = []
    for mask, centre, spread in zip(train, mean.unbind(1), deviation.unbind(1), strict=True):
        positive = (labellings & mask).double()
        # rows outside the mask add 0
        offset = ((positive / positive.sum(1, keepdim=True)) @ (rows - centre[:, None])).abs()
        unit = spread[:, None] if is_scaled else 1.0
        scores.append(torch.where(spread[:, None] > 0, offset / unit, 0.0))
    return torch.stack(scores, 2)


def fit_chosen(
    features: Float[Tensor, "site example feature"],
    labellings: Bool[Tensor, "labelling example"],
    train: Bool[Tensor, "mask example"],
    strengths: Sequence[float] | Float64[Tensor, " strength"],
    chosen: Int64[Tensor, "site labelling mask chosen"],
    *,
    standardize: bool = True,
    tolerance: float = 1e-8,
) -> SparseFits:
    """Logistic fits of the chosen features only: all sites and strengths of a labelling and mask side by side."""
    shape = (*chosen.shape[:3], len(strengths))
    weights = torch.zeros(*shape, features.shape[2], dtype=torch.float64)
    intercepts = torch.empty(shape, dtype=torch.float64)
    for number, rows in enumerate(train):
        of_mask, every = features[:, rows], torch.ones(int(rows.sum()), dtype=torch.bool)
        for labelling, positive in enumerate(labellings[:, rows]):
            at = chosen[:, labelling, number]
            seen = of_mask.gather(2, at[:, None].expand(-1, len(every), -1))
            fits = fit_logistic(seen, positive, every, strengths, standardize=standardize, tolerance=tolerance)
            found = fits.raw_weights[:, 0, 0]
            weights[:, labelling, number].scatter_(2, at[:, None].expand(found.shape), found)
            intercepts[:, labelling, number] = fits.raw_intercepts[:, 0, 0]
    return SparseFits(weights, intercepts, chosen)


def random_coordinates(n_sites: int, width: int, k: int, *, seed: int = 0) -> Int64[Tensor, "site chosen"]:
    """k different features of each site drawn at random, ascending: the control of `sparse_fits`.

    Raises ValueError for k below 1 or above the width.
    """
    if not 1 <= k <= width:
        raise ValueError(f"k={k} of {width} features; give 1 to {width}.")
    order = np.random.default_rng(seed).permuted(np.tile(np.arange(width), (n_sites, 1)), axis=1)
    return torch.from_numpy(np.sort(order[:, :k], axis=1).astype(np.int64))


def _fits_of_coordinates(features, labellings, test, nested, strengths, coordinates) -> list[NestedFit]:
    """Plain nested fits of those features, their coefficients put back in place."""
    seen = features.gather(2, coordinates[:, None].expand(-1, features.shape[1], -1))
    fits = nested_fits(seen, labellings, test, nested, strengths)
    whole = torch.zeros(len(features), features.shape[2], dtype=torch.float64)
    coefficients = whole.scatter(1, coordinates, torch.stack([fit.coefficients for fit in fits]))
    return [replace(fit, coefficients=row) for fit, row in zip(fits, coefficients, strict=True)]


class SparseProbe(LogitClassifier):
    """A linear probe of two classes on the k features that tell most by themselves.

    Parameters: k, how many features (all if there are fewer); C, the inverse strength of the penalty (finite, above
    0); order, the filter: "f_score", "mean_difference" or "logistic"; standardize, whether the penalty acts on
    features of mean 0 and deviation 1 in the training rows.

    Attributes: features_ `[k]`, indices of the chosen features, ascending; classes_ `[2]`; coef_ `[1, feature]`, 0 but
    for the chosen, and intercept_ `[1]`, log-odds of the second class; direction_ `[feature]`, coef_ at length 1.
    """

    def __init__(self, k=1, *, C=1.0, order="f_score", standardize=True):
        self.k = k
        self.C = C
        self.order = order
        self.standardize = standardize

    def fit(self, X: Any, y: Any) -> "SparseProbe":
        """Fit to rows X `[row, feature]` and labels y `[row]` of two values.

        Raises ValueError for one class or more than two, k below 1, another order, and what `fit_logistic` raises.
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
        _check_choice(self.k, self.order)
        rows = torch.from_numpy(np.require(X, requirements=["C", "W"]))[None]
        positive = torch.from_numpy(y == self.classes_[1])[None]
        every = torch.ones_like(positive)
        chosen = choose_features(rows, positive, every, k=int(self.k), order=self.order)
        fits = fit_chosen(rows, positive, every, [float(self.C)], chosen, standardize=self.standardize)
        self.features_ = chosen[0, 0, 0].numpy()
        self.coef_, self.intercept_ = fits.raw_weights[0, 0, 0].numpy(), fits.raw_intercepts[0, 0, 0].numpy()
        norm = np.linalg.norm(self.coef_)
        self.direction_ = self.coef_[0] / norm if norm > 0 else np.zeros_like(self.coef_[0])
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags


def _check_choice(k: Any, order: Any) -> None:
    if not isinstance(k, Integral) or k < 1:
        raise ValueError(f"k={k!r}; give a whole number of features, at least 1.")
    if order not in _ORDERS:
        raise ValueError(f"order={order!r}; give one of {', '.join(_ORDERS)}.")


def _check_coordinates(coordinates: Tensor | None, features: Tensor) -> None:
    if coordinates is None:
        return
    n_sites, width = len(features), features.shape[2]
    if len(coordinates) != n_sites or coordinates.shape[1] == 0:
        raise ValueError(f"coordinates are {list(coordinates.shape)}, sites {n_sites}; give one row of them per site.")
    if int(coordinates.min()) < 0 or int(coordinates.max()) >= width:
        raise ValueError(
            f"coordinates run from {int(coordinates.min())} to {int(coordinates.max())}; features are 0 to {width - 1}."
        )
    if any(len(row.unique()) < len(row) for row in coordinates):
        raise ValueError("coordinates name a feature of a site twice; give each once.")

"""A learned weighted sum of layers under one linear probe: which depth the label is read from.

    h = Σ_l softmax(a)_l φ(R_l),   z = w . h + b,
    J(a, w, b) = |w|² / 2 + C Σ_i [softplus(z_i) - y_i z_i],    a = 0 at the start,

all three found together by L-BFGS over all training rows, so there is no randomness. φ is the identity, or a layer norm
without parameters (a row less its mean over the features, divided by its deviation). The features of every layer are
centred by the training rows, which the intercept takes up again, and divided by one number for all layers, so that C
does not depend on their unit.

Weights of the identity cannot be compared across layers, because later layers are longer: a layer of ten times the
norm enters ten times as strongly at equal weight. `shares` are softmax(a)_l E|φ(R_l)|, scaled to sum to one; with the
layer norm they are the weights themselves.

Beware: J is not convex in a and w together; from a = 0 the answer is one local minimum, the same every time.
Neighbouring layers of a residual stream hold nearly the same, and then the split between them means little: it moves
from fold to fold. Where only the score counts, the convex `stack_layers` is the alternative. Published uses train a by
Adam together with a larger head; only the objective is theirs.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from scipy.optimize import minimize
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

_EPSILON = 1e-5  # of the layer norm, torch's own
_LARGEST = 1e100


@dataclass(frozen=True, eq=False)
class LayerMixFits:
    """Mixes of layers and the probes on them, for every label set and fold."""

    weights: Float64[Tensor, "label_set fold layer"]  # softmax(a)
    shares: Float64[Tensor, "label_set fold layer"]  # corrected for the layers' norms; they sum to one
    coefficients: Float64[Tensor, "label_set fold feature"]  # w, per unit of φ
    intercept: Float64[Tensor, "label_set fold"]
    gradient: Float64[Tensor, "label_set fold"]  # largest entry over C times the training rows
    steps: Int64[Tensor, "label_set fold"]  # of L-BFGS
    normalized: bool  # whether φ is the layer norm

    def logits(self, features: Float[Tensor, "site example feature"]) -> Float64[Tensor, "label_set fold example"]:
        """Natural log-odds of every row; the axis `site` is the layer."""
        values = _phi(features, self.normalized)
        scores = torch.einsum("lnd,sfd->sfln", values, self.coefficients)
        return (self.weights[..., None] * scores).sum(2) + self.intercept[..., None]


def fit_layer_mix(
    features: Float[Tensor, "site example feature"],
    labels: Bool[Tensor, "label_set _"],
    train: Bool[Tensor, "fold _"],
    *,
    strength: int | float = 1.0,
    normalize: bool = False,
    tolerance: int | float = 1e-6,
    max_steps: int = 1000,
) -> LayerMixFits:
    """Fit every label set and fold; the axis `site` of the features is the layer.

    `strength` is C; `normalize` makes φ the layer norm; `tolerance` is on the largest gradient entry over C times the
    rows, `max_steps` bounds the iterations of L-BFGS. Raises ValueError for NaN or infinite features, masks and labels
    of another length, a strength that is not finite and above 0, and a fold that trains on one class.
    """
    _check(features, labels, train, strength)
    values = _phi(features, normalize)
    parts = [_fit(values[:, rows], label[rows], strength, tolerance, max_steps) for label in labels for rows in train]
    shape = (len(labels), len(train))
    weights, shares, coefficients, intercept, gradient, steps = (
        torch.stack(part).unflatten(0, shape) for part in zip(*parts, strict=True)
    )
    return LayerMixFits(
        weights=weights,
        shares=shares,
        coefficients=coefficients,
        intercept=intercept,
        gradient=gradient,
        steps=steps,
        normalized=normalize,
    )


class LayerMixProbe(ClassifierMixin, BaseEstimator):
    """A linear probe on a learned mix of layers.

    Parameters: n_layers, how many layers of equal width X holds side by side; C, the inverse strength of the penalty;
    normalize, whether rows pass a layer norm first; tol and max_iter, of L-BFGS.

    Attributes: classes_ `[2]`; layer_weights_ `[layer]`, softmax(a); layer_shares_ `[layer]`, corrected for norms;
    coef_ `[1, layer * feature]`, softmax(a)_l w, of the features as given, or of their layer norm; intercept_ `[1]`;
    direction_ `[feature]`, w at length 1; n_iter_, steps of L-BFGS.
    """

    def __init__(self, n_layers=1, *, C=1.0, normalize=False, tol=1e-6, max_iter=1000):
        self.n_layers = n_layers
        self.C = C
        self.normalize = normalize
        self.tol = tol
        self.max_iter = max_iter

    def fit(self, X: Any, y: Any) -> "LayerMixProbe":
        """Fit to rows X `[row, layer * feature]`, layer by layer, and labels y `[row]` of two values.

        Raises ValueError for one class or more than two, a width that n_layers does not divide, and as `fit_layer_mix`.
        """
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_ = np.unique(y)
        if len(self.classes_) != 2:
            raise ValueError(
                f"Only binary classification is supported. y has {len(self.classes_)} class(es) ({self.classes_[:5]}). "
                "Give rows of two classes; with more, fit one probe per class against the others."
            )
        if not isinstance(self.n_layers, int) or self.n_layers < 1 or X.shape[1] % self.n_layers:
            raise ValueError(
                f"X has {X.shape[1]} features, which n_layers={self.n_layers!r} does not divide. Give the layers side "
                "by side, X[row, layer * width + feature], and how many there are."
            )
        fits = fit_layer_mix(
            self._by_layer(X),
            torch.from_numpy(y == self.classes_[1])[None],
            torch.ones(1, len(y), dtype=torch.bool),
            strength=float(self.C),
            normalize=bool(self.normalize),
            tolerance=float(self.tol),
            max_steps=self.max_iter,
        )
        self._fits = fits
        self.layer_weights_, self.layer_shares_ = fits.weights[0, 0].numpy(), fits.shares[0, 0].numpy()
        coefficients = fits.coefficients[0, 0].numpy()
        self.coef_ = (self.layer_weights_[:, None] * coefficients).reshape(1, -1)
        self.intercept_ = fits.intercept[0].numpy()
        self.n_iter_ = max(1, int(fits.steps[0, 0]))
        norm = np.linalg.norm(coefficients)
        self.direction_ = coefficients / norm if norm > 0 else np.zeros_like(coefficients)
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Log-odds `[row]` of the second class."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        values = _phi(self._by_layer(X), bool(self.normalize))
        return values.transpose(0, 1).flatten(1).numpy() @ self.coef_[0] + self.intercept_[0]

    def predict(self, X: Any) -> np.ndarray:
        """The likelier class of each row."""
        is_second = self.decision_function(X) > 0
        return self.classes_[is_second.astype(int)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities `[row, 2]` of the two classes."""
        logits = torch.tensor(self.decision_function(X))
        return torch.stack([torch.sigmoid(-logits), torch.sigmoid(logits)], 1).numpy()

    def _by_layer(self, X: np.ndarray) -> Tensor:
        rows = torch.from_numpy(np.require(X, requirements=["C", "W"]))
        return rows.unflatten(1, (self.n_layers, -1)).transpose(0, 1)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags


def _phi(features: Tensor, normalize: bool) -> Float64[Tensor, "site example feature"]:
    values = features.detach().cpu().double()
    return torch.nn.functional.layer_norm(values, values.shape[-1:], eps=_EPSILON) if normalize else values


def _fit(values: Tensor, label: Tensor, strength: float, tolerance: float, max_steps: int) -> tuple[Tensor, ...]:
    """Weights, shares, coefficients, intercept, gradient and steps of one fold."""
    n_layers, n_rows, width = values.shape
    norms = values.norm(dim=-1).mean(1)
    mean = values.mean(1, keepdim=True)
    unit = (values - mean).square().mean().sqrt()
    unit = unit if unit > 0 else torch.ones_like(unit)
    centred = (values - mean) / unit
    target = label.double()
    per_row = strength * n_rows

    def objective(point: np.ndarray) -> tuple[float, np.ndarray]:
        """J and its gradient, both over C times the rows."""
        a, w, b = torch.from_numpy(point).split([n_layers, width, 1])
        weights = a.softmax(0)
        logits = weights @ (centred @ w) + b
        loss = w @ w / 2 + strength * (torch.nn.functional.softplus(logits) - target * logits).sum()
        residual = strength * (torch.sigmoid(logits) - target)
        by_layer = torch.einsum("lnd,n->ld", centred, residual)
        by_weight = by_layer @ w
        slope = torch.cat(
            [weights * (by_weight - weights @ by_weight), w + weights @ by_layer, residual.sum(0, keepdim=True)]
        )
        return float(loss / per_row), (slope / per_row).numpy()

    found = minimize(
        objective,
        np.zeros(n_layers + width + 1),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": max_steps, "maxfun": 4 * max_steps, "gtol": tolerance, "ftol": 0.0, "maxcor": 20},
    )
    a, w, b = torch.from_numpy(found.x).split([n_layers, width, 1])
    weights = a.softmax(0)
    shares = weights * norms
    shares = shares / shares.sum() if shares.sum() > 0 else weights
    coefficients = w / unit
    intercept = b[0] - weights @ (mean[:, 0] @ coefficients)
    return weights, shares, coefficients, intercept, torch.tensor(np.abs(found.jac).max()), torch.tensor(found.nit)


def _check(features, labels, train, strength: float) -> None:
    n_rows = features.shape[1]
    for name, given in (("labels", labels), ("train", train)):
        if given.shape[-1] != n_rows:
            raise ValueError(f"{name} covers {given.shape[-1]} rows, features have {n_rows}; give one entry per row.")
    if not 0 < strength < float("inf"):
        raise ValueError(f"strength={strength}; C is finite and above 0.")
    if not bool(features.abs().amax() < _LARGEST):  # nor is NaN
        layer, row, feature = (~(features.abs() < _LARGEST)).nonzero()[0].tolist()
        raise ValueError(
            f"features hold NaN, inf or numbers past {_LARGEST:g}, first at layer {layer}, row {row}, feature "
            f"{feature}; drop the row or fix the capture."
        )
    for fold, rows in enumerate(train):
        for number, label in enumerate(labels):
            if len(label[rows].unique()) < 2:
                raise ValueError(
                    f"fold {fold} trains label set {number} on {int(rows.sum())} rows of fewer than two classes; use "
                    "stratified folds, or more rows of the rare class."
                )

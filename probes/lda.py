"""Linear discriminant analysis of two or more classes, with shrinkage.

With class means m_k, class shares π_k, pooled within covariance S (divisor n) of features standardised in the training
rows, and shrinkage γ:

    Σ = (1 - γ) S + γ tr(S)/d I,   w_k = Σ⁻¹ (m_k - m),   score_k = w_k·(x - m) - w_k·(m_k - m)/2 + log π_k,

log-probabilities of the classes if each is Gaussian with covariance Σ. γ is a number, "ledoit_wolf" (Ledoit & Wolf
2004, on the rows about their class means), or "left_out": the γ of lowest log-loss of rows left out one by one, in
closed form. Leaving out row i of class k, with u = x_i - m_k, takes n_k/(n_k-1) u uᵀ from nS and moves m_k by
-u/(n_k-1); in the eigenbasis of S that is a diagonal matrix less one of rank one, whose inverse is Sherman and
Morrison's.

Beware: with "left_out", rows of one text or entity see each other's; give γ, or use `RidgeClassProbe` with groups.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int64
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from torch import Tensor

from microtome.probes.linear_classifier import LogitClassifier
from microtome.probes.moment_probes import deviation
from microtome.probes.moments import Moments

SHRINKAGES = (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 0.99)
_BLOCK_BYTES = 2**24


class LDAProbe(LogitClassifier):
    """A linear probe from class means and their pooled covariance.

    Parameters: shrinkage, 0 (none) to 1 (variances alone), "ledoit_wolf" or "left_out"; standardize, whether S is of
    standardised features (False: scikit-learn's LinearDiscriminantAnalysis of solver "lsqr" and that shrinkage).

    Attributes: classes_; coef_ `[1, feature]` (two classes, log-odds of the second) or `[class, feature]` and
    intercept_, of the features as given; means_ `[class, feature]`; priors_ `[class]`; shrinkage_; left_out_loss_
    `[shrinkage]`, bits per row at each of `SHRINKAGES` (with "left_out"); direction_, coef_ at length 1.
    """

    def __init__(self, shrinkage="ledoit_wolf", *, standardize=True):
        self.shrinkage = shrinkage
        self.standardize = standardize

    def fit(self, X: Any, y: Any) -> "LDAProbe":
        """Fit to rows X `[row, feature]` and labels y `[row]`.

        Raises ValueError for one class, another shrinkage, NaN or infinity, and a covariance that is singular at
        shrinkage 0.
        """
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) == 1:
            raise ValueError(f"y holds one class only ({self.classes_.tolist()[0]!r}); a probe needs two or more.")
        moments = class_moments(X, codes, len(self.classes_))
        self.means_, self.priors_ = class_means(moments).numpy(), moments.target_mean[0].numpy()
        self.shrinkage_ = self._chosen(X, codes, moments)
        self.coef_, self.intercept_ = lda_weights(moments, self.shrinkage_, standardize=self.standardize)
        norm = np.linalg.norm(self.coef_, axis=1, keepdims=True)
        unit = self.coef_ / np.where(norm > 0, norm, 1.0)
        self.direction_ = unit[0] if len(unit) == 1 else unit
        return self

    def _chosen(self, X: np.ndarray, codes: np.ndarray, moments: Moments) -> float:
        if self.shrinkage not in ("ledoit_wolf", "left_out"):
            return checked_shrinkage(self.shrinkage)
        scale = _scale(moments, self.standardize)
        rows = (torch.from_numpy(X.astype(np.float64)) - moments.mean[0, 0]) / scale
        means = (class_means(moments) - moments.mean[0, 0]) / scale
        apart = rows - means[torch.from_numpy(codes)]
        if self.shrinkage == "ledoit_wolf":
            from sklearn.covariance import ledoit_wolf_shrinkage  # importing it draws random numbers

            return float(ledoit_wolf_shrinkage(apart.numpy(), assume_centered=True))
        loss = left_out_losses(rows, means, torch.from_numpy(codes), torch.tensor(SHRINKAGES, dtype=torch.float64))
        self.left_out_loss_ = loss.numpy()
        return SHRINKAGES[int(loss.argmin())]


def class_moments(X: np.ndarray, codes: np.ndarray, n_classes: int) -> Moments:
    """Moments of rows with one column of 0 and 1 per class."""
    moments = Moments.empty(1, X.shape[1], n_classes)
    hot = torch.nn.functional.one_hot(torch.from_numpy(codes), n_classes).double()
    moments.update(torch.from_numpy(np.require(X, requirements=["C", "W"]))[None], hot)
    return moments


def class_means(moments: Moments) -> Float64[Tensor, "class feature"]:
    """Mean of each class, raw units."""
    held = moments.target_mean[0] * moments.count[0]
    return moments.mean[0, 0] + moments.cross[0, 0].T / held[:, None]


def checked_shrinkage(shrinkage: Any) -> float:
    """The number, if it is one from 0 to 1."""
    if isinstance(shrinkage, str) or not 0 <= shrinkage <= 1:
        raise ValueError(f'shrinkage={shrinkage!r}; give a number from 0 to 1, "ledoit_wolf" or "left_out".')
    return float(shrinkage)


def lda_weights(moments: Moments, shrinkage: float, *, standardize: bool) -> tuple[np.ndarray, np.ndarray]:
    """coef_ and intercept_ of features as given; two classes are one row.

    Raises ValueError for a singular covariance.
    """
    scale, n = _scale(moments, standardize), moments.count[0]
    means = (class_means(moments) - moments.mean[0, 0]) / scale
    within = moments.scatter[0, 0] / n / scale[:, None] / scale - (means.T * moments.target_mean[0]) @ means
    shrunk = (1 - shrinkage) * within
    shrunk.diagonal().add_(shrinkage * within.trace() / len(within))
    unit = shrunk.diagonal().clamp(min=0).sqrt()
    unit = torch.where(unit > 1e-8, unit, 1.0)  # a feature that stands still within classes says nothing of them
    factor, info = torch.linalg.cholesky_ex(shrunk / unit[:, None] / unit)
    if info > 0 or factor.diagonal().min() < 1e-7:
        raise ValueError(
            f"The within-class covariance is singular at shrinkage {shrinkage:g}: features are constant, repeat each "
            "other, or outnumber the rows. Give more shrinkage."
        )
    weights = torch.cholesky_solve(means.T / unit[:, None], factor).T / unit
    offsets = moments.target_mean[0].log() - 0.5 * (weights * means).sum(dim=1)
    if len(weights) == 2:
        weights, offsets = weights[1:] - weights[:1], offsets[1:] - offsets[:1]
    weights = weights / scale
    return weights.numpy(), (offsets - weights @ moments.mean[0, 0]).numpy()


def left_out_losses(
    rows: Float64[Tensor, "example feature"],
    means: Float64[Tensor, "class feature"],
    codes: Int64[Tensor, " example"],
    shrinkages: Float64[Tensor, " shrinkage"],
) -> Float64[Tensor, " shrinkage"]:
    """Bits per row of rows left out one by one; infinite where a class has one row. Same centre for rows and means."""
    n, width = rows.shape
    held = codes.bincount(minlength=len(means)).double()
    own = held[codes]
    if held.min() < 2:
        return torch.full_like(shrinkages, torch.inf)
    apart = rows - means[codes]
    values, basis = torch.linalg.eigh(apart.T @ apart)
    values, apart = values.clamp(min=0), apart @ basis
    distances = (rows @ basis)[:, None] - means @ basis  # [example, class, component]
    taken = own / (own - 1)
    losses = torch.zeros_like(shrinkages)
    for some in torch.arange(n).split(max(1, _BLOCK_BYTES // (8 * width * (len(means) + 3)))):
        u, k, mine = apart[some], taken[some, None], codes[some]
        step = distances[some].clone()
        step[torch.arange(len(some)), mine] *= k
        trace = (values.sum() - k * u.square().sum(dim=1, keepdim=True)) / (n - 1) / width
        prior = held.expand(len(some), -1).clone()
        prior[torch.arange(len(some)), mine] -= 1
        for number, gamma in enumerate(shrinkages.tolist()):
            inverse = 1 / ((1 - gamma) * values / (n - 1) + gamma * trace)
            factor = (1 - gamma) * k[:, 0] / (n - 1)
            solved = u * inverse
            along = (step * solved[:, None]).sum(dim=2)
            gain = factor / (1 - factor * (u * solved).sum(dim=1))
            far = (step.square() * inverse[:, None]).sum(dim=2) + gain[:, None] * along.square()
            scores = prior.log() - 0.5 * far
            losses[number] += torch.nn.functional.cross_entropy(scores, mine, reduction="sum")
    return losses / n / np.log(2)


def _scale(moments: Moments, standardize: bool) -> Float64[Tensor, " feature"]:
    scale = deviation(moments)[0]
    return torch.where((scale > 0) & torch.tensor(standardize), scale, 1.0)

"""Stacking: layers' held-out scores under weights that are not negative, the convex sister of the learned mix.

    z_i = b + Σ_l c_l s_il,   c_l >= 0,
    minimise  mean_i [softplus(z_i) - y_i z_i] + ridge/2 |c|²

over the logits s_il that probes of single layers (or heads, or sites of any kind) gave to rows they were not trained
on. The problem is convex and, with the ridge, its answer unique and finite, whatever the start (Wolpert 1992; weights
not negative after Breiman 1996). What leaving a layer out costs (`bits_without`) is its attribution: nearly nothing if
another layer holds the same.

Beware: scores must be out-of-fold (`Sweep.scores`, `NestedFit.scores`); scores of training rows would reward the layer
that overfits most. With `test`, the weights that score a fold are fitted on the other folds' rows. The probes that gave
those scores had rows of the fold among their training rows, as in all stacking of cross-validated scores: a small
optimism remains, which only a third level of folds would remove.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from scipy.optimize import minimize
from torch import Tensor

from microtome.probes.metrics import log_loss_bits, refuse_nan

RIDGE = 1e-3


@dataclass(frozen=True, eq=False)
class LayerStack:
    """Weights of the sites' scores. Logits are natural, losses mean bits per row."""

    weights: Float64[Tensor, " site"]  # c, of all rows
    intercept: float
    scores: Float64[Tensor, " example"]  # by the other folds' weights if folds were given
    bits: float  # of those scores
    bits_without: Float64[Tensor, " site"]  # with one site left out, likewise


def stack_layers(
    scores: Float[Tensor, "site example"],
    positive: Bool[Tensor, " example"],
    *,
    test: Bool[Tensor, "fold example"] | None = None,
    ridge: int | float = RIDGE,
) -> LayerStack:
    """Weights of each site's out-of-fold logits; `test` holds the folds that gave them.

    Raises ValueError for a NaN or infinite score, labels of one class (in the training rows of a fold, too), a ridge
    that is not above 0, and folds that do not hold every row once.
    """
    values = scores.double()
    refuse_nan(values)
    if not bool(values.isfinite().all()):
        raise ValueError("scores hold infinity; stacking needs finite logits.")
    if not 0 < ridge < math.inf:
        raise ValueError(f"ridge={ridge}; give a number above 0 such as {RIDGE}, or separable rows have no answer.")
    folds = torch.ones(1, len(positive), dtype=torch.bool) if test is None else test
    if not bool((folds.sum(0) == 1).all()):
        raise ValueError("test must hold every row in exactly one fold, as grouped_folds makes them.")
    weights, intercept = _weights(values, positive, ridge)
    stacked = _held_out(values, positive, test, ridge)
    n_sites = len(values)
    without = [
        _bits(_held_out(values[torch.arange(n_sites) != site], positive, test, ridge), positive)
        for site in range(n_sites)
    ]
    return LayerStack(
        weights=weights,
        intercept=intercept,
        scores=stacked,
        bits=_bits(stacked, positive),
        bits_without=torch.tensor(without, dtype=torch.float64),
    )


def _bits(scores: Tensor, positive: Tensor) -> float:
    return float(log_loss_bits(scores, positive))


def _held_out(values: Tensor, positive: Tensor, test: Tensor | None, ridge: float) -> Float64[Tensor, " example"]:
    if test is None:
        weights, intercept = _weights(values, positive, ridge)
        return weights @ values + intercept
    stacked = torch.empty(values.shape[1], dtype=torch.float64)
    for rows in test:
        weights, intercept = _weights(values[:, ~rows], positive[~rows], ridge)
        stacked[rows] = weights @ values[:, rows] + intercept
    return stacked


def _weights(values: Tensor, positive: Tensor, ridge: float) -> tuple[Float64[Tensor, " site"], float]:
    n_positive = int(positive.sum())
    if n_positive in (0, len(positive)):
        raise ValueError(
            f"{n_positive} of {len(positive)} rows to fit on are positive; stacking needs both classes in every fold."
        )
    rows, sign = values.numpy(), np.where(positive.numpy(), 1.0, -1.0)

    def objective(point: np.ndarray) -> tuple[float, np.ndarray]:
        c, b = point[:-1], point[-1]
        margin = sign * (c @ rows + b)
        slope = -sign * np.exp(-np.logaddexp(0, margin)) / len(sign)
        loss = np.logaddexp(0, -margin).mean() + ridge / 2 * c @ c
        return loss, np.append(rows @ slope + ridge * c, slope.sum())

    bounds = [(0, None)] * len(rows) + [(None, None)]
    options = {"maxiter": 2000, "maxfun": 20000, "gtol": 1e-9, "ftol": 0.0, "maxcor": 20}
    found = minimize(objective, np.zeros(len(rows) + 1), jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return torch.from_numpy(found.x[:-1].copy()), float(found.x[-1])

"""A small ReLU network as a probe, with scikit-learn's contract over `fit_mlps`.

    logit = w . max(0, W x̂ + b) + c,  x̂ the features standardised with the training rows,

16 hidden units, Adam, cross-entropy, 10 epochs over batches of 32 (settings of NL-ITI; `mlp_fits` has the details).

Beware: an accurate network says less than an accurate linear probe, since it can compute what the site does not hold.
Show the linear probe and the control task beside it (`nonlinear_gain`).
"""

from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from microtome.probes.mlp_fits import fit_mlps
from microtome.probes.mlp_networks import MlpSettings


class MLPProbe(ClassifierMixin, BaseEstimator):
    """A two-layer (or deeper) network of two classes or more.

    Parameters: hidden, units of each hidden layer; epochs, passes over the rows; batch, rows of a step, the incomplete
    last one of an epoch dropped; learning_rate, of Adam; weight_decay, times each parameter, added to its gradient;
    seed, of start values and batches.

    Attributes: classes_ `[class]`; weights_ and biases_, by layer, `[inputs, outputs]` and `[outputs]`, of the
    standardised features (one output for two classes); mean_ and scale_ `[feature]`; n_epochs_, after which the
    parameters were kept; validation_bits_ `[epoch]`, log-loss of the validation rows, NaN without any.
    """

    def __init__(self, hidden=(16,), *, epochs=10, batch=32, learning_rate=5e-4, weight_decay=1e-4, seed=0):
        self.hidden = hidden
        self.epochs = epochs
        self.batch = batch
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.seed = seed

    def fit(self, X: Any, y: Any, validation: Any = None) -> "MLPProbe":
        """Fit to rows X `[row, feature]` and labels y `[row]`.

        `validation`, True for rows that are not trained on but choose the epoch by their log-loss, makes early stopping
        honest only if they share no group with the rows to report on. Raises ValueError for one class and what
        `fit_mlps` raises.
        """
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) == 1:
            raise ValueError(
                f"y holds one class only ({self.classes_.tolist()[0]!r}); a probe needs rows of two classes."
            )
        held = np.zeros(len(y), dtype=bool) if validation is None else np.asarray(validation)
        if held.shape != y.shape or held.dtype != bool:
            raise ValueError(
                f"validation has shape {held.shape}, type {held.dtype}; pass True or False for each of {len(y)} rows."
            )
        labels = torch.from_numpy(codes == 1) if len(self.classes_) == 2 else torch.from_numpy(codes.astype(np.int64))
        fits = fit_mlps(
            torch.from_numpy(np.require(X, requirements=["C", "W"]))[None],
            labels[None],
            torch.from_numpy(~held)[None],
            validation=None if validation is None else torch.from_numpy(held)[None],
            settings=MlpSettings(
                hidden=tuple(self.hidden),
                epochs=self.epochs,
                batch=self.batch,
                learning_rate=float(self.learning_rate),
                weight_decay=float(self.weight_decay),
            ),
            seed=self.seed,
        )
        self._fits = fits
        self.weights_ = [weight[0, 0, 0].numpy() for weight in fits.weights]
        self.biases_ = [bias[0, 0, 0].numpy() for bias in fits.biases]
        self.mean_, self.scale_ = fits.mean[0, 0].numpy(), fits.scale[0, 0].numpy()
        self.n_epochs_ = int(fits.epochs[0, 0, 0])
        self.validation_bits_ = fits.validation_bits[0, 0, 0].numpy()
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Log-odds `[row]` of the second class, or with more than two classes one logit for each `[row, class]`."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        rows = torch.from_numpy(np.require(X, requirements=["C", "W"]))
        return self._fits.logits(rows[None])[0, 0, 0].numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The likeliest class of each row."""
        scores = self.decision_function(X)
        return self.classes_[(scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(1)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities `[row, class]`."""
        logits = torch.from_numpy(self.decision_function(X))
        if logits.ndim == 1:
            return torch.stack([torch.sigmoid(-logits), torch.sigmoid(logits)], 1).numpy()
        return logits.softmax(1).numpy()

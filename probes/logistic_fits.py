"""What `fit_logistic` returns: weights of every fit, standardised and raw, with what is needed to trust them."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class LogisticFits:
    """Every fit of one call. Weights are float64; `mean` and `scale` are in activation units."""

    weights: Float[Tensor, "site label_set fold strength d_model"]  # of standardised features: log odds per deviation
    intercepts: Float[Tensor, "site label_set fold strength"]  # log odds at the training mean
    mean: Float[Tensor, "site fold d_model"]
    scale: Float[Tensor, "site fold d_model"]  # deviation of the training rows, 0 if constant; 1 if not standardised
    strengths: Float[Tensor, " strength"]  # C
    gradient: Float[Tensor, "site label_set fold strength"]  # largest absolute entry of ∇J over C Σs
    converged: Bool[Tensor, "site label_set fold strength"]
    separated: Bool[Tensor, "site label_set fold strength"]  # every training row is on its side: proof of separability
    passes: Int[Tensor, "site label_set fold strength"]  # products with all rows and back

    @property
    def raw_weights(self) -> Float[Tensor, "site label_set fold strength d_model"]:
        """Weights of the features as given, log odds per activation unit; 0 for features constant in the fold."""
        return self.weights / torch.where(self.scale > 0, self.scale, 1.0)[:, None, :, None, :]

    @property
    def raw_intercepts(self) -> Float[Tensor, "site label_set fold strength"]:
        """Log odds at the origin of the features as given."""
        return self.intercepts - torch.einsum("slfcd,sfd->slfc", self.raw_weights, self.mean)

    def decision(
        self, features: Float[Tensor, "site example d_model"] | Float[Tensor, "example d_model"]
    ) -> Float[Tensor, "site label_set fold strength example"]:
        """Log odds of all rows under every fit, float64: one product per site.

        Raises ValueError when the features are not those sites. Beware: the answer holds fits x rows numbers.
        """
        features = features[None] if features.ndim == 2 else features
        weights = self.raw_weights
        n_sites, *grid, width = weights.shape
        if features.shape[0] != n_sites or features.shape[2] != width:
            raise ValueError(
                f"features are {list(features.shape)}; these fits hold {n_sites} sites of {width} features. Give "
                "[site, example, feature] with the same sites in the same order."
            )
        rows = features.to(weights).mT
        return (weights.flatten(1, -2) @ rows).unflatten(1, grid) + self.raw_intercepts[..., None]

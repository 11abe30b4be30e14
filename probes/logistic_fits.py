"""What `fit_logistic` and `fit_multinomial` return: weights of every fit, and what is needed to trust them."""

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
        return scores_of(features, self.raw_weights, self.raw_intercepts)


@dataclass(frozen=True)
class MultinomialFits:
    """Every fit of one call of `fit_multinomial`. Weights and intercepts sum to zero over the classes."""

    weights: Float[Tensor, "site label_set fold strength class d_model"]  # of standardised features, natural logits
    intercepts: Float[Tensor, "site label_set fold strength class"]  # logits at the training mean
    mean: Float[Tensor, "site fold d_model"]
    scale: Float[Tensor, "site fold d_model"]  # deviation of the training rows, 0 if constant; 1 if not standardised
    strengths: Float[Tensor, " strength"]  # C
    gradient: Float[Tensor, "site label_set fold strength"]  # largest absolute entry of ∇J over C Σs
    converged: Bool[Tensor, "site label_set fold strength"]
    separated: Bool[Tensor, "site label_set fold strength"]  # every training row has its class ahead of all others
    passes: Int[Tensor, "site label_set fold strength"]  # products with all rows and back

    @property
    def raw_weights(self) -> Float[Tensor, "site label_set fold strength class d_model"]:
        """Weights of the features as given, logits per activation unit; 0 for features constant in the fold."""
        return self.weights / torch.where(self.scale > 0, self.scale, 1.0)[:, None, :, None, None, :]

    @property
    def raw_intercepts(self) -> Float[Tensor, "site label_set fold strength class"]:
        """Logits at the origin of the features as given."""
        return self.intercepts - torch.einsum("slfckd,sfd->slfck", self.raw_weights, self.mean)

    def decision(
        self, features: Float[Tensor, "site example d_model"] | Float[Tensor, "example d_model"]
    ) -> Float[Tensor, "site label_set fold strength class example"]:
        """Logits of all rows under every fit, float64; softmax over the classes gives probabilities.

        Raises ValueError when the features are not those sites. Beware: the answer holds fits x classes x rows numbers.
        """
        return scores_of(features, self.raw_weights, self.raw_intercepts)


def scores_of(features: Tensor, weights: Tensor, intercepts: Tensor) -> Tensor:
    """[site, *fit, example]: one product per site."""
    features = features[None] if features.ndim == 2 else features
    n_sites, *grid, width = weights.shape
    if features.shape[0] != n_sites or features.shape[2] != width:
        raise ValueError(
            f"features are {list(features.shape)}; these fits hold {n_sites} sites of {width} features. Give "
            "[site, example, feature] with the same sites in the same order."
        )
    rows = features.to(weights).mT
    return (weights.flatten(1, -2) @ rows).unflatten(1, grid) + intercepts[..., None]

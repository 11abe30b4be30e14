"""Loss and gradients of a TopK autoencoder, written out: only the product that chooses the features is dense.

    pre = (x - b) W^T + e,     z = relu(pre) at the k largest,     x_hat = z D + b
    loss = mean |x_hat - x|^2 / variance  +  weight x mean |z_aux D - r|^2 / mean |r - mean r|^2,     r = x - x_hat

z_aux: relu(pre) at the k_aux largest of the dead features; r counts as a constant (Gao et al. 2024, arXiv 2406.04093,
section 2 and appendix A.2; the second term's divisor as in dictionary_learning, trainers/top_k.py, which has it from
the authors' code).

Decoding sums k rows, and both weights' gradients are sums over the tokens where a feature is on (`embedding_bag`, the
second over tokens sorted by feature). d = 576, 4,608 features, k = 32, 1,024 tokens, one CPU thread, milliseconds:
choosing the features 75 to 100 (5.4 GFLOP) and 18; decoding 3, dense 79; a weight's gradient 5, dense 68 (1 December
2026).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.functional import embedding_bag


class TopKWeights(NamedTuple):
    """W, e, D, b; also their gradients."""

    encoder: Float[Tensor, "feature width"]
    encoder_bias: Float[Tensor, " feature"]
    decoder: Float[Tensor, "feature width"]
    decoder_bias: Float[Tensor, " width"]


@dataclass(frozen=True, eq=False)
class TopKStep:
    """What one batch says.

    Attributes:
        unexplained: mean |x_hat - x|^2 / variance.
        auxiliary: the second term of the loss without its weight, 0 where no feature is dead.
        gradients: of the loss.
        is_on: features with z > 0 at some token.
    """

    unexplained: float
    auxiliary: float
    gradients: TopKWeights
    is_on: Bool[Tensor, " feature"]


@torch.no_grad()
def topk_step(
    x: Float[Tensor, "token width"],
    weights: TopKWeights,
    k: int,
    variance: float,
    *,
    dead: Bool[Tensor, " feature"] | None = None,
    k_aux: int = 0,
    aux_weight: float = 0.0,
) -> TopKStep:
    """Loss and gradients at x.

    Args:
        variance: mean of |x - mean|^2 over the data.
        dead: features that the second term is for; none if None.
    """
    centred = x - weights.decoder_bias
    pre = torch.addmm(weights.encoder_bias, centred, weights.encoder.T)
    largest, places = pre.topk(k, dim=-1, sorted=False)
    z = largest.relu()
    with torch.enable_grad():  # for the gradient of z alone: its dot products with rows of D run in one pass
        leaf = z.clone().requires_grad_()
        decoded = embedding_bag(places, weights.decoder, per_sample_weights=leaf, mode="sum")
    residual = x - decoded.detach() - weights.decoder_bias
    outward = residual * (-2 / (len(x) * variance))
    (by_z,) = torch.autograd.grad(decoded, leaf, outward)
    by_z = by_z * (largest > 0)
    encoder, by_bias = summed_by_feature(places, by_z, centred, len(weights.encoder))
    decoder, _ = summed_by_feature(places, z, outward, len(weights.encoder))
    is_on = torch.zeros_like(weights.encoder_bias, dtype=torch.bool)
    is_on[places[z > 0]] = True
    auxiliary = 0.0
    if dead is not None and k_aux and aux_weight and bool(dead.any()):
        which = dead.nonzero()[:, 0]
        auxiliary, more = _auxiliary(centred, pre[:, which], weights.decoder[which], residual, k_aux)
        encoder[which] += aux_weight * more.encoder
        decoder[which] += aux_weight * more.decoder
        by_bias[which] += aux_weight * more.encoder_bias
    gradients = TopKWeights(encoder, by_bias, decoder, outward.sum(0) - by_bias @ weights.encoder)
    unexplained = float(residual.square().sum()) / (len(x) * variance)
    return TopKStep(unexplained, auxiliary, gradients, is_on)


def summed_by_feature(
    places: Int64[Tensor, "token k"],
    values: Float[Tensor, "token k"],
    rows: Float[Tensor, "token width"],
    features: int,
) -> tuple[Float[Tensor, "feature width"], Float[Tensor, " feature"]]:
    """V^T rows and column sums of the sparse V [token, feature] that has `values` at `places`."""
    flat, order = places.flatten().sort(stable=True)
    starts = torch.searchsorted(flat, torch.arange(features, device=flat.device))
    sorted_values = values.flatten()[order]
    sums = embedding_bag(order // places.shape[1], rows, starts, per_sample_weights=sorted_values, mode="sum")
    return sums, torch.zeros(features, dtype=values.dtype, device=values.device).index_add_(0, flat, sorted_values)


def _auxiliary(
    centred: Tensor, pre: Tensor, decoder: Tensor, residual: Tensor, k_aux: int
) -> tuple[float, TopKWeights]:
    """The second term and its gradients with respect to the dead features' rows; dense, as they are few."""
    largest, places = pre.topk(min(k_aux, pre.shape[1]), dim=-1, sorted=False)
    z = torch.zeros_like(pre).scatter_(-1, places, largest.relu())
    error = z @ decoder - residual
    scale = (residual - residual.mean(0)).square().sum()
    if not float(scale):
        return 0.0, TopKWeights(torch.zeros_like(decoder), pre.new_zeros(pre.shape[1]), decoder * 0, centred[0] * 0)
    outward = error * (2 / scale)
    by_z = (outward @ decoder.T) * (z > 0)
    gradients = TopKWeights(by_z.T @ centred, by_z.sum(0), z.T @ outward, centred[0] * 0)
    return float(error.square().sum() / scale), gradients


def without_radial_part(
    gradient: Float[Tensor, "feature width"], rows: Float[Tensor, "feature width"]
) -> Float[Tensor, "feature width"]:
    """The gradient less its component along each row of unit norm, which would only change the row's length."""
    return gradient - (gradient * rows).sum(1, keepdim=True) * rows

"""Heads' contributions to the stream at the width of a head: the same inner products in d_head columns, not d_model.

    Delta_h = z_h W_O^h  [d_model],     o_h = z_h (W_O^h W_O^h')^(1/2)  [d_head],     o_h . o_h' = Delta_h . Delta_h'

A linear probe of z and one of Delta score from the same span, but a penalty on the weights means another thing in
each: in z it depends on how the model happens to divide its scale between W_V and W_O. The root brings the penalty of
Delta back, so that ridge and logistic probes give the same predictions at d_model / d_head times fewer columns.
Relation probes on contributions: Popovic and Faerber 2026, arXiv:2604.19934; the root is derived here. Beware:
standardising single columns undoes it, since columns of o are not columns of Delta: fit with standardize=False.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from microtome.capture.activations import Activations
from microtome.capture.sites import Site
from microtome.capture.stored_tensor import in_memory


def gauge(weights: Float[Tensor, "*site head d_head d_model"]) -> Float[Tensor, "*site head d_head d_head"]:
    """(W_O W_O')^(1/2) of every head, symmetric, in float64, from the singular values of W_O."""
    u, s, _ = torch.linalg.svd(weights.double(), full_matrices=False)
    return (u * s[..., None, :]) @ u.mT


def gauged(z: Float[Tensor, "..."], weights: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """z (W_O W_O')^(1/2) of every head, in the dtype of z.

    Args:
        z: `[*site, row, head, d_head]`; leading axes (layers) are batched.
        weights: W_O, `[*site, head, d_head, d_model]`.

    Raises ValueError for heads or widths that do not agree.
    """
    if z.shape[-2:] != weights.shape[-3:-1] or z.shape[:-3] != weights.shape[:-3]:
        raise ValueError(
            f"z is {list(z.shape)}, W_O {list(weights.shape)}: expected [..., row, head, d_head] and [..., head, "
            "d_head, d_model] with the same heads. Take z of all heads, and weights of the same layers."
        )
    return torch.einsum("...rhd,...hde->...rhe", z, gauge(weights).to(z.dtype))


def gauged_heads(activations: Activations, weights: Mapping[Site, Tensor]) -> Activations:
    """Every z site that has weights, as a site `z_gauged.L` of the same shape; rows are kept.

    Args:
        activations: with z of whole layers.
        weights: `microtome.capture.output_weights(model)`.

    Raises:
        KeyError: no z site of the weights' layers.
        ValueError: one head alone, or other heads than the weights have.
    """
    sites = [site for site in activations.sites if site.kind == "z" and site.whole in weights]
    if not sites:
        raise KeyError(
            f"no z site of {', '.join(map(str, list(weights)[:4]))} in {activations!r}. Capture 'z' of these layers."
        )
    if single := [site for site in sites if site.head is not None]:
        raise ValueError(
            f"{single[0]} is one head; gauged_heads takes z of all heads of a layer. Capture {single[0].whole}."
        )
    tensors = {
        Site("z_gauged", site.layer, stack=site.stack, call=site.call): gauged(
            in_memory(activations.tensors[site]), weights[site].to(activations.tensors[site].device)
        )
        for site in sites
    }
    return Activations(activations.rows, tensors, {**activations.provenance, "gauge": "z (W_O W_O')^(1/2)"})

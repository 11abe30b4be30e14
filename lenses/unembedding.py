"""The end of a model as functions of a stream: final norm, unembedding, factor and soft cap, as proved by `dissect`.

    logits(x) = cap tanh(factor (n(x) W_U + b_U) / cap),     without a cap: factor (n(x) W_U + b_U)

n is the model's own norm module with its statistics recomputed on x, which is what a lens wants (nostalgebraist 2020).
For attribution the scale of the real final stream is kept instead: `microtome.lenses.attribution`. The weight is the
model's storage, tied embeddings included: read it, never write it.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from microtome.capture.anatomy import Anatomy
from microtome.capture.dissect import dissect
from microtome.capture.layouts import affine_weight
from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.lenses.short_repr import short_repr


@dataclass(frozen=True, eq=False)
class Unembedding:
    """What turns the last residual stream into logits.

    Attributes:
        norm: the model's own final norm, None where there is none.
        weight: W_U transposed.
        bias: b_U, None where there is none.
        factor: number by which the linear map's output is multiplied.
        cap: c of the soft cap, None without one.
    """

    norm: nn.Module | None
    weight: Float[Tensor, "vocab d_model"]
    bias: Float[Tensor, " vocab"] | None = None
    factor: float = 1.0
    cap: float | None = None

    __repr__ = short_repr

    @property
    def vocab(self) -> int:
        """Number of tokens."""
        return self.weight.shape[0]

    def normed(self, stream: Float[Tensor, "*any d_model"]) -> Float[Tensor, "*any d_model"]:
        """n(x), statistics recomputed on x; hooks of the norm module do not run."""
        return stream if self.norm is None else self.norm.forward(stream)

    def logits(self, stream: Float[Tensor, "*any d_model"]) -> Float[Tensor, "*any vocab"]:
        """Logits of streams, dense: for a handful of rows. Many rows go through `kernels.vocabulary_statistics`."""
        return self.logits_of_normed(self.normed(stream))

    def logits_of_normed(self, normed: Float[Tensor, "*any d_model"]) -> Float[Tensor, "*any vocab"]:
        """Logits of what the final norm returns, dense."""
        scores = self.factor * nn.functional.linear(normed, self.weight, self.bias)
        return scores if self.cap is None else self.cap * torch.tanh(scores / self.cap)


def unembedding_of(model: LoadedModel | nn.Module, anatomy: Anatomy | None = None) -> Unembedding:
    """The end of this model.

    Raises:
        ValueError: a model without an unembedding, or with more than a norm before it (a masked-language-model head);
            the reason is said.
    """
    module = model.module if isinstance(model, LoadedModel) else model
    anatomy = dissect(module) if anatomy is None else anatomy
    if not any(identity.name == "tail" and identity.holds for identity in anatomy.proof):
        ends = [anatomy.unavailable.get(Site(kind), "") for kind in ("logits", "final_norm")]
        reason = next((why for why in ends if why), "its logits are not the unembedding of the normed last stream")
        raise ValueError(
            f"{anatomy.model_class} has no end that a lens can use: {reason}. A lens needs a language model whose "
            "logits are a linear map of the normed stream."
        )
    linear = module.get_submodule(anatomy.unembedding)
    norm = None if anatomy.final_norm is None else module.get_submodule(anatomy.final_norm)
    like = _like(module, linear, anatomy.d_model)
    with torch.no_grad():
        weight = affine_weight(linear, like).T
        bias = getattr(linear, "bias", None)
        if type(linear) is not nn.Linear:
            bias = linear.forward(torch.zeros_like(like))[0, 0]
            bias = bias if bool(bias.any()) else None
    return Unembedding(
        norm,
        weight.detach(),
        None if bias is None else bias.detach(),
        anatomy.logits_factor,
        anatomy.logits_cap,
    )


def _like(module: nn.Module, linear: nn.Module, d_model: int) -> Float[Tensor, "1 1 d_model"]:
    found = [p for p in (*linear.parameters(), *module.parameters()) if p.dtype.is_floating_point]
    return torch.zeros(1, 1, d_model, dtype=found[0].dtype, device=found[0].device)

"""The definition of the read-outs of `vocabulary_statistics`, dense: for tests, and for a handful of rows."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def dense_logits(
    states: Float[Tensor, "*any d_model"],
    weight: Float[Tensor, "vocab d_model"],
    bias: Float[Tensor, " vocab"] | None = None,
    factor: float = 1.0,
    cap: float | None = None,
) -> Float[Tensor, "*any vocab"]:
    """cap tanh(factor (h W + b) / cap), in float64 if states or weight are, else in float32."""
    wide = torch.promote_types(torch.promote_types(states.dtype, weight.dtype), torch.float32)
    offset = None if bias is None else bias.to(wide)
    scores = factor * torch.nn.functional.linear(states.to(wide), weight.to(wide), offset)
    return scores if cap is None else cap * torch.tanh(scores / cap)


@torch.no_grad()
def vocabulary_statistics_reference(
    hidden: Float[Tensor, "depth token d_model"],
    weight: Float[Tensor, "vocab d_model"],
    *,
    final: Float[Tensor, "token d_model"] | None = None,
    bias: Float[Tensor, " vocab"] | None = None,
    factor: float = 1.0,
    cap: float | None = None,
    targets: Int64[Tensor, " token"] | None = None,
    top: int = 5,
) -> dict[str, Tensor | None]:
    """The fields of `VocabularyStatistics` by name, from dense logits."""

    def of_target(z: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability and rank of the target: how many tokens come before it, 0 for the largest."""
        index = targets.clamp(min=0).expand(z.shape[:-1])[..., None]
        own = z.gather(-1, index)
        ids = torch.arange(z.shape[-1], device=z.device)
        rank = ((z > own) | ((z == own) & (ids < index))).sum(-1)
        log_prob = q.gather(-1, index)[..., 0].masked_fill(targets < 0, torch.nan)
        return log_prob, rank.masked_fill(log_prob.isnan(), -1)

    def largest(z: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        order = z.argsort(dim=-1, descending=True, stable=True)[..., :top]
        return order.masked_fill(z.isnan().any(-1, keepdim=True), -1), q.gather(-1, order)

    z = dense_logits(hidden, weight, bias, factor, cap)
    q = z.log_softmax(-1)
    top_ids, top_log_probs = largest(z, q)
    found: dict[str, Tensor | None] = {
        "entropy": (-(q.exp() * q).sum(-1)).clamp(min=0),
        "log_sum_exp": z.logsumexp(-1),
        "top_ids": top_ids,
        "top_log_probs": top_log_probs,
    }
    if targets is not None:
        found["target_log_prob"], found["target_rank"] = of_target(z, q)
    if final is not None:
        z = dense_logits(final, weight, bias, factor, cap)
        p = z.log_softmax(-1)
        found["kl"] = (p.exp() * (p - q)).sum(-1)
        found["kl_reverse"] = (q.exp() * (q - p)).sum(-1)
        found["final_entropy"] = (-(p.exp() * p).sum(-1)).clamp(min=0)
        found["final_top_ids"], found["final_top_log_probs"] = largest(z, p)
        found["agrees"] = (top_ids[..., 0] == found["final_top_ids"][..., 0]) & (top_ids[..., 0] >= 0)
        if targets is not None:
            found["final_target_log_prob"], found["final_target_rank"] = of_target(z, p)
    return found


def vocabulary_kl_reference(
    hidden: Float[Tensor, "depth token d_model"],
    final: Float[Tensor, "token d_model"],
    weight: Float[Tensor, "vocab d_model"],
    *,
    bias: Float[Tensor, " vocab"] | None = None,
    factor: float = 1.0,
    cap: float | None = None,
    reverse: bool = False,
) -> Float[Tensor, "depth token"]:
    """KL(p || q), or KL(q || p) if reverse; autograd differentiates it with respect to `hidden`."""
    p = dense_logits(final, weight, bias, factor, cap).log_softmax(-1).detach()
    q = dense_logits(hidden, weight, bias, factor, cap).log_softmax(-1)
    return (q.exp() * (q - p) if reverse else p.exp() * (p - q)).sum(-1)


def vocabulary_cross_entropy_reference(
    hidden: Float[Tensor, "depth token d_model"],
    targets: Int64[Tensor, " token"],
    weight: Float[Tensor, "vocab d_model"],
    *,
    bias: Float[Tensor, " vocab"] | None = None,
    factor: float = 1.0,
    cap: float | None = None,
) -> Float[Tensor, "depth token"]:
    """-log q(target); autograd differentiates it with respect to `hidden`."""
    q = dense_logits(hidden, weight, bias, factor, cap).log_softmax(-1)
    return -q.gather(-1, targets.expand(q.shape[:-1])[..., None])[..., 0]


def vocabulary_kl_learned_reference(
    features: Float[Tensor, "token feature"],
    learned_weight: Float[Tensor, "vocab feature"],
    learned_bias: Float[Tensor, " vocab"] | None,
    final: Float[Tensor, "token d_model"],
    weight: Float[Tensor, "vocab d_model"],
    *,
    bias: Float[Tensor, " vocab"] | None = None,
    factor: float = 1.0,
    cap: float | None = None,
) -> Float[Tensor, " token"]:
    """KL(p || softmax(features learned_weight^T + learned_bias)), dense; autograd differentiates what is learned."""
    p = dense_logits(final, weight, bias, factor, cap).log_softmax(-1).detach()
    q = dense_logits(features, learned_weight, learned_bias).log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)

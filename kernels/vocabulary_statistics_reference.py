"""The definition of `vocabulary_statistics`, dense: for tests, and for a handful of rows."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor


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

    def log_probs(states: Tensor) -> tuple[Tensor, Tensor]:
        scores = factor * torch.nn.functional.linear(states, weight, bias)
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return wide.log_softmax(-1), wide.logsumexp(-1)

    def of_target(q: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability and rank of the target: how many tokens come before it, 0 for the largest."""
        index = targets.clamp(min=0).expand(q.shape[:-1])[..., None]
        own = q.gather(-1, index)
        ids = torch.arange(q.shape[-1], device=q.device)
        rank = ((q > own) | ((q == own) & (ids < index))).sum(-1)
        missing = targets < 0
        return own[..., 0].masked_fill(missing, torch.nan), rank.masked_fill(missing, -1)

    def largest(q: Tensor) -> tuple[Tensor, Tensor]:
        order = q.argsort(dim=-1, descending=True, stable=True)[..., :top]
        return order, q.gather(-1, order)

    q, lse = log_probs(hidden)
    top_ids, top_log_probs = largest(q)
    found: dict[str, Tensor | None] = {
        "entropy": -(q.exp() * q).sum(-1),
        "log_sum_exp": lse,
        "top_ids": top_ids,
        "top_log_probs": top_log_probs,
    }
    if final is not None:
        p, _ = log_probs(final)
        found["kl"] = (p.exp() * (p - q)).sum(-1)
        found["kl_reverse"] = (q.exp() * (q - p)).sum(-1)
        found["final_entropy"] = -(p.exp() * p).sum(-1)
        found["final_top_ids"], found["final_top_log_probs"] = largest(p)
        found["agrees"] = top_ids[..., 0] == found["final_top_ids"][..., 0]
    if targets is not None:
        found["target_log_prob"], found["target_rank"] = of_target(q)
        if final is not None:
            found["final_target_log_prob"], found["final_target_rank"] = of_target(p)
    return found


def vocabulary_kl_reference(
    hidden: Float[Tensor, "depth token d_model"],
    final: Float[Tensor, "token d_model"],
    weight: Float[Tensor, "vocab d_model"],
    *,
    bias: Float[Tensor, " vocab"] | None = None,
    factor: float = 1.0,
    cap: float | None = None,
) -> Float[Tensor, "depth token"]:
    """KL(p || q), dense; autograd differentiates it with respect to `hidden`."""

    def log_probs(states: Tensor) -> Tensor:
        scores = factor * torch.nn.functional.linear(states, weight, bias)
        return (scores if cap is None else cap * torch.tanh(scores / cap)).log_softmax(-1)

    p, q = log_probs(final).detach(), log_probs(hidden)
    return (p.exp() * (p - q)).sum(-1)


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
    with torch.no_grad():
        scores = factor * torch.nn.functional.linear(final, weight, bias)
        p = (scores if cap is None else cap * torch.tanh(scores / cap)).log_softmax(-1)
    q = torch.nn.functional.linear(features, learned_weight, learned_bias).log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)

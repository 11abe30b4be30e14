"""The definition of `attention_statistics`, dense: for tests, and for short texts."""

import torch
from torch import Tensor


def attention_statistics_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    mask: Tensor | None,
    *,
    scaling: float,
    is_causal: bool,
    offset: int,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    position_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    first_key: Tensor,
    windows: tuple[int, ...],
    rules: tuple[tuple[Tensor, Tensor, bool, bool], ...],
    marked: Tensor,
) -> dict[str, Tensor | None]:
    """The fields of `AttentionStatistics` by name, from the whole pattern `[batch, head, query, key]`."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    group, queries, keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    distance = torch.arange(queries, device=q.device)[:, None] + offset - torch.arange(keys, device=q.device)

    scores = scaling * q.to(dtype) @ k.to(dtype).repeat_interleave(group, 1).transpose(2, 3)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias.to(dtype)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(dtype)[:, None, None] * distance.abs()
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if is_causal:
        allowed = allowed & (distance >= 0)
    if sliding_window is not None:
        allowed = allowed & (distance.abs() < sliding_window)
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    elif mask is not None:
        scores = scores + mask.to(dtype)
    scores = scores.masked_fill(~allowed, -torch.inf)

    everything = scores
    if sinks is not None:
        everything = torch.cat([scores, sinks.to(dtype).expand(*scores.shape[:-1], 1)], -1)
    lse = everything.logsumexp(-1)
    # not exp(scores - lse): beside a large finite mask lse has lost its digits
    p = everything.softmax(-1)[..., :keys].masked_fill(lse[..., None] == -torch.inf, 0.0)

    def over(chosen: Tensor) -> Tensor:
        return (p * chosen).sum(-1)

    at_rule = [
        (of_query[:, None, :, None] == of_key[:, None, None])
        & (of_query >= 0)[:, None, :, None]
        # no precedence to think about: each condition is a bool matrix
        & ((distance != 0) | (not exclude_self))
        & ((distance >= 0) | (not only_before))
        for of_query, of_key, exclude_self, only_before in rules
    ]
    is_key = (marked >= 0) & (marked < keys)
    at_marked = marked.clamp(0, keys - 1)[:, None].expand(-1, q.shape[1], -1, -1)
    is_first = torch.arange(keys, device=q.device) == first_key[:, None]
    empty = lse.new_zeros(0, *lse.shape)
    return {
        "log_sum_exp": lse,
        "entropy": torch.special.entr(p).sum(-1),
        "largest": p.amax(-1),
        "total": p.sum(-1),
        "on_self": over(distance == 0),
        "on_previous": over(distance == 1),
        "on_first": over(is_first[:, None, None]),
        "mean_distance": over(distance.abs()),
        "within": torch.stack([over(distance.abs() < w) for w in windows]) if windows else empty,
        "on_rules": torch.stack([over(rule) for rule in at_rule]) if rules else empty,
        "on_marked": p.gather(-1, at_marked) * is_key[:, None],
        "z": None if v is None else p @ v.to(dtype).repeat_interleave(group, 1),
    }

"""Attention probabilities of chosen heads and query rows, computed from q and k without the full matrix.

    P[b, h, i, j] = softmax_j( cap(scaling q[b, h, i] . k[b, h // group, j]) + position_bias + mask )

`cap(x)` is `softcap tanh(x / softcap)` (Gemma-2, arXiv:2408.00118, section 2) or x; a sink (gpt-oss, arXiv:2508.10925,
section 2.3) is one more logit per head that takes probability and gives no value, so that rows then sum to less than
one. Query head h reads key-value head h // group (Ainslie et al. 2023, arXiv:2305.13245). Scores and softmax are
in float32, or float64 for float64 input.

Memory is `batch x chosen heads x chosen rows x keys`. Beware of rows that may attend to nothing (padding queries):
under a boolean mask they are zero, as scaled dot-product attention has it; under an additive mask of large finite
numbers they are uniform, as transformers' eager attention has it.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor


def attention_rows(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    mask: Shaped[Tensor, "..."] | None,
    *,
    scaling: float,
    heads: Sequence[int] | None = None,
    queries: Int[Tensor, " row"] | Int[Tensor, "batch row"] | None = None,
    is_causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, "..."] | None = None,
    position_bias: Float[Tensor, "..."] | None = None,
) -> Float[Tensor, "batch chosen_head row key"]:
    """Rows of the attention matrix for chosen heads and queries only.

    Args:
        q: queries as attention uses them (after rotation).
        k: keys of the key-value heads, all of them that can be attended to.
        mask: None, `[batch or 1, head or 1, query, key]` (bool, True attends; or a number to add), or `[batch, key]`
            bool (True is a real token).
        scaling: factor on the dot product, usually d_head^-0.5.
        heads: query heads from 0 in the order wanted; None means all.
        queries: rows from 0, one list for the whole batch or one per batch element; None means all.
        is_causal: query i attends to keys up to i + causal_offset, on top of the mask.
        causal_offset: 0 when queries and keys begin together (sdpa), keys - queries when they end together (flash).
        sliding_window: with w, only keys at a distance below w from i + causal_offset; None when the mask has it.
        softcap: bound on the scores, applied before mask and bias.
        sinks: `[head]`, or `[batch, head, query, 1]`: the logit of each head's sink.
        position_bias: `[batch or 1, head or 1, query, key]`, added to the scores.

    Returns:
        Probabilities in float32 (float64 for float64 input); what is masked is zero.

    Raises:
        ValueError: heads are not a multiple of key-value heads, a head or row is out of range, or the mask's shape
            does not fit.
    """
    n_heads, n_queries, n_kv, n_keys = q.shape[1], q.shape[2], k.shape[1], k.shape[2]
    if n_heads % n_kv:
        raise ValueError(f"{n_heads} query heads cannot share {n_kv} key-value heads: not a multiple.")
    chosen = _checked_heads(heads, n_heads)
    rows = _checked_rows(queries, n_queries, q.device)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32

    scores = _scores(_take(q, chosen, rows).to(dtype), k.to(dtype), chosen, n_heads // n_kv) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + _take(position_bias, chosen, rows).to(dtype)

    allowed = _allowed_by_position(rows, n_keys, is_causal, causal_offset, sliding_window)
    if mask is not None:
        if mask.ndim == 2:
            mask = mask[:, None, None].bool()
        elif mask.ndim != 4 or mask.shape[2] not in (1, n_queries):
            raise ValueError(
                f"The mask has shape {tuple(mask.shape)}; expected [batch, key] or [batch or 1, head or 1, "
                f"{n_queries}, {n_keys}]."
            )
        if mask.shape[-1] != n_keys:
            raise ValueError(f"The mask covers {mask.shape[-1]} keys, there are {n_keys}.")
        mask = _take(mask, chosen, rows)
        if mask.dtype == torch.bool:
            allowed = mask if allowed is None else allowed & mask
        else:
            scores = scores + mask.to(dtype)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return _softmax(scores, None if sinks is None else _sink_column(sinks, chosen, rows, scores))


def _checked_heads(heads: Sequence[int] | None, n_heads: int) -> list[int] | None:
    if heads is None:
        return None
    if wrong := [h for h in heads if not 0 <= h < n_heads]:
        raise ValueError(f"Heads {wrong} are out of range: there are {n_heads} heads, 0 to {n_heads - 1}.")
    return list(heads)


def _checked_rows(queries: Tensor | None, n_queries: int, device: torch.device) -> Int[Tensor, "one_or_batch row"]:
    rows = torch.arange(n_queries, device=device) if queries is None else queries.to(device)
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < n_queries:
        raise ValueError(f"Query rows {rows.tolist()} are out of range: there are {n_queries}, 0 to {n_queries - 1}.")
    return rows if rows.ndim == 2 else rows[None]


def _take(tensor: Tensor, heads: list[int] | None, rows: Tensor) -> Tensor:
    """Chosen heads (axis 1) and rows (axis 2) of a 4-D tensor; axes of size 1 stand for all and stay."""
    if heads is not None and tensor.shape[1] > 1:
        tensor = tensor[:, heads]
    if tensor.shape[2] == 1 and not (rows == 0).all():
        return tensor
    if len(rows) == 1:
        return tensor[:, :, rows[0]]
    tensor = tensor.expand(len(rows), -1, -1, -1)
    return tensor.take_along_dim(rows[:, None, :, None], dim=2)


def _scores(q: Tensor, k: Tensor, heads: list[int] | None, group: int) -> Tensor:
    if heads is not None:
        return q @ k[:, [h // group for h in heads]].transpose(2, 3)
    # All heads: those that share keys are folded into the row axis, so that keys are not copied per query head.
    batch, n_heads, rows, width = q.shape
    folded = q.reshape(batch, n_heads // group, group * rows, width) @ k.transpose(2, 3)
    return folded.view(batch, n_heads, rows, -1)


def _allowed_by_position(rows: Tensor, n_keys: int, is_causal: bool, offset: int, window: int | None) -> Tensor | None:
    if not is_causal and window is None:
        return None
    distance = (rows + offset)[:, None, :, None] - torch.arange(n_keys, device=rows.device)
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if is_causal:
        allowed &= distance >= 0
    if window is not None:
        allowed &= distance.abs() < window
    return allowed


def _sink_column(sinks: Tensor, heads: list[int] | None, rows: Tensor, scores: Tensor) -> Tensor:
    if sinks.ndim == 1:
        sinks = (sinks if heads is None else sinks[heads])[None, :, None, None]
    else:
        sinks = _take(sinks, heads, rows)
    return sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is not None:
        return torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    # Filled before the softmax too: its NaN would survive in gradients.
    nothing_to_attend_to = scores.amax(dim=-1, keepdim=True) == -torch.inf
    return scores.masked_fill(nothing_to_attend_to, 0.0).softmax(dim=-1).masked_fill(nothing_to_attend_to, 0.0)

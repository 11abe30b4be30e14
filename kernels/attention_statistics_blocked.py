"""`attention_statistics` for the CPU: blocks of queries against all keys that they may see, each block in the cache.

The keys of a block need no online softmax: they are all there. What costs is passes over the tile of scores, so

    exp(s) [v | 1 | position]      gives z, the sum and the mean distance in one product,
    a view along the diagonal      gives self, previous and windows without touching the rest of the tile,
    exp(s) M_i (per query i)       gives the rules, M_i being the same for all heads.

Blocks above the diagonal, outside a sliding window, or behind the last key of a bool mask are never computed.
A tile holds batch x head x block x key numbers; a block shrinks as keys get more, so that memory is linear in length.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

# Bytes of one tile of scores, and rows of a block. Measured with SmolLM2's shapes, benchmarks/head_statistics.py.
TILE_BYTES = 2**20
LEAST_ROWS, MOST_ROWS = 32, 128
_FLOOR = {torch.float32: -200.0, torch.float64: -800.0}  # exp of it is zero, and zero times it is zero


def attention_statistics_blocked(
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
    """The fields of `AttentionStatistics` by name."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, heads, queries, width = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    k_wide = k.to(dtype).transpose(2, 3)
    value_width = 0 if v is None else v.shape[3]
    # v, a column of ones, and the position of the key, which is filled in for each block
    columns = q.new_ones((batch, kv_heads, keys, value_width + 2), dtype=dtype)
    if v is not None:
        columns[..., :value_width] = v
    numbers = torch.arange(keys, device=q.device)

    found: dict[str, Tensor | None] = {
        name: q.new_zeros((batch, heads, queries), dtype=dtype)
        for name in ("entropy", "largest", "total", "on_self", "on_previous", "on_first", "mean_distance")
    }
    found["log_sum_exp"] = q.new_full((batch, heads, queries), -torch.inf, dtype=dtype)
    if sinks is not None:
        found["log_sum_exp"][:] = sinks[..., 0]
    found["within"] = q.new_zeros((len(windows), batch, heads, queries), dtype=dtype)
    found["on_rules"] = q.new_zeros((len(rules), batch, heads, queries), dtype=dtype)
    found["on_marked"] = q.new_zeros((batch, heads, queries, marked.shape[-1]), dtype=dtype)
    found["z"] = None if v is None else q.new_zeros((batch, heads, queries, value_width), dtype=dtype)

    for texts, rows, low, high in _blocks(batch, heads, queries, keys, is_causal, offset, sliding_window):
        own_mask = None if mask is None else _part(mask, texts, rows)[..., low:high]
        if own_mask is not None and own_mask.dtype == torch.bool:
            seen = own_mask.any(0).any(0).any(0).nonzero()
            if not len(seen):
                continue
            first, stop = int(seen[0]), int(seen[-1]) + 1
            low, high, own_mask = low + first, low + stop, own_mask[..., first:stop]
        n_texts, n_rows, n_keys = texts.stop - texts.start, rows.stop - rows.start, high - low
        own = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + offset
        distance = own - numbers[low:high]

        tile = (q[texts, :, rows].to(dtype) * scaling).reshape(n_texts, kv_heads, -1, width)
        tile = tile @ k_wide[texts, ..., low:high]
        s = tile.view(n_texts, heads, n_rows, n_keys)
        if softcap is not None:
            s.div_(softcap).tanh_().mul_(softcap)
        if position_bias is not None:
            s.add_(_part(position_bias, texts, rows)[..., low:high])
        if alibi_slopes is not None:
            s.sub_(alibi_slopes.to(dtype)[:, None, None] * distance.abs())
        edges = _mask_edges(s, distance, is_causal, sliding_window)
        if own_mask is not None:
            _ = s.masked_fill_(~own_mask, -torch.inf) if own_mask.dtype == torch.bool else s.add_(own_mask)

        peak = s.amax(-1)
        largest = peak
        if sinks is not None:
            sink = _part(sinks, texts, rows)[..., 0].to(dtype)
            peak = torch.maximum(peak, sink)
        peak = peak.masked_fill(peak == -torch.inf, 0.0)
        s.sub_(peak[..., None])
        for part in (slice(None),) if own_mask is not None else edges:
            s[..., part].clamp_(min=_FLOOR[dtype])
        e = s.exp()
        # two-sided only if a key after its query has weight
        is_backward = is_causal or (
            own_mask is not None and own_mask.dtype == torch.bool and not bool((own_mask & (distance < 0)).any())
        )

        columns[texts, :, low:high, -1] = numbers[low:high].to(dtype) - (rows.start + offset)
        products = (e.view(tile.shape) @ columns[texts, :, low:high]).view(n_texts, heads, n_rows, -1)
        total = products[..., -2]
        norm = total if sinks is None else total + (sink - peak).exp()
        norm = norm.masked_fill(norm == 0, 1.0)

        here = (texts, slice(None), rows)
        put = partial(_put, found, norm, here)

        is_empty = largest == -torch.inf
        log_norm = norm.log()
        put("total", total)
        put("largest", (largest - peak).exp())
        found["log_sum_exp"][here] = (peak + log_norm).masked_fill(
            is_empty if sinks is None else torch.zeros_like(is_empty), -torch.inf
        )
        if v is not None:
            found["z"][here] = products[..., :-2] / norm[..., None]
        per_query = []
        if is_backward:
            back = (own - (rows.start + offset))[:, 0].to(dtype)
            put("mean_distance", back * total - products[..., -1])
        else:
            per_query.append(distance.abs().to(dtype).expand(n_texts, -1, -1))
        for of_query, of_key, exclude_self, only_before in rules:
            class_of = of_query[texts, rows, None]
            chosen = (class_of == of_key[texts, None, low:high]) & (class_of >= 0)
            if only_before and not is_backward:
                chosen &= distance >= 0
            if exclude_self:
                chosen &= distance != 0
            per_query.append(chosen.to(dtype))
        if per_query:
            sums = _per_query(e, torch.stack(per_query, 2))
            if not is_backward:
                put("mean_distance", sums[0])
            for number, weight in enumerate(sums[len(sums) - len(rules) :]):
                put("on_rules", weight, number)

        reach = max((*windows, 2)) - 1
        band, back = _band(e, rows.start + offset - low, reach, 0 if is_backward else reach)
        put("on_self", band[..., back])
        put("on_previous", band[..., back - 1])
        for number, window in enumerate(windows):
            near = band[..., back - window + 1 : back + (1 if is_backward else window)]
            put("within", near.sum(-1), number)
        put("on_first", _at(e, (first_key[texts] - low)[:, None, None].expand(-1, n_rows, 1))[..., 0])
        if marked.shape[-1]:
            found["on_marked"][here] = _at(e, marked[texts, rows] - low) / norm[..., None]
        # last: it writes over the scores
        put("entropy", total * log_norm - s.mul_(e).sum(-1))
    return found


def _put(found: dict, norm: Tensor, here: tuple, name: str, value: Tensor, number: int | None = None) -> None:
    found[name][here if number is None else (number, *here)] = value / norm


def _blocks(
    batch: int, heads: int, queries: int, keys: int, is_causal: bool, offset: int, window: int | None
) -> Iterator[tuple[slice, slice, int, int]]:
    """Texts, queries and the range of keys of each block; blocks without keys are left out."""
    start = 0
    while start < queries:
        seen = min(keys, start + offset + MOST_ROWS) if is_causal else keys
        seen = max(1, seen if window is None else min(seen, 2 * window + MOST_ROWS))
        fits = TILE_BYTES // (4 * heads * seen)
        rows = slice(start, min(queries, start + max(LEAST_ROWS, min(MOST_ROWS, fits))))
        low, high = 0, keys
        if is_causal:
            high = min(keys, rows.stop + offset)
        if window is not None:
            low, high = max(0, rows.start + offset - window + 1), min(high, rows.stop - 1 + offset + window)
        if low < high:
            step = max(1, TILE_BYTES // (4 * heads * (rows.stop - rows.start) * (high - low)))
            for first in range(0, batch, step):
                yield slice(first, min(batch, first + step)), rows, low, high
        start = rows.stop


def _part(tensor: Tensor, texts: slice, rows: slice) -> Tensor:
    """Of a `[batch or 1, head or 1, query or 1, ...]` tensor."""
    tensor = tensor if tensor.shape[0] == 1 else tensor[texts]
    return tensor if tensor.shape[2] == 1 else tensor[:, :, rows]


def _mask_edges(s: Tensor, distance: Tensor, is_causal: bool, window: int | None) -> list[slice]:
    """Mask what position forbids, which lies at the two ends of a block's keys; returns the parts that were touched."""
    parts: list[slice] = []
    # distances fall along a row and grow down a column: the first row has the most forbidden ahead, the last behind
    if is_causal or window is not None:
        least = 0 if is_causal else 1 - window
        count = int((distance[0] < least).sum())
        if count:
            parts.append(slice(s.shape[-1] - count, s.shape[-1]))
            s[..., parts[-1]].masked_fill_(distance[:, parts[-1]] < least, -torch.inf)
    if window is not None and (count := int((distance[-1] >= window).sum())):
        parts.append(slice(0, count))
        s[..., parts[-1]].masked_fill_(distance[:, parts[-1]] >= window, -torch.inf)
    return parts


def _per_query(e: Tensor, chosen: Tensor) -> Tensor:
    """sum over keys of e[text, head, query, key] chosen[text, query, which, key], as [which, text, head, query]."""
    sums = [own.transpose(0, 1) @ which.transpose(1, 2) for own, which in zip(e, chosen, strict=True)]
    return torch.stack(sums).permute(3, 0, 2, 1)


def _band(e: Tensor, own: int, back: int, ahead: int) -> tuple[Tensor, int]:
    """Weights by distance: [..., query, back + 1 + ahead], column `back - d` at distance d; and `back`.

    own: the column of the first query's own key. Zero where there is no such key.
    """
    rows, keys = e.shape[-2:]
    low, high = own - back, own + rows + ahead
    near = e[..., max(low, 0) : max(min(high, keys), 0)]
    if low < 0 or high > keys:
        # a key range may lie outside altogether
        missing = max(0, min(-low, high - low - near.shape[-1]))
        near = torch.nn.functional.pad(near, (missing, high - low - near.shape[-1] - missing))
    strides = near.stride()
    view = near.as_strided(
        (*near.shape[:-1], back + 1 + ahead), (*strides[:-2], strides[-2] + 1, 1), near.storage_offset()
    )
    return view, back


def _at(e: Tensor, numbers: Tensor) -> Tensor:
    """Weights [text, head, query, which] at key numbers [text, query, which]; zero outside."""
    keys = e.shape[-1]
    is_key = (numbers >= 0) & (numbers < keys)
    index = numbers.clamp(0, keys - 1)[:, None].expand(-1, e.shape[1], -1, -1)
    return e.gather(-1, index) * is_key[:, None]

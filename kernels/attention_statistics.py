"""Attention output and what each row of the pattern looks like, without the pattern in memory.

    s[i, j] = cap(scaling q_i . k_j) + bias[i, j] + mask,    p[i, j] = exp(s[i, j] - lse[i]),    z_i = sum_j p[i, j] v_j

    lse = log(sum_j exp(s) + exp(sink)),   entropy = -sum_j p log p (nats, over keys),   largest = max_j p,
    mean_distance = sum_j p |i + offset - j|,   within[w] = sum of p over |i + offset - j| < w,
    weight on self (distance 0), on the previous token (distance 1), on the first key, marked keys, keys of a rule.

Softmax in one pass after Dao et al. 2022 (arXiv:2205.14135), here over blocks of queries. A sink (gpt-oss,
arXiv:2508.10925, section 2.3) takes probability and gives no value: `total`, the sum of a row, is then below one, and
nothing is divided by it. Float32 inside, float64 for float64 input. Memory grows linearly with the length.

Beware: distances are differences of key numbers, so real tokens must be neighbours (padding at one end only). A row
that may attend to nothing under a bool mask has lse -inf and zeros elsewhere, as in `attention_rows`; under an additive
mask of large finite numbers it is uniform. NaN in a row's q, or in a key it may see, makes its statistics NaN.

This file is the contract and the one place of dispatch: `attention_statistics_reference.py` is the definition, dense;
`attention_statistics_blocked.py` the form for the CPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from microtome.kernels.attention_statistics_blocked import attention_statistics_blocked
from microtome.kernels.attention_statistics_reference import attention_statistics_reference

# largest |difference| to the float64 definition of weights in [0, 1], by dtype of q and k; entropies, lse and distances
# are compared relative to their size
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-5, torch.float16: 2e-5}
Form = Literal["auto", "reference", "blocked"]


@dataclass(frozen=True, eq=False)
class KeyRule:
    """Keys that count for a query: those of the same class. Duplicates: both are token ids, `exclude_self`.

    Induction: query_class is the token, key_class the token before the key. Attributes:
        query_class, key_class: whole numbers; a negative one has no class and matches nothing.
        exclude_self: leave out the key at distance 0.
        only_before: leave out keys after the query.
    """

    query_class: Int[Tensor, "batch query"]
    key_class: Int[Tensor, "batch key"]
    exclude_self: bool = True
    only_before: bool = True


@dataclass(frozen=True, eq=False)
class AttentionStatistics:
    """By head and query, in float32 (float64 for float64 input).

    Attributes:
        z: None where it was not asked for.
        total: sum of the row: one; less with a sink; zero where there is nothing to attend to.
        within: by window, in the order given.
        on_rules: by rule, in the order given.
        on_marked: by marked key; zero for an id outside the keys.
    """

    log_sum_exp: Float[Tensor, "batch head query"]
    entropy: Float[Tensor, "batch head query"]
    largest: Float[Tensor, "batch head query"]
    total: Float[Tensor, "batch head query"]
    on_self: Float[Tensor, "batch head query"]
    on_previous: Float[Tensor, "batch head query"]
    on_first: Float[Tensor, "batch head query"]
    mean_distance: Float[Tensor, "batch head query"]
    within: Float[Tensor, "window batch head query"]
    on_rules: Float[Tensor, "rule batch head query"]
    on_marked: Float[Tensor, "batch head query marked"]
    z: Float[Tensor, "batch head query d_value"] | None = None


@torch.no_grad()
def attention_statistics(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    v: Float[Tensor, "batch kv_head key d_value"] | None,
    mask: Shaped[Tensor, "..."] | None,
    *,
    scaling: float,
    with_z: bool = True,
    is_causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, "..."] | None = None,
    position_bias: Float[Tensor, "..."] | None = None,
    alibi_slopes: Float[Tensor, " head"] | None = None,
    first_key: Int[Tensor, " batch"] | None = None,
    windows: Sequence[int] = (),
    rules: Sequence[KeyRule] = (),
    marked: Int[Tensor, "batch query marked"] | None = None,
    form: str = "auto",
) -> AttentionStatistics:
    """Statistics of every row, and z, in one pass; no gradient.

    Args:
        q: queries as attention uses them (after rotation).
        k, v: of the key-value heads; query head h reads h // (heads / kv_heads). v may be None without z.
        mask: None, `[batch or 1, head or 1, query or 1, key]` (bool, True attends; or a number to add), or
            `[batch, key]` bool (True is a real token).
        scaling: factor on the dot product.
        with_z: return z too.
        is_causal, causal_offset: query i sees keys up to i + causal_offset, which is also where "self" is.
        sliding_window: with w, only keys at a distance below w.
        softcap: bound on the scores, before bias and mask.
        sinks: `[head]`, or `[batch, head, query, 1]`: logit of each head's sink.
        position_bias: `[batch or 1, head or 1, query or 1, key]`, added to the scores.
        alibi_slopes: -slope x distance is added to the scores (Press et al. 2022, arXiv:2108.12409).
        first_key: number of each text's first real key (left padding); 0 if None.
        windows: widths w of `within`.
        rules: classes of keys whose weight is summed.
        marked: numbers of keys for each query; a negative one marks none.
        form: "auto" takes the blocked form.

    Raises:
        ValueError: heads are no multiple of key-value heads, a shape or window does not fit, z without v, or an
            unknown form.
    """
    batch, heads, queries, _ = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key-value heads: not a multiple.")
    if with_z and v is None:
        raise ValueError("z needs values. Give v, or with_z=False.")
    if bad := [w for w in windows if w < 1]:
        raise ValueError(f"windows has {bad[0]}; a window holds at least the query itself, 1.")
    if mask is not None and mask.ndim == 2:
        mask = mask[:, None, None].bool()
    _require_shape("The mask", mask, (batch, heads, queries, keys))
    _require_shape("position_bias", position_bias, (batch, heads, queries, keys))
    if sinks is not None:
        sinks = sinks[None, :, None, None] if sinks.ndim == 1 else sinks
        _require_shape("sinks", sinks, (batch, heads, queries, 1))
    settings: Mapping[str, Any] = {
        "scaling": scaling,
        "is_causal": is_causal,
        "offset": causal_offset,
        "sliding_window": sliding_window,
        "softcap": softcap,
        "sinks": sinks,
        "position_bias": position_bias,
        "alibi_slopes": alibi_slopes,
        "first_key": q.new_zeros(batch, dtype=torch.long) if first_key is None else first_key.long(),
        "windows": tuple(windows),
        "rules": tuple((r.query_class, r.key_class, r.exclude_self, r.only_before) for r in rules),
        "marked": q.new_zeros((batch, queries, 0), dtype=torch.long) if marked is None else marked.long(),
    }
    if form not in ("auto", "reference", "blocked"):
        raise ValueError(f"form={form!r}: expected auto, reference or blocked.")
    compute = attention_statistics_reference if form == "reference" else attention_statistics_blocked
    return AttentionStatistics(**compute(q, k, v if with_z else None, mask, **settings))


def _require_shape(name: str, given: Tensor | None, wanted: tuple[int, int, int, int]) -> None:
    """Raise ValueError unless every axis is as wanted or 1 (the last axis: as wanted)."""
    if given is None:
        return
    fits = given.ndim == 4 and given.shape[-1] == wanted[-1]
    if not fits or any(size not in (1, want) for size, want in zip(given.shape, wanted, strict=True)):
        raise ValueError(
            f"{name} has shape {tuple(given.shape)}; expected {wanted}, where batch, head and query may be 1"
            f"{', or [batch, key] for a mask' if name == 'The mask' else ''}."
        )

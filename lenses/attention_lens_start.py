"""Where an attention lens starts from: the plain unembedding of each head, and the closed-form lens.

    W_U' = C diag(g) W_U factor,  b_U' = factor (b_U + b_n W_U):  the final norm's gain folded in, without its scale;
    C centres the stream where the norm is a LayerNorm, else the identity
    plain:        M_h = W_O^h W_U',   b = H b_U' + b_O W_U'     (Sakarvadia et al. 2023 start from every W_h = W_U and
                  b_h = b_U of a GPT-2 whose norms are folded by TransformerLens, which is this)
    closed form:  A = ridge(v_cat -> n(r_L)),  M_h = factor A_h W_U,  b = factor (c W_U + b_U)

The closed form is the least-squares lens onto the logits' own state, its strength chosen on validation moments: a fit
of width d_model, none of the size of the vocabulary. No norm is applied to a head's output, so the plain start is off
by the unknown scale 1 / rms(r_L).
Beware: with norms behind the branch (Gemma 2) a head's output here is what it writes BEFORE that norm, o_h = v_h W_O^h.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from microtome.lenses.frozen_norm import frozen_norm
from microtome.lenses.linear_map import LinearMap
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.ridge_map import ridge_map
from microtome.lenses.unembedding import Unembedding


@dataclass(frozen=True, eq=False)
class FoldedUnembedding:
    """W_U' and b_U' (module docstring), for row vectors."""

    weight: Float[Tensor, "d_model vocab"]
    bias: Float[Tensor, " vocab"]


@torch.no_grad()
def folded_unembedding(end: Unembedding) -> FoldedUnembedding:
    """The unembedding with the final norm's gain, centring and bias folded in; a copy, float32 or wider.

    Raises:
        ValueError: a final norm that is neither an RMS norm nor a LayerNorm (`frozen_norm`).
    """
    wide = torch.promote_types(end.weight.dtype, torch.float32)
    weight = end.weight.to(wide).T
    bias = torch.zeros(end.vocab, dtype=wide) if end.bias is None else end.bias.to(wide)
    if end.norm is None:
        return FoldedUnembedding(end.factor * weight, end.factor * bias)
    found = frozen_norm(end.norm, weight.shape[0])
    gain, shift = found.gain.to(weight), found.shift.to(weight)
    folded = gain[:, None] * weight
    if found.is_centred:
        folded = folded - folded.mean(0)
    return FoldedUnembedding(end.factor * folded, end.factor * (bias + shift @ weight))


def plain_weight(
    writes: Float[Tensor, "head d_head d_model"], folded: FoldedUnembedding
) -> Float[Tensor, "head d_head vocab"]:
    """M0_h = W_O^h W_U': each head's own logit lens."""
    flat = writes.flatten(0, 1) @ folded.weight.to(writes.dtype)
    return flat.unflatten(0, writes.shape[:2])


def plain_bias(heads: int, bias: Float[Tensor, " d_model"], folded: FoldedUnembedding) -> Float[Tensor, " vocab"]:
    """H b_U' + b_O W_U': the sum of the authors' start, and what the attention's own bias writes."""
    return heads * folded.bias.to(bias.dtype) + bias @ folded.weight.to(bias.dtype)


def closed_form_map(
    fit: PairMoments, validation: PairMoments, strengths: Sequence[int | float] | None = None
) -> LinearMap:
    """A = ridge(v_cat -> n(r_L)), the strength of least validation error kept; moments alone (`ridge_map`).

    facts: those of the map, and `validation_rows`, `validation_r2`, `edge` ("" or the end of the path it came from).

    Raises:
        ValueError: what `ridge_map` raises.
    """
    found = ridge_map(fit, validation, strengths=strengths)
    path = found.path
    facts = {
        "validation_rows": validation.count,
        "validation_r2": float(path.validation_r2[path.chosen]),
        "edge": path.edge,
    }
    return replace(found.map, facts={**found.map.facts, **facts})


def closed_form_readout(
    mapped: LinearMap, end: Unembedding, heads: int
) -> tuple[Float[Tensor, "head d_head vocab"], Float[Tensor, " vocab"]]:
    """M and b of the closed-form lens: the map, whose output is a normed state, followed by the unembedding."""
    wide = torch.promote_types(end.weight.dtype, torch.float32)
    weight = end.weight.to(wide)
    bias = torch.zeros(end.vocab, dtype=wide) if end.bias is None else end.bias.to(wide)
    flat = end.factor * (mapped.weight.to(wide) @ weight.T)
    return flat.unflatten(0, (heads, -1)), end.factor * (weight @ mapped.intercept.to(wide) + bias)


@torch.no_grad()
def peer_r2(fit: PairMoments, validation: PairMoments, test: PairMoments, heads: int) -> Float64[Tensor, " head"]:
    """R2 (variance weighted) of each head's mixed value predicted by ridge from all other heads, on test rows.

    Near 1 the head's words could as well be its peers': a joint lens can move what they share between their blocks of M
    at no loss. That few peers predict many heads is the claim of arXiv:2603.13314 (abstract only). Below 0 there were
    too few rows to tell.

    Args:
        fit, validation, test: moments of v_cat with itself (`PairMoments.from_rows(v, v)`); the strength of the ridge
            is chosen on the validation rows.
    """
    width = fit.d_in // heads
    if heads == 1:
        return torch.zeros(1, dtype=torch.float64)
    found = []
    for head in range(heads):
        own = torch.zeros(fit.d_in, dtype=torch.bool)
        own[head * width : (head + 1) * width] = True
        parts = [_between(moments, ~own, own) for moments in (fit, validation, test)]
        mapped = closed_form_map(*parts[:2])
        moved = parts[2].about(parts[0].mean_x, parts[0].mean_y)
        total = moved.yy.trace()
        error = total - 2 * (mapped.weight * moved.xy).sum() + (mapped.weight * (moved.xx @ mapped.weight)).sum()
        found.append(1 - error / total if total > 0 else total)
    return torch.stack(found)


def _between(moments: PairMoments, source: Tensor, target: Tensor) -> PairMoments:
    xx, mean = moments.xx, moments.mean_x
    return PairMoments(
        moments.count, mean[source], mean[target], xx[source][:, source], xx[source][:, target], xx[target][:, target]
    )

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
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from microtome.capture.anatomy import Anatomy
from microtome.capture.dissect import dissect
from microtome.capture.models import LoadedModel
from microtome.capture.output_weights import output_weights
from microtome.lenses.linear_map import LinearMap
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.unembedding import Unembedding

RIDGE_STRENGTHS = tuple(10.0**power for power in torch.linspace(-9, 1, 25).tolist())


@dataclass(frozen=True, eq=False)
class FoldedUnembedding:
    """W_U' and b_U' (module docstring), for row vectors."""

    weight: Float[Tensor, "d_model vocab"]
    bias: Float[Tensor, " vocab"]


@torch.no_grad()
def folded_unembedding(end: Unembedding) -> FoldedUnembedding:
    """The unembedding with the final norm's gain, centring and bias folded in; a copy, float32 or wider.

    The gain is read off the norm's own output on scaled unit vectors, so it is right whatever the module calls it.

    Raises:
        ValueError: a final norm that is neither an RMS norm nor a LayerNorm with gains per channel.
    """
    wide = torch.promote_types(end.weight.dtype, torch.float32)
    weight = end.weight.to(wide).T
    bias = torch.zeros(end.vocab, dtype=wide) if end.bias is None else end.bias.to(wide)
    if end.norm is None:
        return FoldedUnembedding(end.factor * weight, end.factor * bias)
    d_model = weight.shape[0]
    eye = torch.eye(d_model, dtype=end.weight.dtype, device=end.weight.device)
    shift = end.normed(torch.zeros_like(eye[:1])).to(wide)[0]
    # long vectors, so that the norm's epsilon does not count
    images = end.normed(1e3 * eye).to(wide) - shift
    centred = torch.eye(d_model, dtype=wide) - 1 / d_model
    reach = images.abs().max()
    for mixing, scale in ((torch.eye(d_model, dtype=wide), d_model**0.5), (centred, d_model / (d_model - 1) ** 0.5)):
        gain = images.diagonal() / (mixing.diagonal() * scale)
        if (images - mixing * gain * scale).abs().max() <= 1e-3 * reach:
            return FoldedUnembedding(end.factor * (mixing * gain) @ weight, end.factor * (bias + shift @ weight))
    raise ValueError(
        f"the final norm {type(end.norm).__name__} is no RMS norm or LayerNorm with a gain per channel, so it "
        "cannot be folded into the unembedding. Start from the closed form."
    )


@torch.no_grad()
def head_writes(
    model: LoadedModel | nn.Module, layer: int, anatomy: Anatomy | None = None
) -> tuple[Float[Tensor, "head d_head d_model"], Float[Tensor, " d_model"]]:
    """W_O of every head of a layer, and b_O (zeros where there is none), float32 or wider.

    Raises:
        KeyError, IndexError: a layer whose heads' writes this model does not offer.
    """
    module = model.module if isinstance(model, LoadedModel) else model
    anatomy = dissect(module) if anatomy is None else anatomy
    (weight,) = output_weights(module, layers=layer, anatomy=anatomy).values()
    site = anatomy.expand([("head_out", layer)])[0]
    projection = module.get_submodule(anatomy.tap(site).point.module)
    width = getattr(projection, "in_features", weight.shape[0] * weight.shape[1])
    bias = projection.forward(torch.zeros(1, 1, width, dtype=weight.dtype, device=weight.device))[0, 0]
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(wide), bias.to(wide)


def plain_weight(
    writes: Float[Tensor, "head d_head d_model"], folded: FoldedUnembedding
) -> Float[Tensor, "head d_head vocab"]:
    """M0_h = W_O^h W_U': each head's own logit lens."""
    flat = writes.flatten(0, 1) @ folded.weight.to(writes.dtype)
    return flat.unflatten(0, writes.shape[:2])


def plain_bias(heads: int, bias: Float[Tensor, " d_model"], folded: FoldedUnembedding) -> Float[Tensor, " vocab"]:
    """H b_U' + b_O W_U': the sum of the authors' start, and what the attention's own bias writes."""
    return heads * folded.bias.to(bias.dtype) + bias @ folded.weight.to(bias.dtype)


@torch.no_grad()
def closed_form_map(
    fit: PairMoments, validation: PairMoments, strengths: Sequence[float] = RIDGE_STRENGTHS
) -> LinearMap:
    """A = ridge(v_cat -> n(r_L)) with the strength of least validation error; moments alone, float64.

    Strength rho is a penalty rho tr(xx) / d_in on the sums of squares; the intercept is free. facts: validation R2
    (`validation_r2`), whether the strength is at an edge of the path (`at_edge`), rows.

    Raises:
        ValueError: no rows, strengths that are not above 0, or validation moments of other widths.
    """
    if fit.count < 2 or validation.count < 1:
        raise ValueError(f"{fit.count} rows to fit and {validation.count} to validate; give at least 2 and 1.")
    if not strengths or min(strengths) <= 0:
        raise ValueError(f"strengths={list(strengths)}; give values above 0.")
    values, vectors = torch.linalg.eigh(fit.xx)
    values = values.clamp(min=0)
    moved = validation.about(fit.mean_x, fit.mean_y)
    loadings, other = vectors.T @ fit.xy, vectors.T @ moved.xy
    crossed, gram = (loadings * other).sum(1), (loadings @ loadings.T) * (vectors.T @ moved.xx @ vectors)
    total = float(moved.yy.trace())
    unit = float(fit.xx.trace()) / fit.d_in or 1.0
    errors = []
    for strength in strengths:
        inverse = 1 / (values + strength * unit)
        errors.append(total - 2 * float(crossed @ inverse) + float(inverse @ gram @ inverse))
    best = min(range(len(errors)), key=errors.__getitem__)
    weight = vectors @ (loadings / (values + strengths[best] * unit)[:, None])
    return LinearMap(
        weight,
        fit.mean_y - fit.mean_x @ weight,
        "ridge",
        strength=float(strengths[best]),
        facts={
            "rows": fit.count,
            "validation_rows": validation.count,
            "validation_r2": 1 - errors[best] / total if total else 0.0,
            "at_edge": best in (0, len(errors) - 1),
        },
    )


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

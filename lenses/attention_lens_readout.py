"""The two forms in which an attention lens is learned, as one product: what is read, and the parameters that read it.

    small form:     reads v_h,  weights M  [heads x d_head, vocab]          (joint, residual: one group of all heads)
    original form:  reads o_h,  weights W  [heads x d_model, vocab], b_h    (the same group, d_model / d_head as wide)
    independent:    one group per head, of v_h or o_h
    shared:         reads the sum of o_h, one W [d_model, vocab] for all heads

so that a form is a choice of input and both train by the same code. `as_lens` brings either to the small form, exactly.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from microtome.lenses.attention_lens import AttentionLens, Mode
from microtome.lenses.attention_lens_rows import LensRows
from microtome.lenses.attention_lens_start import (
    FoldedUnembedding,
    closed_form_map,
    closed_form_readout,
    plain_bias,
    plain_weight,
)
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.unembedding import Unembedding

Form: TypeAlias = str  # one of FORMS; told by a message of ours, so no Literal
Start: TypeAlias = str  # one of STARTS
FORMS, STARTS = ("small", "original"), ("unembedding", "closed_form", "zero")


@dataclass(frozen=True, eq=False)
class Readout:
    """Parameters in the form in which they are learned; shares of a bias are summed."""

    mode: Mode
    form: Form
    weight: Float[Tensor, "group width vocab"]
    bias: Float[Tensor, "group share vocab"]

    @property
    def parameters(self) -> int:
        """Numbers to learn."""
        return self.weight.numel() + self.bias.numel()


def readout_shape(
    mode: Mode, form: Form, heads: int, d_head: int, d_model: int, vocab: int
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Shapes of weight and bias, so that their bytes can be said before they are made."""
    width = d_head if form == "small" else d_model
    if mode == "independent":
        return (heads, width, vocab), (heads, 1, vocab)
    if mode == "shared":
        return (1, d_model, vocab), (1, 1, vocab)
    return (1, heads * width, vocab), (1, heads if form == "original" else 1, vocab)


def readout_input(
    mixed: Float[Tensor, "token head d_head"], writes: Float[Tensor, "head d_head d_model"], mode: Mode, form: Form
) -> Float[Tensor, "group token width"]:
    """What each group reads at each row."""
    if mode == "shared":
        return (mixed.flatten(1) @ writes.flatten(0, 1))[None]
    values = mixed if form == "small" else torch.einsum("the,hed->thd", mixed, writes)
    return values.transpose(0, 1).contiguous() if mode == "independent" else values.flatten(1)[None]


def as_lens(
    readout: Readout,
    writes: Float[Tensor, "head d_head d_model"],
    *,
    layer: int,
    mean: Float[Tensor, "head d_head"],
    peer_r2: Float[Tensor, " head"],
    log_mean_p: Float[Tensor, " vocab"] | None = None,
    facts: dict[str, Any] | None = None,
) -> AttentionLens:
    """The lens in the small form: M_h = W_O^h W_h, b = sum of b_h."""
    heads, d_head = writes.shape[:2]
    weight, bias = readout.weight, readout.bias.sum(1)
    if readout.mode == "shared":
        weight = writes @ weight[0]
    elif readout.form == "original":
        whole = weight if readout.mode == "independent" else weight[0].unflatten(0, (heads, -1))
        weight = writes @ whole
    elif readout.mode != "independent":
        weight = weight[0].unflatten(0, (heads, d_head))
    return AttentionLens(layer, readout.mode, weight, bias, mean, peer_r2, log_mean_p, facts or {})


@torch.no_grad()
def starting_readout(
    shards: dict[str, LensRows],
    mode: Mode,
    form: Form,
    start: Start,
    *,
    writes: Float[Tensor, "head d_head d_model"],
    attention_bias: Float[Tensor, " d_model"],
    end: Unembedding,
    folded: FoldedUnembedding | None,
) -> tuple[Readout, dict[str, Any]]:
    """Parameters before the first step, and the facts of the closed form where it is the start.

    Args:
        shards: "fit" and "validation" rows, which the closed form uses.
        folded: needed for the start "unembedding"; its bias is that of the residual lens in the residual mode, so
            that only what attention's own bias writes is left.
    """
    heads, d_head, d_model = writes.shape
    shapes = readout_shape(mode, form, heads, d_head, d_model, end.vocab)
    dtype = shards["fit"].mixed.dtype
    if start == "zero":
        return Readout(mode, form, torch.zeros(shapes[0], dtype=dtype), torch.zeros(shapes[1], dtype=dtype)), {}
    if start == "unembedding":
        plain = folded.weight.to(dtype)
        own = attention_bias.to(dtype) @ plain
        bias = torch.zeros(shapes[1], dtype=dtype)
        if mode == "residual":
            bias[0, 0] = own
        elif mode == "independent":
            bias[:] = folded.bias.to(dtype)
        elif form == "original" and mode == "joint":
            bias[0, :] = folded.bias.to(dtype)
            bias[0, 0] += own
        else:
            bias[0, 0] = plain_bias(heads, attention_bias.to(dtype), folded)
        if mode == "shared":
            weight = plain[None].clone()
        elif form == "original":
            weight = plain.expand(heads, -1, -1).reshape(shapes[0]).contiguous()
        else:
            weight = plain_weight(writes.to(dtype), folded).reshape(shapes[0]).contiguous()
        return Readout(mode, form, weight, bias), {}
    return _closed_form(shards, mode, form, writes, end, shapes)


def _closed_form(
    shards: dict[str, LensRows], mode: Mode, form: Form, writes: Tensor, end: Unembedding, shapes: tuple
) -> tuple[Readout, dict[str, Any]]:
    """Ridge of each group's input (always of the mixed values but for "shared") onto the final state."""
    heads, dtype = len(writes), shards["fit"].mixed.dtype
    read = {name: readout_input(shards[name].mixed, writes, mode, "small") for name in ("fit", "validation")}
    goal = {n: s.normed - s.stream if mode == "residual" else s.normed for n, s in shards.items() if n in read}
    weight, bias, facts = torch.empty(shapes[0], dtype=dtype), torch.zeros(shapes[1], dtype=dtype), []
    # in the residual mode the residual lens has said b_U already
    own = Unembedding(None, end.weight, None if mode == "residual" else end.bias, end.factor)
    for group in range(len(weight)):
        fit, validation = (PairMoments.from_rows(read[name][group], goal[name]) for name in ("fit", "validation"))
        mapped = closed_form_map(fit, validation)
        blocks = heads if mode in ("joint", "residual") else 1
        small, constant = closed_form_readout(mapped, own, blocks)
        if form == "original" and mode != "shared":
            # the smallest W_h of all that make this M_h
            some = writes if mode != "independent" else writes[group : group + 1]
            small = torch.linalg.pinv(some.to(small.dtype)) @ small
        weight[group] = small.reshape(shapes[0][1:]).to(dtype)
        bias[group, 0] = constant.to(dtype)
        facts.append({"strength": mapped.strength, **mapped.facts})
    return Readout(mode, form, weight, bias), {"closed_form": facts}

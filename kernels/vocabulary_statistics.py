"""What the distributions behind hidden states say, without a tensor of tokens x vocabulary.

For lens states h_d (several depths d) and the final state h, both after the final norm, with

    z = cap tanh(factor (h W + b) / cap),     p = softmax(z) of the final state,     q_d = softmax(z_d) of a lens state,

    kl[d] = KL(p || q_d),   kl_reverse[d] = KL(q_d || p),   entropy[d] = H(q_d),   cross_entropy[d] = -log q_d(target),

ranks, top tokens and agreement of the largest. All in nats. Logits and sums are float32, also where states or weight
are of half precision or an autocast is on, and float64 where one of them is; normalisers are gathered over blocks of
the vocabulary (Milakov & Gimelshein 2018, arXiv:1805.02867). Ties: the lower token id comes first, in `top_ids`,
`target_rank` and `agrees` alike. A state with NaN gives NaN, ids and ranks of -1, and agrees with nothing.

This file is the contract and the one place of dispatch: `vocabulary_statistics_reference.py` is the definition, dense;
`vocabulary_statistics_blocked.py` and `vocabulary_kl_blocked.py` are the form for the CPU, which any device can run.
Their tiles of `rows` x `block` logits are the memory they need: the defaults are the fastest of those tried on two
cores with 1 MB of L2 each.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from microtome.kernels.vocabulary_kl_blocked import LearnedLoss, LensLoss
from microtome.kernels.vocabulary_statistics_blocked import vocabulary_statistics_blocked
from microtome.kernels.vocabulary_tiles import Vocabulary, wide_dtype

ROWS, BLOCK = 1024, 1024
# nats from the reference in the dtype of the sums, on the same inputs, relative above one; logits up to some 20
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}
# of gradients, relative to the largest entry of the reference's
GRADIENT_TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass(frozen=True, eq=False)
class VocabularyStatistics:
    """Statistics by depth and token, nats. None where what they need was not given (`final`, `targets`)."""

    entropy: Float[Tensor, "depth token"]
    log_sum_exp: Float[Tensor, "depth token"]
    top_ids: Int64[Tensor, "depth token top"]
    top_log_probs: Float[Tensor, "depth token top"]
    kl: Float[Tensor, "depth token"] | None = None
    kl_reverse: Float[Tensor, "depth token"] | None = None
    agrees: Bool[Tensor, "depth token"] | None = None
    final_entropy: Float[Tensor, " token"] | None = None
    final_top_ids: Int64[Tensor, "token top"] | None = None
    final_top_log_probs: Float[Tensor, "token top"] | None = None
    target_log_prob: Float[Tensor, "depth token"] | None = None
    target_rank: Int64[Tensor, "depth token"] | None = None
    final_target_log_prob: Float[Tensor, " token"] | None = None
    final_target_rank: Int64[Tensor, " token"] | None = None

    @property
    def cross_entropy(self) -> Float[Tensor, "depth token"] | None:
        """-log q(target)."""
        return None if self.target_log_prob is None else -self.target_log_prob


def vocabulary_statistics(
    hidden: Float[Tensor, "depth token d_model"],
    weight: Float[Tensor, "vocab d_model"],
    *,
    final: Float[Tensor, "token d_model"] | None = None,
    bias: Float[Tensor, " vocab"] | None = None,
    factor: float = 1.0,
    cap: float | None = None,
    targets: Int64[Tensor, " token"] | None = None,
    top: int = 5,
    rows: int = ROWS,
    block: int = BLOCK,
) -> VocabularyStatistics:
    """Statistics of every depth in one sweep over the vocabulary; no gradient.

    Args:
        hidden: lens states after the final norm (and any translator).
        weight, bias, factor, cap: the unembedding.
        final: the final state after the final norm; None leaves out all that compares.
        targets: a token id per row, -1 where there is none (log-probability NaN, rank -1).
        top: how many top tokens, from 1 to the vocabulary.
        rows, block: size of a tile; the result depends on them in the last digits only.

    Raises:
        ValueError: shapes that do not fit, a target or `top` out of range, a cap or tile size that is not positive.
    """
    _check(hidden, weight, final, bias, factor, cap, rows, block)
    _check_targets(targets, hidden.shape[1], len(weight), lowest=-1)
    if not 1 <= top <= len(weight):
        raise ValueError(f"top={top} tokens of a vocabulary of {len(weight)}: choose 1 to {len(weight)}.")
    return VocabularyStatistics(
        **vocabulary_statistics_blocked(
            hidden,
            weight,
            final=final,
            bias=bias,
            factor=factor,
            cap=cap,
            targets=targets,
            top=top,
            rows=rows,
            block=block,
        )
    )


def vocabulary_kl(
    hidden: Float[Tensor, "depth token d_model"],
    final: Float[Tensor, "token d_model"],
    weight: Float[Tensor, "vocab d_model"],
    *,
    bias: Float[Tensor, " vocab"] | None = None,
    factor: float = 1.0,
    cap: float | None = None,
    reverse: bool = False,
    rows: int = ROWS,
    block: int = BLOCK,
) -> Float[Tensor, "depth token"]:
    """KL(p || q_d) of every row, or KL(q_d || p) if reverse, for training lenses.

    Differentiable, once, with respect to `hidden` alone: `final`, `weight` and `bias` get no gradient. The gradient is
    made in the same sweep as the value, so that a step costs two products (three with a cap or in reverse). Raises
    ValueError as `vocabulary_statistics`.
    """
    _check(hidden, weight, final, bias, factor, cap, rows, block)
    vocabulary = _vocabulary(weight, bias, factor, cap, hidden, final)
    return LensLoss.apply(hidden, final.detach(), None, vocabulary, reverse, rows, block)


def vocabulary_cross_entropy(
    hidden: Float[Tensor, "depth token d_model"],
    targets: Int64[Tensor, " token"],
    weight: Float[Tensor, "vocab d_model"],
    *,
    bias: Float[Tensor, " vocab"] | None = None,
    factor: float = 1.0,
    cap: float | None = None,
    rows: int = ROWS,
    block: int = BLOCK,
) -> Float[Tensor, "depth token"]:
    """-log q_d(target) of every row, differentiable, once, with respect to `hidden` alone.

    Every row needs a target: leave out rows without one before the call. Raises ValueError as `vocabulary_statistics`.
    """
    _check(hidden, weight, None, bias, factor, cap, rows, block)
    _check_targets(targets, hidden.shape[1], len(weight), lowest=0)
    vocabulary = _vocabulary(weight, bias, factor, cap, hidden)
    return LensLoss.apply(hidden, None, targets, vocabulary, False, rows, block)


def vocabulary_kl_learned(
    features: Float[Tensor, "token feature"],
    learned_weight: Float[Tensor, "vocab feature"],
    learned_bias: Float[Tensor, " vocab"] | None,
    final: Float[Tensor, "token d_model"],
    weight: Float[Tensor, "vocab d_model"],
    *,
    bias: Float[Tensor, " vocab"] | None = None,
    factor: float = 1.0,
    cap: float | None = None,
    rows: int = ROWS,
    block: int = BLOCK,
) -> Float[Tensor, " token"]:
    """KL(p || softmax(features learned_weight^T + learned_bias)) of every row, p the model's own distribution.

    Differentiable, once, with respect to features, learned_weight and learned_bias, not to the teacher's final state
    and unembedding (weight, bias, factor, cap). The backward pass sweeps the vocabulary again. Raises ValueError as
    `vocabulary_statistics`.
    """
    _check(final[None], weight, None, bias, factor, cap, rows, block)
    _check(features[None], learned_weight, None, learned_bias, 1.0, None, rows, block)
    if len(features) != len(final) or len(learned_weight) != len(weight):
        raise ValueError(
            f"{len(features)} rows of features and {len(final)} final states, {len(learned_weight)} learned tokens and "
            f"{len(weight)} of the model: both must be equal."
        )
    teacher = _vocabulary(weight, bias, factor, cap, final, features, learned_weight)
    return LearnedLoss.apply(features, learned_weight, learned_bias, final.detach(), teacher, rows, block)


def _vocabulary(weight: Tensor, bias: Tensor | None, factor: float, cap: float | None, *others: Tensor) -> Vocabulary:
    offset = None if bias is None else bias.detach()
    return Vocabulary(weight.detach(), offset, factor, cap, wide_dtype(weight, *others))


def _check(
    hidden: Tensor,
    weight: Tensor,
    final: Tensor | None,
    bias: Tensor | None,
    factor: float,
    cap: float | None,
    rows: int,
    block: int,
) -> None:
    depths, tokens, width = hidden.shape
    if not depths:
        raise ValueError("No depth: hidden is [0, token, d_model]. Give the states of at least one.")
    if not len(weight):
        raise ValueError("The vocabulary is empty: weight is [0, d_model].")
    if weight.shape[1] != width:
        raise ValueError(f"States of width {width} and a weight [vocab, d_model] of {list(weight.shape)} do not fit.")
    if final is not None and final.shape != (tokens, width):
        raise ValueError(f"final must be one state per token, [{tokens}, {width}]; it is {list(final.shape)}.")
    if bias is not None and bias.shape != (len(weight),):
        raise ValueError(f"bias must be one number per token, [{len(weight)}]; it is {list(bias.shape)}.")
    if not math.isfinite(factor):
        raise ValueError(f"factor={factor} is no finite number.")
    if cap is not None and not 0 < cap < math.inf:
        raise ValueError(f"cap={cap}: a soft cap is a positive number, or None where the model has none.")
    if rows < 1 or block < 1:
        raise ValueError(f"rows={rows} and block={block} of a tile must be positive.")


def _check_targets(targets: Tensor | None, tokens: int, vocab: int, lowest: int) -> None:
    if targets is None:
        return
    if targets.shape != (tokens,):
        raise ValueError(f"targets must be one token id per row, [{tokens}]; it is {list(targets.shape)}.")
    if tokens and not (lowest <= int(targets.min()) and int(targets.max()) < vocab):
        missing = ", or -1 where there is none" if lowest < 0 else "; leave out rows without one"
        raise ValueError(
            f"targets run from {int(targets.min())} to {int(targets.max())}, and the vocabulary has {vocab} tokens: "
            f"give ids from 0 to {vocab - 1}{missing}."
        )

"""What the distributions behind hidden states say, without a tensor of tokens x vocabulary.

For lens states h_d (several depths d) and the final state h, both after the final norm, with

    z = cap tanh(factor (h W + b) / cap),     p = softmax(z) of the final state,     q_d = softmax(z_d) of a lens state,

    kl[d] = KL(p || q_d),   kl_reverse[d] = KL(q_d || p),   entropy[d] = H(q_d),   cross_entropy[d] = -log q_d(target),

ranks, top tokens and agreement of the largest. All in nats, accumulated in float32 (float64 for float64 input) by
online log-sum-exps over blocks of the vocabulary (sheet of formulas: Milakov & Gimelshein 2018, arXiv:1805.02867).
Ties: the lower token id comes first, in `top_ids` as in `target_rank`.

This file is the contract and the one place of dispatch: `vocabulary_statistics_reference.py` is the definition, dense;
`vocabulary_statistics_blocked.py` the form for the CPU.
"""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int64
from torch import Tensor

from microtome.kernels.vocabulary_statistics_reference import (
    vocabulary_kl_learned_reference,
    vocabulary_kl_reference,
    vocabulary_statistics_reference,
)


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
) -> VocabularyStatistics:
    """Statistics of every depth in one sweep over the vocabulary; no gradient.

    Args:
        hidden: lens states after the final norm (and any translator).
        weight, bias, factor, cap: the unembedding.
        final: the final state after the final norm; None leaves out all that compares.
        targets: a token id per row, -1 where there is none (log-probability NaN, rank -1).
        top: how many top tokens; 0 is refused.
    """
    return VocabularyStatistics(
        **vocabulary_statistics_reference(
            hidden, weight, final=final, bias=bias, factor=factor, cap=cap, targets=targets, top=top
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
) -> Float[Tensor, "depth token"]:
    """KL(p || q_d) of every row, differentiable with respect to `hidden` alone, for training lenses."""
    return vocabulary_kl_reference(hidden, final, weight, bias=bias, factor=factor, cap=cap)


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
) -> Float[Tensor, " token"]:
    """KL(p || softmax(features learned_weight^T + learned_bias)) of every row, p the model's own distribution.

    Differentiable with respect to features, learned_weight and learned_bias (once), not to the teacher's final state
    and unembedding (weight, bias, factor, cap).
    """
    return vocabulary_kl_learned_reference(
        features, learned_weight, learned_bias, final, weight, bias=bias, factor=factor, cap=cap
    )

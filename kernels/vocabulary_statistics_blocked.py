"""`vocabulary_statistics` in tiles of rows x a block of the vocabulary: one product and a few passes over each tile.

A tile holds a few tokens at every depth and, as one more depth, the final state, so that a block of the unembedding is
read once for all and p is shared. With q_b the softmax within block b and w_b = exp(lse_b - lse) the block's share,

    lse = logsumexp_b lse_b,  H(q) = lse - sum_b w_b q_b . z,  KL(p || q) = sum_b w_b p_b . (z_p - z_q) + lse_q - lse_p

(Milakov & Gimelshein 2018, arXiv:1805.02867, in the form that keeps a normaliser per block). Sums within a block run
in float32, over blocks in float64. Differences of logits are taken before they are summed, so that a small KL keeps its
digits; what rounding leaves below zero is set to zero. Memory: some five tiles, whatever the number of tokens.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from microtome.kernels.vocabulary_tiles import Rows, Vocabulary, spans, wide_dtype
from microtome.kernels.vocabulary_top import RunningTop


@torch.no_grad()
def vocabulary_statistics_blocked(
    hidden: Float[Tensor, "depth token d_model"],
    weight: Float[Tensor, "vocab d_model"],
    *,
    final: Float[Tensor, "token d_model"] | None,
    bias: Float[Tensor, " vocab"] | None,
    factor: float,
    cap: float | None,
    targets: Int64[Tensor, " token"] | None,
    top: int,
    rows: int,
    block: int,
) -> dict[str, Tensor | None]:
    """The fields of `VocabularyStatistics` by name."""
    vocabulary = Vocabulary(weight, bias, factor, cap, wide_dtype(hidden, weight, final))
    depths, tokens = hidden.shape[0] + (final is not None), hidden.shape[1]
    parts = []
    space = torch.empty(2, max(rows, depths) * min(block, len(weight)), dtype=vocabulary.dtype, device=hidden.device)
    for start, stop in spans(tokens, max(1, rows // depths)):
        own = [hidden[:, start:stop]] if final is None else [final[None, start:stop], hidden[:, start:stop]]
        states = torch.cat([part.to(vocabulary.dtype) for part in own])
        targets_here = None if targets is None else targets[start:stop]
        parts.append(_tile(states, vocabulary, final is not None, targets_here, top, block, space))
    if not parts:
        states = hidden.new_zeros(depths, 1, hidden.shape[2])
        none = None if targets is None else targets.new_zeros(1)
        empty = _tile(states, vocabulary, final is not None, none, top, block, space)
        parts = [{name: value[:, :0] for name, value in empty.items()}]
    whole = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
    return _named(whole, final is not None)


def _tile(
    states: Float[Tensor, "depth token d_model"],
    vocabulary: Vocabulary,
    has_final: bool,
    targets: Int64[Tensor, " token"] | None,
    top: int,
    block: int,
    space: Float[Tensor, "2 tile"],
) -> dict[str, Tensor]:
    """Statistics of rows `[depth, token]`, the final state first where there is one. Overwrites space."""
    depths, tokens, _ = states.shape
    rows = vocabulary.rows(states.flatten(0, 1))
    largest = RunningTop(depths * tokens, top, rows.dense)
    ranks = None if targets is None else _Ranks(vocabulary, rows, targets)
    highest, densest, own_energy, energy, under_p = [], [], [], [], []
    for start, stop in spans(len(vocabulary), block):
        z = vocabulary.logits(rows, start, stop)
        flat_q, flat_work = (part[: z.numel()].view(z.shape) for part in space)
        highest.append(largest.see(z, start))
        torch.softmax(z, -1, out=flat_q)
        densest.append(flat_q.amax(-1))
        own_energy.append(torch.mul(flat_q, z, out=flat_work).sum(-1))
        if has_final:
            shape = (depths, tokens, -1)
            z3, q, gap = z.view(shape), flat_q.view(shape), flat_work.view(shape)[1:]
            torch.sub(z3[1:], z3[:1], out=gap)
            energy.append(q[1:].mul_(gap).sum(-1))
            under_p.append(gap.mul_(q[:1]).sum(-1))
        if ranks is not None:
            ranks.see(z, start, stop)
    # the largest probability of a block is exp(0) over the block's sum
    by_block = torch.stack(highest, -1).double() - torch.stack(densest, -1).double().log()
    by_block = by_block.view(depths, tokens, -1)
    lse_all = by_block.logsumexp(-1)
    share = (by_block - lse_all[..., None]).exp()
    own = (share * torch.stack(own_energy, -1).view(by_block.shape)).sum(-1)
    found = {"lse": lse_all, "entropy": (lse_all - own).clamp(min=0)}
    if has_final:
        away = lse_all[1:] - lse_all[:1]
        found["kl"] = (away - (share[:1] * torch.stack(under_p, -1)).sum(-1)).clamp(min=0)
        found["kl_reverse"] = ((share[1:] * torch.stack(energy, -1)).sum(-1) - away).clamp(min=0)
    ids, values = largest.result()
    found["top_log_probs"] = values.view(depths, tokens, top) - lse_all[..., None]
    found = {name: value.to(vocabulary.dtype) for name, value in found.items()}
    found["top_ids"] = ids.view(depths, tokens, top)
    if ranks is not None:
        log_prob = (ranks.own.view(depths, tokens) - lse_all).to(vocabulary.dtype)
        found["target_log_prob"] = log_prob.masked_fill(targets < 0, torch.nan)
        found["target_rank"] = ranks.count.long().view(depths, tokens).masked_fill(found["target_log_prob"].isnan(), -1)
    return found


class _Ranks:
    """How many tokens come before the target: above it, or equal to it with a lower id.

    A block wholly before the target counts what is not below it, which is what lies above the next lower number; one
    wholly behind counts what is above. Where the target lies in the block, the row is looked at by itself.
    """

    def __init__(self, vocabulary: Vocabulary, rows: Rows, targets: Int64[Tensor, " token"]) -> None:
        tokens = len(targets)
        self.target = targets.clamp(min=0).repeat(rows.count // tokens)
        among = vocabulary.logits_of(rows, targets.clamp(min=0)).view(-1, tokens, tokens)
        self.own = among.diagonal(dim1=1, dim2=2).flatten()
        self.below = torch.nextafter(self.own, torch.full_like(self.own, -torch.inf))
        self.count = torch.zeros_like(self.own)

    def see(self, z: Float[Tensor, "row block"], start: int, stop: int) -> None:
        """Count in one block. Overwrites z."""
        edge = torch.where(self.target >= stop, self.below, self.own)
        here = ((self.target >= start) & (self.target < stop)).nonzero()[:, 0]
        if len(here):
            values, own, target = z[here], self.own[here, None], self.target[here, None]
            ids = torch.arange(start, stop, device=z.device)
            before = ((values > own) | ((values == own) & (ids < target))) & (ids != target)
            self.count[here] += before.sum(1)
            edge[here] = torch.inf
        # exact: whole numbers below 2^24
        self.count += z.gt_(edge[:, None]).sum(1)


def _named(whole: dict[str, Tensor], has_final: bool) -> dict[str, Tensor | None]:
    """By the names of the result, the final state's rows taken out."""
    skip = int(has_final)
    found: dict[str, Tensor | None] = {
        "entropy": whole["entropy"][skip:],
        "log_sum_exp": whole["lse"][skip:],
        "top_ids": whole["top_ids"][skip:],
        "top_log_probs": whole["top_log_probs"][skip:],
    }
    if "target_rank" in whole:
        found |= {"target_log_prob": whole["target_log_prob"][skip:], "target_rank": whole["target_rank"][skip:]}
    if has_final:
        first = whole["top_ids"][..., 0]
        found |= {
            "kl": whole["kl"],
            "kl_reverse": whole["kl_reverse"],
            "agrees": (first[1:] == first[:1]) & (first[1:] >= 0),
            "final_entropy": whole["entropy"][0],
            "final_top_ids": whole["top_ids"][0],
            "final_top_log_probs": whole["top_log_probs"][0],
        }
        if "target_rank" in whole:
            found["final_target_log_prob"] = whole["target_log_prob"][0]
            found["final_target_rank"] = whole["target_rank"][0]
    return found

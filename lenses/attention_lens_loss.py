"""KL of a lens from heads to vocabulary against the model's own distribution, and its gradient, in closed form.

    s = hidden W + b (+ offset),   q = softmax(s),   p = softmax(z),   KL(p || q) = sum p log p - sum p s + lse(s),
    dKL / ds = q - p,     dKL / dW = hidden^T (q - p),     dKL / db = q - p

The rows go through in blocks whose logits fit into `BLOCK_BYTES`: a training batch needs two such blocks, and p is
computed once for all heads and lenses that are compared with it. A sweep over blocks of the vocabulary instead
(`kernels.vocabulary_statistics`) keeps less, and computes all products twice where a gradient is wanted.
Beware: a lens has no soft cap of its own; the teacher's is applied.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from microtome.lenses.unembedding import Unembedding

BLOCK_BYTES = 2**26


@dataclass(frozen=True, eq=False)
class TeacherBlock:
    """The model's distribution at some rows: which rows, p, and its negative entropy sum p log p in nats."""

    rows: slice
    p: Float[Tensor, "token vocab"]
    negative_entropy: Float[Tensor, " token"]


@torch.no_grad()
def teacher_blocks(normed: Float[Tensor, "token d_model"], teacher: Unembedding) -> Iterator[TeacherBlock]:
    """p of the rows, a block at a time."""
    height = max(1, BLOCK_BYTES // (normed.element_size() * teacher.vocab))
    weight = teacher.weight.to(normed.dtype)
    bias = None if teacher.bias is None else teacher.bias.to(normed.dtype)
    for start in range(0, len(normed), height):
        rows = slice(start, min(start + height, len(normed)))
        scores = torch.nn.functional.linear(normed[rows], weight, bias)
        if teacher.factor != 1:
            scores.mul_(teacher.factor)
        if teacher.cap is not None:
            scores.div_(teacher.cap).tanh_().mul_(teacher.cap)
        lse = scores.logsumexp(-1)
        p = scores - lse[:, None]
        p.exp_()
        yield TeacherBlock(rows, p, torch.linalg.vecdot(p, scores) - lse)


@torch.no_grad()
def block_kl(
    scores: Float[Tensor, "token vocab"], teacher: TeacherBlock, *, gradient: bool = False
) -> Float[Tensor, " token"]:
    """KL(p || softmax(scores)) by row, nats. gradient: `scores` is overwritten with q - p."""
    lse = scores.logsumexp(-1)
    kl = teacher.negative_entropy - torch.linalg.vecdot(teacher.p, scores) + lse
    if gradient:
        scores.sub_(lse[:, None]).exp_().sub_(teacher.p)
    return kl


@torch.no_grad()
def residual_scores(stream: Float[Tensor, "token d_model"], teacher: Unembedding) -> Float[Tensor, "token vocab"]:
    """What the residual lens says before any cap: factor (n(r_l) W_U + b_U)."""
    bias = None if teacher.bias is None else teacher.bias.to(stream.dtype)
    scores = torch.nn.functional.linear(stream, teacher.weight.to(stream.dtype), bias)
    return scores if teacher.factor == 1 else scores.mul_(teacher.factor)


@torch.no_grad()
def readout_kl(
    hidden: Float[Tensor, "group token width"],
    weight: Float[Tensor, "group width vocab"],
    bias: Float[Tensor, "group share vocab"],
    normed: Float[Tensor, "token d_model"],
    teacher: Unembedding,
    *,
    stream: Float[Tensor, "token d_model"] | None = None,
    weight_gradient: Float[Tensor, "group width vocab"] | None = None,
    bias_gradient: Float[Tensor, "group share vocab"] | None = None,
) -> Float[Tensor, "group token"]:
    """KL of every group's read-out at every row; with gradients, those of the mean over rows are ADDED to the tensors.

    Args:
        hidden: what each group reads: all heads side by side (one group), or each head by itself.
        weight, bias: of each group; the shares of a bias are summed (one per head in the original form).
        normed, teacher: the model's final state and unembedding.
        stream: the normed stream before attention, whose logit lens is added (residual mode); None adds nothing.
        weight_gradient, bias_gradient: both or neither.
    """
    kl = hidden.new_empty(hidden.shape[:2])
    for block in teacher_blocks(normed, teacher):
        offset = None if stream is None else residual_scores(stream[block.rows], teacher)
        for group, values in enumerate(hidden[:, block.rows]):
            total = bias[group, 0] if bias.shape[1] == 1 else bias[group].sum(0)
            scores = torch.addmm(total, values, weight[group])
            if offset is not None:
                scores.add_(offset)
            kl[group, block.rows] = block_kl(scores, block, gradient=weight_gradient is not None)
            if weight_gradient is not None:
                weight_gradient[group].addmm_(values.T, scores, alpha=1 / len(normed))
                bias_gradient[group].add_(scores.sum(0), alpha=1 / len(normed))
    return kl


@torch.no_grad()
def best_bias(
    normed: Float[Tensor, "token d_model"],
    teacher: Unembedding,
    *,
    stream: Float[Tensor, "token d_model"] | None = None,
    rounds: int = 8,
) -> Float[Tensor, " vocab"]:
    """The bias alone of least mean KL(p || q) over the rows: what any lens with a free bias finds without a head.

    Without a stream it is log of the mean of p, exactly, and no training comes lower on the same rows. On top of the
    residual lens it is found by `rounds` of b += log(mean p / mean q), each of which lowers the KL (generalised
    iterative scaling, Darroch and Ratcliff 1972).
    """
    bias = torch.zeros(teacher.vocab, dtype=torch.float64)
    for _ in range(1 if stream is None else rounds):
        wanted, had = torch.zeros_like(bias), torch.zeros_like(bias)
        for block in teacher_blocks(normed, teacher):
            wanted += block.p.sum(0, dtype=torch.float64).cpu()
            if stream is not None:
                scores = residual_scores(stream[block.rows], teacher).add_(bias.to(normed))
                had += scores.softmax(-1).sum(0, dtype=torch.float64).cpu()
        wanted = (wanted / len(normed)).clamp(min=1e-30).log()
        bias = wanted if stream is None else bias + wanted - (had / len(normed)).clamp(min=1e-30).log()
    return bias.to(normed)

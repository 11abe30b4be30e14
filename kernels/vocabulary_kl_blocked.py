"""KL and cross-entropy over a vocabulary in tiles, with their gradient: one sweep of two products for lens states.

The gradient of KL(p || q) with respect to the logits is q - p, of KL(q || p) it is q (g - E_q g) with g = z_q - z_p, of
the cross-entropy q - 1_target. All of these are sums over the vocabulary of softmax weights times rows of W, so that
they are gathered with the same running normaliser as the value: `sum_v q_v W_v` is kept relative to the log-sum-exp so
far and rescaled when that grows. Nothing is computed in the backward pass but a product with what comes from above.
Through a soft cap the slope 1 - (z / cap)^2 of q's logits goes into the weights; p then needs a product of its own.

Against a learned unembedding the gradient of the weight needs the finished normaliser and what comes from above, so its
backward pass sweeps a second time. None of them can be differentiated twice.
"""

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from microtome.kernels.vocabulary_tiles import Rows, Vocabulary, spans


class LensLoss(torch.autograd.Function):
    """`[depth, token]` nats: KL to `final`, or the cross-entropy of `targets` where `final` is None."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "depth token d_model"],
        final: Float[Tensor, "token d_model"] | None,
        targets: Int64[Tensor, " token"] | None,
        vocabulary: Vocabulary,
        reverse: bool,
        rows: int,
        block: int,
    ) -> Float[Tensor, "depth token"]:
        """Value, and the gradient where it will be asked for."""
        depths = hidden.shape[0] + (final is not None)
        loss = hidden.new_empty(hidden.shape[:2], dtype=vocabulary.dtype)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start, stop in spans(hidden.shape[1], max(1, rows // depths)):
            lens = hidden[:, start:stop]
            states = (
                lens
                if final is None
                else torch.cat([part.to(vocabulary.dtype) for part in (final[None, start:stop], lens)])
            )
            sweep = _Sweep(vocabulary, states, final is not None, reverse, gradient is not None)
            for first, last in spans(len(vocabulary), block):
                sweep.see(first, last)
            here = None if targets is None else targets[start:stop]
            loss[:, start:stop] = sweep.loss(here)
            if gradient is not None:
                gradient[:, start:stop] = sweep.gradient(here).to(hidden.dtype)
        ctx.save_for_backward(*([] if gradient is None else [gradient]))
        return loss

    @staticmethod
    @once_differentiable  # its type makes the parameters positional
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Float[Tensor, "depth token"]
    ) -> tuple[Tensor | None, ...]:
        """The kept gradient times what comes from above."""
        (above,), (gradient,) = grad_outputs, ctx.saved_tensors
        return (above[..., None].to(gradient.dtype) * gradient, *[None] * 6)


class _Sweep:
    """Running sums of one tile of rows `[depth, token]`, the final state first where there is one."""

    def __init__(
        self, vocabulary: Vocabulary, states: Tensor, has_final: bool, reverse: bool, with_gradient: bool
    ) -> None:
        self.vocabulary, self.has_final, self.reverse, self.with_gradient = (
            vocabulary,
            has_final,
            reverse,
            with_gradient,
        )
        self.shape = states.shape
        self.rows = vocabulary.rows(states.flatten(0, 1))
        depths, tokens, width = states.shape
        like = self.rows.dense
        lenses = depths - has_final
        self.lse = like.new_full((depths, tokens), -torch.inf, dtype=torch.float64)
        # sum of q z_gap (reverse) or p z_gap, relative to the log-sum-exp so far
        self.gap = like.new_zeros(lenses, tokens, dtype=torch.float64)
        self.under_q = like.new_zeros(depths, tokens, width) if with_gradient else None
        self.second = like.new_zeros(lenses, tokens, width) if with_gradient and self._needs_second else None

    @property
    def _needs_second(self) -> bool:
        return self.has_final and (self.reverse or self.vocabulary.cap is not None)

    def see(self, start: int, stop: int) -> None:
        """Take in one block of the vocabulary."""
        depths, tokens, _ = self.shape
        z = self.vocabulary.logits(self.rows, start, stop).view(depths, tokens, -1)
        q = z.softmax(-1)
        lse = z.amax(-1).double() - q.amax(-1).double().log()
        total = torch.logaddexp(self.lse, lse)
        keep, share = (self.lse - total).exp(), (lse - total).exp()
        self.lse = total
        q.mul_(share[..., None].to(q.dtype))
        weights, weights_keep = (q[1:], keep[1:]) if self.reverse else (q[:1], keep[:1])
        if self.has_final:
            gap = z[1:] - z[:1]
            weighted = gap.mul_(weights)
            self.gap = self.gap * weights_keep + weighted.sum(-1)
        if not self.with_gradient:
            return
        columns = self.vocabulary.columns(start, stop).T
        slope = None if self.vocabulary.cap is None else 1 - (z[int(self.has_final) :] / self.vocabulary.cap) ** 2
        if self.second is not None:
            weighted = weighted if self.reverse else weights.expand(len(self.second), -1, -1)
            weighted = weighted if slope is None else weighted * slope
            self.second.mul_(weights_keep[..., None].to(q.dtype)).add_(_product(weighted, columns))
        if slope is not None:
            q[int(self.has_final) :].mul_(slope)
        self.under_q.mul_(keep[..., None].to(q.dtype)).add_(_product(q, columns))

    def loss(self, targets: Int64[Tensor, " token"] | None) -> Float[Tensor, "depth token"]:
        """Nats."""
        if targets is not None:
            return self.lse - self._target_logits(targets)
        away = self.lse[1:] - self.lse[:1]
        return (self.gap - away if self.reverse else away - self.gap).clamp(min=0)

    def gradient(self, targets: Int64[Tensor, " token"] | None) -> Float[Tensor, "depth token d_model"]:
        """Of the loss of each row, with respect to its state."""
        if targets is not None:
            own = self.vocabulary.weight[targets].to(self.under_q.dtype).expand(self.shape)
            if self.vocabulary.cap is not None:
                own = own * (1 - (self._target_logits(targets) / self.vocabulary.cap) ** 2)[..., None]
            difference = self.under_q - own
        elif self.reverse:
            difference = self.second - self.gap[..., None].to(self.second.dtype) * self.under_q[1:]
        else:
            difference = self.under_q[1:] - (self.under_q[:1] if self.second is None else self.second)
        return difference * self.vocabulary.factor

    def _target_logits(self, targets: Int64[Tensor, " token"]) -> Float[Tensor, "depth token"]:
        among = self.vocabulary.logits_of(self.rows, targets).view(-1, len(targets), len(targets))
        return among.diagonal(dim1=1, dim2=2)


def _product(weights: Float[Tensor, "*rows block"], columns: Float[Tensor, "d_model block"]) -> Tensor:
    flat = weights.reshape(-1, weights.shape[-1])
    return Rows.of(flat).times(columns).view(*weights.shape[:-1], -1)


class LearnedLoss(torch.autograd.Function):
    """`[token]` nats: KL(p || softmax(features M^T + c)), with gradients for features, M and c."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Float[Tensor, "token feature"],
        learned_weight: Float[Tensor, "vocab feature"],
        learned_bias: Float[Tensor, " vocab"] | None,
        final: Float[Tensor, "token d_model"],
        teacher: Vocabulary,
        rows: int,
        block: int,
    ) -> Float[Tensor, " token"]:
        """Value; the normalisers are kept for the second sweep."""
        learned = Vocabulary(learned_weight, learned_bias, 1.0, None, teacher.dtype)
        tiles = _tiles(features, final, learned, teacher, rows)
        count = len(features)
        lse = torch.full((2, count), -torch.inf, dtype=torch.float64, device=features.device)
        gap = lse.new_zeros(count)
        for first, last in spans(len(teacher), block):
            for (start, stop), student_rows, teacher_rows in tiles:
                z, p = learned.logits(student_rows, first, last), teacher.logits(teacher_rows, first, last)
                z_lse, p_lse = z.logsumexp(-1).double(), p.logsumexp(-1).double()
                total = torch.logaddexp(lse[0, start:stop], p_lse)
                share = (p_lse - total).exp()
                inner = (p - p_lse[:, None].to(p.dtype)).exp_().mul_(p.sub_(z)).sum(-1)
                gap[start:stop] = gap[start:stop] * (lse[0, start:stop] - total).exp() + share * inner
                lse[0, start:stop], lse[1, start:stop] = total, torch.logaddexp(lse[1, start:stop], z_lse)
        ctx.save_for_backward(features, learned_weight, learned_bias, final, lse)
        ctx.settings = (teacher, rows, block)
        return (gap - lse[0] + lse[1]).clamp(min=0).to(teacher.dtype)

    @staticmethod
    @once_differentiable  # its type makes the parameters positional
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Float[Tensor, " token"]
    ) -> tuple[Tensor | None, ...]:
        """Second sweep: u = above (q - p) in tiles; dM = u^T features, dc = sum u, dfeatures = u M."""
        features, learned_weight, learned_bias, final, lse = ctx.saved_tensors
        teacher, rows, block = ctx.settings
        learned = Vocabulary(learned_weight, learned_bias, 1.0, None, teacher.dtype)
        wants = ctx.needs_input_grad[:3]
        tiles = _tiles(features, final, learned, teacher, rows)
        lse, above = lse.to(teacher.dtype), grad_outputs[0].to(teacher.dtype)
        d_features = torch.zeros_like(features, dtype=teacher.dtype) if wants[0] else None
        d_weight = torch.empty_like(learned_weight) if wants[1] else None
        d_bias = torch.empty_like(learned_bias) if wants[2] else None
        for first, last in spans(len(teacher), block):
            weight_part, bias_part = 0, 0
            for (start, stop), student_rows, teacher_rows in tiles:
                u = learned.logits(student_rows, first, last).sub_(lse[1, start:stop, None]).exp_()
                p = teacher.logits(teacher_rows, first, last).sub_(lse[0, start:stop, None]).exp_()
                u.sub_(p).mul_(above[start:stop, None])
                if d_weight is not None:
                    weight_part = weight_part + Rows.of(u.T).times(student_rows.dense[: stop - start].T)
                if d_bias is not None:
                    bias_part = bias_part + u.sum(0)
                if d_features is not None:
                    d_features[start:stop] += Rows.of(u).times(learned.columns(first, last).T)
            if d_weight is not None:
                d_weight[first:last] = weight_part
            if d_bias is not None:
                d_bias[first:last] = bias_part
        d_features = None if d_features is None else d_features.to(features.dtype)
        return (d_features, d_weight, d_bias, *[None] * 4)


def _tiles(
    features: Tensor, final: Tensor, learned: Vocabulary, teacher: Vocabulary, rows: int
) -> list[tuple[tuple[int, int], Rows, Rows]]:
    return [
        ((start, stop), learned.rows(features[start:stop]), teacher.rows(final[start:stop]))
        for start, stop in spans(len(features), rows)
    ]

"""How good an attention lens is, and how much of a head's words is its own.

    explained = 1 - KL(model || lens) / KL(model || best bias alone),       means over held-out rows, nats
    drop_kl[h] = KL with v_h replaced by its mean - KL,
    precision[h] = share of the head's top k tokens that are among the model's top k,

beside the KL of the starting point and of the closed form. A lens with a free bias fits how often each token comes
without reading a head, so a KL says nothing without the bias alone beside it. `causal_agreement` asks the model: does
the head whose lens raises a token's logit lower it when it is taken out? `lens_cosine` compares two fits.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from scipy.stats import rankdata
from torch import Tensor, nn

from microtome.capture.models import LoadedModel
from microtome.lenses.attention_lens import CAVEAT, LEAST_PROBABILITY, AttentionLens
from microtome.lenses.attention_lens_loss import block_kl, residual_scores, teacher_blocks
from microtome.lenses.attention_lens_rows import LensRows, lens_rows
from microtome.lenses.made_for import require_same_weights
from microtome.lenses.short_repr import short_repr
from microtome.lenses.token_words import token_words
from microtome.lenses.unembedding import Unembedding, unembedding_of


@dataclass(frozen=True, eq=False, repr=False)
class AttentionLensScores:
    """Of one lens on held-out rows; KL in nats, means over rows.

    Attributes:
        kl: of the lens; in the independent mode the mean over heads.
        kl_bias: of the best bias alone, fitted on the same rows as the lens.
        kl_uniform: of the uniform distribution.
        head_kl: of each head alone, independent mode only.
        drop_kl: by head; None in the independent mode, where no other head depends on it.
        precision: by head, of its top k against the model's.
        words, plain_words: by head, the tokens that are most often among its top k: (token id, share of rows).
        documents: of the rows.
        closed_form_kl: of the closed-form lens of the same mode; None where it was not given.
    """

    layer: int
    mode: str
    rows: int
    top: int
    kl: float
    kl_bias: float
    kl_uniform: float
    head_kl: Float[Tensor, " head"] | None
    drop_kl: Float[Tensor, " head"] | None
    precision: Float[Tensor, " head"]
    plain_precision: Float[Tensor, " head"]
    peer_r2: Float[Tensor, " head"]
    words: tuple[tuple[tuple[int, float], ...], ...]
    plain_words: tuple[tuple[tuple[int, float], ...], ...]
    documents: int
    closed_form_kl: float | None = None

    @property
    def explained(self) -> float:
        """1 - KL / KL of the best bias alone: 0 for a lens that says no more than how often each token comes."""
        return 1 - self.kl / self.kl_bias if self.kl_bias else 0.0

    def __repr__(self) -> str:
        heads = self._numbers().to_string(index=False)
        closed = "" if self.closed_form_kl is None else f"closed form {self.closed_form_kl:.3f}, "
        return (
            f"Attention lens, layer {self.layer}, {self.mode}, {self.rows} held-out rows of {self.documents} documents:"
            f" KL {self.kl:.3f} nats, {closed}bias alone {self.kl_bias:.3f}, explained {self.explained:.1%}\n{heads}\n"
            f"{CAVEAT}"
        )

    def to_frame(self, model: LoadedModel | None = None, *, shown: int = 8) -> pd.DataFrame:
        """A row per head: layer, head, peer_r2, drop_kl (kl in the independent mode), precision, plain_precision,
        words, plain_words.

        model: spells the tokens; without one they are numbers.
        """

        def said(found: tuple[tuple[int, float], ...]) -> str:
            return " ".join(token_words(model, [token for token, _ in found[:shown]], is_visible=True))

        table = self._numbers()
        table.insert(0, "layer", self.layer)
        table["words"] = [said(found) for found in self.words]
        table["plain_words"] = [said(found) for found in self.plain_words]
        return table

    def _numbers(self) -> pd.DataFrame:
        of_heads = {"drop_kl": self.drop_kl, "kl": self.head_kl}  # one of them, by mode
        columns = {
            "head": np.arange(len(self.peer_r2)),
            "peer_r2": self.peer_r2.double().numpy(),
            **{name: values.double().numpy() for name, values in of_heads.items() if values is not None},
            "precision": self.precision.double().numpy(),
            "plain_precision": self.plain_precision.double().numpy(),
        }
        return pd.DataFrame(columns).round(4)


@torch.no_grad()
def score_attention_lens(
    lens: AttentionLens,
    rows: LensRows,
    end: Unembedding,
    *,
    bias: Float[Tensor, " vocab"],
    plain: Float[Tensor, "head d_head vocab"],
    top: int = 10,
    least_probability: float = LEAST_PROBABILITY,
    closed_form_kl: float | None = None,
) -> AttentionLensScores:
    """Score a lens on rows that it was not fitted on, in one sweep.

    Args:
        bias: the best bias alone, from the rows of the fit (`attention_lens_loss.best_bias`).
        plain: each head's own logit lens (`attention_lens_start.plain_weight`).
        top: k of precision and of the words.
        least_probability: words of a smaller mean probability are not listed, on both sides.
        closed_form_kl: of the closed-form lens on the same rows, to be told beside the lens's own.

    Raises:
        ValueError: no rows, rows of another layer or model, or a residual lens without the rows' stream.
    """
    if not len(rows):
        raise ValueError("no rows to score. Give held-out rows.")
    lens.require_fit(rows, end.vocab)
    if lens.mode == "residual" and rows.stream is None:
        raise ValueError("a residual lens needs rows with their stream: lens_rows(..., with_stream=True).")
    heads, alone = lens.heads, lens.mode == "independent"
    kl, dropped = torch.zeros(heads, dtype=torch.float64), torch.zeros(heads, dtype=torch.float64)
    joint = by_bias = by_none = 0.0
    hits = torch.zeros(2, heads, dtype=torch.float64)
    hidden = torch.zeros(end.vocab).masked_fill_(~lens.shown_tokens(least_probability), -torch.inf)
    counts = [[Counter() for _ in range(heads)] for _ in range(2)]
    for block in teacher_blocks(rows.normed, end):
        mixed = rows.mixed[block.rows]
        offset = (
            None if rows.stream is None or lens.mode != "residual" else residual_scores(rows.stream[block.rows], end)
        )
        best = torch.zeros_like(block.p, dtype=torch.bool).scatter_(1, block.p.topk(top).indices, True)
        base = bias.expand_as(block.p).clone() if offset is None else offset + bias
        by_bias += float(block_kl(base, block).sum())
        by_none += float((block.negative_entropy + np.log(end.vocab)).sum())
        total = None if alone else lens.logits(mixed, offset)
        if total is not None:
            joint += float(block_kl(total, block).sum())
        for head in range(heads):
            part = (mixed[:, head] - lens.mean[head]) @ lens.weight[head]
            if total is not None:
                dropped[head] += block_kl(total - part, block).sum(dtype=torch.float64)
                judged = part
            else:
                judged = mixed[:, head] @ lens.weight[head] + lens.bias[head]
                kl[head] += block_kl(judged, block).sum(dtype=torch.float64)
            bare = mixed[:, head] @ plain[head]
            for kind, scores, words in ((0, judged, part), (1, bare, bare)):
                hits[kind, head] += best.gather(1, scores.topk(top).indices).sum()
                counts[kind][head].update((words + hidden).topk(top).indices.flatten().tolist())
    count = len(rows)
    spoken = [
        tuple(tuple((token, n / count) for token, n in counter.most_common(2 * top)) for counter in kind)
        for kind in counts
    ]
    return AttentionLensScores(
        lens.layer,
        lens.mode,
        count,
        top,
        float(kl.mean()) / count if alone else joint / count,
        by_bias / count,
        by_none / count,
        kl / count if alone else None,
        None if alone else (dropped - joint) / count,
        *(hits / count / top),
        lens.peer_r2,
        *spoken,
        documents=len(rows.document.unique()),
        closed_form_kl=closed_form_kl,
    )


@dataclass(frozen=True, eq=False)
class CausalAgreement:
    """Whether the lens ranks heads as ablating them does.

    Attributes:
        spearman: over heads, at each row, of the lens logit of the model's own top token against the fall of that
            token's real logit when the head's mixed value is replaced by its mean. NaN where all heads tie.
        lens_logit: gauge-fixed, (v_h - E v_h) M_h at the token.
        logit_fall: real logit less the one without the head.
    """

    spearman: Float[Tensor, " token"]
    lens_logit: Float[Tensor, "token head"]
    logit_fall: Float[Tensor, "token head"]

    __repr__ = short_repr

    @property
    def mean(self) -> float:
        """Mean over rows of the rank correlation over heads."""
        return float(self.spearman[~self.spearman.isnan()].mean())


@torch.no_grad()
def causal_agreement(
    model: LoadedModel | nn.Module, lens: AttentionLens, texts: Any, *, max_tokens: int = 2048
) -> CausalAgreement:
    """Mean-ablate each head in turn at every position, and compare at the last real token of each text.

    Costs heads + 1 forwards of the texts. The token is the one that the unedited model puts first.
    """
    require_same_weights(lens.facts, model, "the lens")
    end = unembedding_of(model)
    intact = lens_rows(model, texts, lens.layer, positions="last", max_tokens=max_tokens)
    lens.require_fit(intact, end.vocab)
    token = torch.cat([block.p.argmax(-1) for block in teacher_blocks(intact.normed, end)])

    def logit(normed: Tensor) -> Tensor:
        scores = (normed * end.weight[token].to(normed)).sum(-1)
        scores = end.factor * (scores if end.bias is None else scores + end.bias[token].to(normed))
        return scores if end.cap is None else end.cap * torch.tanh(scores / end.cap)

    said, fell = [], []
    whole = logit(intact.normed)
    for head in range(lens.heads):
        mean = lens.mean[head]
        edit = {f"z.{lens.layer}.{head}": lambda value, mean=mean: mean.to(value) - value}
        without = lens_rows(model, texts, lens.layer, positions="last", max_tokens=max_tokens, edits=edit)
        fell.append(whole - logit(without.normed))
        columns = lens.weight[head][:, token] - lens.weight[head].mean(-1, keepdim=True)
        said.append(((intact.mixed[:, head] - mean) * columns.T).sum(-1))
    lens_logit, logit_fall = torch.stack(said, 1), torch.stack(fell, 1)
    return CausalAgreement(_row_spearman(lens_logit, logit_fall), lens_logit, logit_fall)


def lens_cosine(one: AttentionLens, other: AttentionLens) -> Float[Tensor, " head"]:
    """Cosine of M_h in two fits, centred over the vocabulary: 1 where the fit does not depend on seed and order.

    Raises:
        ValueError: lenses of different shape.
    """
    if one.weight.shape != other.weight.shape:
        raise ValueError(f"lenses of shape {tuple(one.weight.shape)} and {tuple(other.weight.shape)}.")
    a, b = (lens.weight - lens.weight.mean(-1, keepdim=True) for lens in (one, other))
    return torch.nn.functional.cosine_similarity(a.flatten(1), b.flatten(1), dim=1)


def _row_spearman(a: Tensor, b: Tensor) -> Tensor:
    ranks = [rankdata(values.double().cpu().numpy(), axis=1) for values in (a, b)]
    x, y = (values - values.mean(1, keepdims=True) for values in ranks)
    norms = np.sqrt((x**2).sum(1) * (y**2).sum(1))
    return torch.from_numpy(np.divide((x * y).sum(1), norms, out=np.full(len(x), np.nan), where=norms > 0))

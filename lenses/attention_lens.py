"""Attention lens: what every head of a layer says in words, by a map learned against the model's final distribution.

    zhat[t] = sum over h of v_h[t] M_h + b,      M_h = W_O^h W_h,      b = sum over h of b_h

Sakarvadia et al. 2023 (arXiv:2310.16270) learn one W_h [d_model, vocab] per head, read by o_h = v_h W_O^h, and minimise
KL(model || lens). o_h has rank d_head, so M_h [d_head, vocab] says all that W_h can: the same functions with exactly
d_model / d_head times fewer parameters (9 x on SmolLM2). `attention_lens_training` fits it.

Modes: "joint", the heads' sum against the final distribution (theirs); "independent", each head alone against it;
"shared", one W for all heads, so a lens on the attention output; "residual", the heads' sum on top of the residual
lens n(r_l) W_U + b_U, so what attention adds to the stream it read.

Beware of what a joint lens cannot tell: what heads share. Directions of v_h that the other heads predict can move
between the blocks M_h at no loss, so a head's words are its own only as far as its peers do not predict it. That share,
`peer_r2`, stands beside the words in every table here. Constants are in b and M is centred over the vocabulary for
display: a head's logits are (v_h - E v_h) M_h.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from microtome.capture.models import LoadedModel
from microtome.lenses.attention_lens_rows import LensRows, lens_rows
from microtome.lenses.attention_lens_start import folded_unembedding, plain_weight
from microtome.lenses.head_writes import head_maps
from microtome.lenses.made_for import require_same_weights
from microtome.lenses.token_words import token_words
from microtome.lenses.unembedding import unembedding_of

# one of MODES; told by a message of ours, so not a Literal
Mode = str
MODES = ("joint", "independent", "shared", "residual")
CAVEAT = (
    "peer R2: the share of the head that the layer's other heads predict. A lens cannot say whose the words of that "
    "share are."
)
LEAST_PROBABILITY = 1e-6
_ROWS_AT_ONCE = 64


@dataclass(frozen=True, eq=False, repr=False)
class AttentionLens:
    """A fitted lens of one layer, in the small form.

    Attributes:
        layer: whose heads.
        mode: see the module.
        weight: M_h.
        bias: b, one row; in the independent mode a row per head.
        mean: E v_h over the rows of the fit.
        peer_r2: share of each head that its peers predict, on held-out rows.
        log_mean_p: log of the model's mean probability of each token over the rows of the fit. Tokens that hardly ever
            come are never told apart by training, and would fill the lists of words: see `shown_tokens`.
        facts: settings and scores, JSON values.
    """

    layer: int
    mode: Mode
    weight: Float[Tensor, "head d_head vocab"]
    bias: Float[Tensor, "share vocab"]
    mean: Float[Tensor, "head d_head"]
    peer_r2: Float[Tensor, " head"]
    log_mean_p: Float[Tensor, " vocab"] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r}. Give one of {', '.join(MODES)}.")
        shares = self.heads if self.mode == "independent" else 1
        if self.bias.shape != (shares, self.vocab):
            raise ValueError(
                f"a bias {tuple(self.bias.shape)} for the mode {self.mode}; expected ({shares}, {self.vocab})."
            )

    def __repr__(self) -> str:
        shown = ", ".join(f"{r2:.2f}" for r2 in self.peer_r2.tolist())
        return (
            f"AttentionLens(layer {self.layer}, {self.mode}, {self.heads} heads, {self.parameters:,} parameters)\n"
            f"peer R2 by head: {shown}\n{CAVEAT}"
        )

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.weight.shape[0]

    @property
    def vocab(self) -> int:
        """Number of tokens."""
        return self.weight.shape[2]

    @property
    def parameters(self) -> int:
        """Numbers in M and b."""
        return self.weight.numel() + self.bias.numel()

    @classmethod
    def from_original(
        cls,
        weight: Float[Tensor, "head d_model vocab"],
        bias: Float[Tensor, "head vocab"],
        writes: Float[Tensor, "head d_head d_model"],
        *,
        layer: int,
        mode: Mode = "joint",
        mean: Float[Tensor, "head d_head"] | None = None,
        peer_r2: Float[Tensor, " head"] | None = None,
        attention_bias: Float[Tensor, " d_model"] | None = None,
    ) -> "AttentionLens":
        """The small form of W_h and b_h, exactly: M_h = W_O^h W_h, b = sum of b_h.

        Args:
            writes: W_O of each head (`head_writes.head_maps`).
            attention_bias: b_O, if the original read it as one more part: it adds b_O times the mean of W_h. The heads'
                outputs of this package (`head_out`) do not contain it; leave it None for them.
        """
        shares = bias if mode == "independent" else bias.sum(0, keepdim=True)
        if attention_bias is not None:
            shares = shares + attention_bias @ weight.mean(0)
        heads, d_head = writes.shape[:2]
        unknown = torch.full((heads,), torch.nan) if peer_r2 is None else peer_r2
        return cls(layer, mode, writes @ weight, shares, torch.zeros(heads, d_head) if mean is None else mean, unknown)

    def centred(self) -> "AttentionLens":
        """The same lens in the gauge of display: M centred over the vocabulary, b of mean 0, same distributions."""
        return replace(
            self,
            weight=self.weight - self.weight.mean(-1, keepdim=True),
            bias=self.bias - self.bias.mean(-1, keepdim=True),
        )

    def logits(
        self, mixed: Float[Tensor, "token head d_head"], offset: Float[Tensor, "token vocab"] | None = None
    ) -> Float[Tensor, "token vocab"]:
        """zhat, dense: for a handful of rows. offset: the residual lens's logits, for the residual mode.

        Raises:
            ValueError: the independent mode, which has no sum; an offset where the mode wants none, or none where it
                wants one.
        """
        if self.mode == "independent":
            raise ValueError("an independent lens has a distribution per head and no sum. Use head_logits.")
        if (offset is None) == (self.mode == "residual"):
            raise ValueError(f"mode {self.mode}: the residual mode, and it alone, needs the residual lens as offset.")
        scores = self.bias[0] + mixed.flatten(1) @ self.weight.flatten(0, 1)
        return scores if offset is None else scores + offset

    def head_logits(
        self, mixed: Float[Tensor, "token head d_head"], head: int, *, with_bias: bool = False
    ) -> Float[Tensor, "token vocab"]:
        """(v_h - E v_h) M_h of one head, what its words are read from; with_bias: v_h M_h + b_h (independent mode).

        Raises:
            IndexError: no such head.
            ValueError: with_bias in a mode whose heads have no bias of their own.
        """
        if not 0 <= head < self.heads:
            raise IndexError(f"head {head} of a layer with heads 0 to {self.heads - 1}.")
        if with_bias:
            if self.mode != "independent":
                raise ValueError(f"mode {self.mode} has one bias for all heads; only their sum is determined.")
            return self.bias[head] + mixed[:, head] @ self.weight[head]
        scores = (mixed[:, head] - self.mean[head]) @ self.weight[head]
        return scores - scores.mean(-1, keepdim=True)

    def shown_tokens(self, least: float) -> Bool[Tensor, " vocab"]:
        """Tokens of a mean probability of at least `least`; all of them where it is not known."""
        if self.log_mean_p is None or least <= 0:
            return torch.ones(self.vocab, dtype=torch.bool)
        return self.log_mean_p >= math.log(least)

    def decode(
        self,
        model: LoadedModel,
        texts: Any,
        positions: str | Sequence[int] = "last",
        *,
        top: int = 8,
        least_probability: float = LEAST_PROBABILITY,
    ) -> "HeadReadings":
        """Top words of every head at some positions of texts, beside the plain unembedding of the same head.

        Args:
            model: the model that the lens was fitted on.
            positions: "last" real token of each text, or positions that count from 0, negative ones from the end,
                taken in every text that has them.
            top: words per head.
            least_probability: words of a smaller mean probability are left out, on both sides.

        Raises:
            ValueError: a model whose heads, vocabulary or weights are others, no tokenizer, or positions that no text
                has.
        """
        if not isinstance(model, LoadedModel) or model.tokenizer is None:
            raise ValueError("words need a tokenizer. Give the LoadedModel that load_model returns.")
        require_same_weights(self.facts, model, "the lens")
        if positions == "last":
            rows = lens_rows(model, texts, self.layer, positions="last")
        else:
            rows = _at_positions(lens_rows(model, texts, self.layer, positions="every"), positions)
        self.require_fit(rows, unembedding_of(model).vocab)
        writes, _ = head_maps(model, self.layer)
        plain = plain_weight(writes, folded_unembedding(unembedding_of(model)))
        hidden = torch.zeros(self.vocab).masked_fill_(~self.shown_tokens(least_probability), -torch.inf)
        ids = {"lens": [], "plain": []}
        values = []
        for head in range(self.heads):
            parts = []
            for some in torch.arange(len(rows)).split(_ROWS_AT_ONCE):
                mixed = rows.mixed[some]
                best = (self.head_logits(mixed, head) + hidden).topk(top, dim=-1)
                parts.append((best.indices, best.values, (mixed[:, head] @ plain[head] + hidden).topk(top).indices))
            chosen, scores, bare = (torch.cat(each) for each in zip(*parts, strict=True))
            ids["lens"].append(chosen)
            ids["plain"].append(bare)
            values.append(scores)
        return HeadReadings(
            self.layer,
            rows.text,
            rows.position,
            tuple(token_words(model, rows.token_ids, is_visible=True)),
            torch.stack(ids["lens"], 1),
            torch.stack(values, 1),
            torch.stack(ids["plain"], 1),
            self.peer_r2,
            {int(i): word for part in ids.values() for t in part for i, word in _spelled(model, t)},
        )

    def require_fit(self, rows: LensRows, vocab: int) -> None:
        """Refuse rows or a model that this lens was not made for.

        Raises:
            ValueError: another layer, other heads, or another vocabulary.
        """
        found = (rows.layer, *rows.mixed.shape[1:], vocab)
        own = (self.layer, *self.weight.shape)
        if found != own:
            raise ValueError(
                f"the lens is of layer, heads, width and vocabulary {own}, the model gives {found}. Use its own model."
            )


@dataclass(frozen=True, eq=False, repr=False)
class HeadReadings:
    """Top words of each head at some rows; lens logits are gauge-fixed, (v_h - E v_h) M_h.

    Attributes:
        text, position, token: of each row.
        top_ids, top_logits: by row and head, the lens's.
        plain_ids: by row and head, of the plain unembedding of the head's output.
        peer_r2: by head.
        words: spelling of every token named.
    """

    layer: int
    text: Int64[Tensor, " token"]
    position: Int64[Tensor, " token"]
    token: tuple[str, ...]
    top_ids: Int64[Tensor, "token head top"]
    top_logits: Float[Tensor, "token head top"]
    plain_ids: Int64[Tensor, "token head top"]
    peer_r2: Float[Tensor, " head"]
    words: Mapping[int, str]

    def __repr__(self) -> str:
        table = self.to_frame().drop(columns="layer")
        return f"Attention lens, layer {self.layer}\n{table.to_string(index=False)}\n{CAVEAT}"

    def to_frame(self) -> pd.DataFrame:
        """A row per token and head: layer, text, position, token, head, peer_r2, words, plain_words."""
        spell = self.words.__getitem__
        return pd.DataFrame(
            [
                {
                    "layer": self.layer,
                    "text": int(self.text[row]),
                    "position": int(self.position[row]),
                    "token": self.token[row],
                    "head": head,
                    "peer_r2": round(float(self.peer_r2[head]), 3),
                    "words": " ".join(map(spell, self.top_ids[row, head].tolist())),
                    "plain_words": " ".join(map(spell, self.plain_ids[row, head].tolist())),
                }
                for row in range(len(self.token))
                for head in range(self.top_ids.shape[1])
            ]
        )


def _spelled(model: LoadedModel, ids: Tensor) -> list[tuple[int, str]]:
    numbers = ids.unique()
    return list(zip(numbers.tolist(), token_words(model, numbers, is_visible=True), strict=True))


def _at_positions(rows: LensRows, positions: str | Sequence[int]) -> LensRows:
    if isinstance(positions, str) or not len(positions):
        raise ValueError(f"positions={positions!r}. Give 'last' or a list of positions.")
    lengths = torch.zeros(int(rows.text.max()) + 1, dtype=torch.long).scatter_reduce(
        0, rows.text, rows.position + 1, "amax"
    )
    wanted = torch.tensor(list(positions))
    places = torch.where(wanted[:, None] < 0, lengths[rows.text] + wanted[:, None], wanted[:, None])
    kept = (places == rows.position).any(0)
    if not bool(kept.any()):
        raise ValueError(f"positions={list(positions)}: no text has them; the longest has {int(lengths.max())} tokens.")
    return rows.take(kept)

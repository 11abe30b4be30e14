"""What an edit does to the next token: KL between clean and edited distributions, and the nats of a continuation.

    kl[t] = KL(p_clean( . | x_<=t) || p_edited( . | x_<=t)),
    nll = -sum_t log p(x_t+1 | x_<=t) over the continuation,     perplexity = exp(sum of nats / sum of tokens)

Rows are the positions that predict a token behind the prompt: from the prompt's last token on. Logits go through
`microtome.kernels.vocabulary_statistics`, so that no tensor of tokens x vocabulary is made: memory is a batch and a
tile. Beware: a perplexity depends on the tokenizer, so that those of two models compare only
per character or where both tokenize alike; and a continuation is tokenized apart from its prompt here, which may split
a word otherwise than the two in one string would be.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from microtome.capture.anatomy import Anatomy
from microtome.capture.batches import MAX_TOKENS
from microtome.capture.dissect import dissect
from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.capture.tap_plan import Edit, EditFunction, SiteName
from microtome.kernels.vocabulary_statistics import vocabulary_cross_entropy, vocabulary_statistics
from microtome.lenses.corpus_pass import Chunk, CorpusPass, corpus_pass
from microtome.lenses.short_repr import short_repr
from microtome.lenses.unembedding import Unembedding, unembedding_of

Edits = Mapping[SiteName, EditFunction | Edit]


@dataclass(frozen=True, eq=False)
class NextTokenKl:
    """Clean against edited next-token distributions, nats, a row per position, texts in order.

    Attributes:
        text, position, token_id: which token's prediction.
        kl, kl_reverse: KL(clean || edited), KL(edited || clean).
        agrees: whether the most probable token is the same.
        clean_entropy, edited_entropy: of the two distributions.
        clean_nll, edited_nll: of the token that follows, NaN at a text's end.
    """

    text: Int64[Tensor, " row"]
    position: Int64[Tensor, " row"]
    token_id: Int64[Tensor, " row"]
    kl: Float[Tensor, " row"]
    kl_reverse: Float[Tensor, " row"]
    agrees: Bool[Tensor, " row"]
    clean_entropy: Float[Tensor, " row"]
    edited_entropy: Float[Tensor, " row"]
    clean_nll: Float[Tensor, " row"]
    edited_nll: Float[Tensor, " row"]

    __repr__ = short_repr

    def to_frame(self) -> pd.DataFrame:
        """A row per position."""
        return _frame(vars(self))

    def per_text(self) -> pd.DataFrame:
        """Means over each text's rows, with their number."""
        frame = self.to_frame().drop(columns=["position", "token_id"]).groupby("text")
        return frame.mean().assign(rows=frame.size()).reset_index()


@dataclass(frozen=True, eq=False)
class TextNll:
    """-log p of the tokens behind each prompt, nats, a row per scored token, texts in order.

    Attributes:
        text, position, token_id: the scored token and its place in its text, prompt included.
        nll: its nats.
        texts: how many texts there were.
    """

    text: Int64[Tensor, " row"]
    position: Int64[Tensor, " row"]
    token_id: Int64[Tensor, " row"]
    nll: Float[Tensor, " row"]
    texts: int

    __repr__ = short_repr

    @property
    def nats(self) -> Float[Tensor, " text"]:
        """Summed by text, float64."""
        return torch.zeros(self.texts, dtype=torch.float64).index_add_(0, self.text, self.nll.double())

    @property
    def tokens(self) -> Int64[Tensor, " text"]:
        """Scored tokens of each text."""
        return self.text.bincount(minlength=self.texts)

    @property
    def perplexity(self) -> float:
        """exp(sum of nats / sum of tokens) over all texts: every token weighs the same."""
        return float((self.nats.sum() / self.tokens.sum()).exp())

    def to_frame(self) -> pd.DataFrame:
        """A row per scored token."""
        return _frame({name: value for name, value in vars(self).items() if name != "texts"})

    def per_text(self) -> pd.DataFrame:
        """text, nats, tokens, perplexity."""
        return pd.DataFrame(
            {
                "text": range(self.texts),
                "nats": self.nats.numpy(),
                "tokens": self.tokens.numpy(),
                "perplexity": (self.nats / self.tokens).exp().numpy(),
            }
        )


def next_token_kl(
    model: LoadedModel | nn.Module,
    texts: Any,
    edits: Edits,
    *,
    prompt_tokens: int | Sequence[int] = 1,
    anatomy: Anatomy | None = None,
    max_tokens: int = MAX_TOKENS,
    **encoding: Any,
) -> NextTokenKl:
    """KL between what the model predicts with and without edits, at every position from the prompt's last token on.

    Args:
        model, texts, anatomy, max_tokens: as for `corpus_pass`; encoding: its truncate, max_length, add_special_tokens.
        edits: by site, functions that return the delta to add, as `taps` takes them; in the edited pass.
        prompt_tokens: tokens of the prompt, special ones counted, for all texts or for each; 1 takes every position.

    Raises:
        ValueError: no edit, an edit at `logits` (which changes no state), prompts that do not fit the texts, and what
            `corpus_pass` and `unembedding_of` refuse.
    """
    if not edits:
        raise ValueError("No edits: the two distributions would be the same. Give {site: function}.")
    clean = CleanTexts.of(
        model, texts, prompt_tokens=prompt_tokens, anatomy=anatomy, max_tokens=max_tokens, keep=False, **encoding
    )
    return clean.kl(edits)


@dataclass(frozen=True, eq=False)
class CleanTexts:
    """Texts that several edits are measured on: what the clean model makes of them is computed once.

    Attributes:
        plan: the pass; end: the unembedding.
        first: the first position of each text that counts.
        kept: final states by batch, filled by the first measurement; 4 bytes x tokens x width. None keeps nothing.
    """

    plan: CorpusPass
    end: Unembedding
    first: Int64[Tensor, " text"]
    kept: dict[int, Tensor] | None

    __repr__ = short_repr

    @classmethod
    def of(
        cls,
        model: LoadedModel | nn.Module,
        texts: Any,
        *,
        prompt_tokens: int | Sequence[int] = 1,
        anatomy: Anatomy | None = None,
        max_tokens: int = MAX_TOKENS,
        keep: bool = True,
        **encoding: Any,
    ) -> "CleanTexts":
        """Arguments and errors as `next_token_kl`; keep: hold the clean states for further edits."""
        plan, end = _plan(model, texts, {}, anatomy, max_tokens, encoding)
        first = _first_rows(plan, prompt_tokens, behind=0)
        plan = replace(plan, prompt_tokens=tuple((first + 1).tolist()))
        return cls(plan, end, first, {} if keep else None)

    def _clean(self) -> Iterator[Tensor]:
        if self.kept is not None and len(self.kept) == len(self.plan.batches):
            yield from (self.kept[number] for number in range(len(self.plan.batches)))
            return
        for chunk in self.plan.chunks():
            states = _normed(chunk, self.plan.sites[0], self.end)
            if self.kept is not None:
                self.kept[chunk.number] = states
            yield states

    def run(self) -> "CleanTexts":
        """The clean pass now."""
        for _ in self._clean():
            pass
        return self

    def kl(self, edits: Edits) -> NextTokenKl:
        """Clean against edited. Raises ValueError for no edit or one at `logits`, KeyError for an unknown site."""
        if not edits:
            raise ValueError("No edits: the two distributions would be the same. Give {site: function}.")
        _refuse_logits(edits, self.plan.anatomy)
        return self.compared(edits)

    def compared(self, edits: Edits | None = None) -> NextTokenKl:
        """Clean against the model as it runs now, under whatever context is open, with or without edits.

        Beware: the clean pass runs when it is first needed: call `run` before the context opens.
        """
        found = []
        for clean, other in zip(self._clean(), replace(self.plan, edits=edits or {}).chunks(), strict=True):
            found.append(self._rows(clean, other))
        return NextTokenKl(**_in_order(found))

    def _rows(self, clean: Tensor, other: Chunk) -> dict[str, Tensor]:
        end = self.end
        keep = other.position >= self.first[other.text]
        p, q = clean[keep], _normed(other, self.plan.sites[0], end)[keep]
        s = vocabulary_statistics(q[None], **_end(end), final=p, targets=other.targets[keep], top=1)
        return {
            **_rows(other, keep),
            "kl": s.kl[0],
            "kl_reverse": s.kl_reverse[0],
            "agrees": s.agrees[0],
            "clean_entropy": s.final_entropy,
            "edited_entropy": s.entropy[0],
            "clean_nll": -s.final_target_log_prob,
            "edited_nll": -s.target_log_prob[0],
        }


def text_nll(
    model: LoadedModel | nn.Module,
    texts: Any,
    *,
    prompt_tokens: int | Sequence[int] = 1,
    edits: Edits | None = None,
    anatomy: Anatomy | None = None,
    max_tokens: int = MAX_TOKENS,
    **encoding: Any,
) -> TextNll:
    """-log p of every token behind the prompt, with edits acting if there are any; `.perplexity` of all of them.

    With `prompt_tokens=1` every token but the first is scored, as transformers' own loss does. Arguments and errors as
    `next_token_kl`; a text without a token behind its prompt is refused.
    """
    plan, end = _plan(model, texts, edits or {}, anatomy, max_tokens, encoding)
    first = _first_rows(plan, prompt_tokens, behind=1)
    plan = replace(plan, prompt_tokens=tuple((first + 1).tolist()))
    found = []
    for chunk in plan.chunks():
        keep = (chunk.position >= first[chunk.text]) & chunk.has_target
        states = _normed(chunk, plan.sites[0], end)[keep]
        with torch.no_grad():
            nll = vocabulary_cross_entropy(states[None], chunk.targets[keep], **_end(end))[0]
        scored = {"text": chunk.text[keep], "position": chunk.position[keep] + 1, "token_id": chunk.targets[keep]}
        found.append({**scored, "nll": nll})
    return TextNll(**_in_order(found), texts=len(plan.texts))


def continuation_nll(
    model: LoadedModel | nn.Module,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    continuations: Sequence[str] | Sequence[Sequence[int]],
    *,
    edits: Edits | None = None,
    anatomy: Anatomy | None = None,
    max_tokens: int = MAX_TOKENS,
    add_special_tokens: bool = True,
) -> TextNll:
    """-log p of each continuation given its prompt, nats; rows are the continuation's tokens alone.

    Args:
        prompts, continuations: strings, or lists of token ids, one continuation per prompt. A continuation's string
            needs its leading space.
        add_special_tokens: what the tokenizer puts around a prompt; around a continuation it puts nothing.

    Raises:
        ValueError: lists of different length, a prompt or continuation without tokens, and what `text_nll` refuses.
    """
    if len(prompts) != len(continuations):
        raise ValueError(f"{len(prompts)} prompts and {len(continuations)} continuations: give one for each.")
    before = [_ids(model, text, add_special_tokens) for text in prompts]
    after = [_ids(model, text, False) for text in continuations]
    for name, rows, advice in (
        ("prompt", before, "The first token needs one before it: give BOS at least."),
        ("continuation", after, "Leave the pair out."),
    ):
        if empty := [number for number, ids in enumerate(rows) if not ids]:
            raise ValueError(f"The {name} of text {empty[0]} has no token. {advice}")
    return text_nll(
        model,
        [one + other for one, other in zip(before, after, strict=True)],
        prompt_tokens=[len(ids) for ids in before],
        edits=edits,
        anatomy=anatomy,
        max_tokens=max_tokens,
    )


def perplexity(
    model: LoadedModel | nn.Module,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    continuations: Sequence[str] | Sequence[Sequence[int]],
    **options: Any,
) -> float:
    """exp(sum of nats / sum of tokens) of the continuations given their prompts; options as `continuation_nll`."""
    return continuation_nll(model, prompts, continuations, **options).perplexity


def _plan(
    model: LoadedModel | nn.Module,
    texts: Any,
    edits: Edits,
    anatomy: Anatomy | None,
    max_tokens: int,
    encoding: dict[str, Any],
) -> tuple[CorpusPass, Unembedding]:
    """A pass that reads what the unembedding reads: the final norm's output, edits of the norm included."""
    if anatomy is None:
        anatomy = dissect(model.module if isinstance(model, LoadedModel) else model)
    _refuse_logits(edits, anatomy)
    end = unembedding_of(model, anatomy)
    site = "final_norm" if anatomy.final_norm is not None else f"resid_post.{anatomy.layers - 1}"
    plan = corpus_pass(model, texts, site, anatomy=anatomy, edits=edits, max_tokens=max_tokens, **encoding)
    return plan, end


def _refuse_logits(edits: Edits, anatomy: Anatomy) -> None:
    """Raise ValueError for an edit that comes after what is read."""
    if any(site.kind == "logits" for name in edits for site in anatomy.expand(name)):
        raise ValueError("An edit at logits changes no state that an unembedding reads. Edit final_norm instead.")


def _normed(chunk: Chunk, site: Site, end: Unembedding) -> Float[Tensor, "row d_model"]:
    return chunk.values[site].to(end.weight.device)


def _end(end: Unembedding) -> dict[str, Any]:
    return {"weight": end.weight, "bias": end.bias, "factor": end.factor, "cap": end.cap}


def _first_rows(plan: CorpusPass, prompt_tokens: int | Sequence[int], behind: int) -> Int64[Tensor, " text"]:
    """The first position kept of each text. behind: how many tokens must follow the prompt."""
    lengths = torch.tensor([text.length for text in plan.texts])
    given = torch.as_tensor(prompt_tokens)
    if given.dim() and given.shape != lengths.shape:
        raise ValueError(f"prompt_tokens has {len(given)} numbers for {len(lengths)} texts: give one for each, or one.")
    given = given.expand(len(lengths))
    if wrong := ((given < 1) | (given + behind > lengths)).nonzero()[:, 0].tolist():
        row = wrong[0]
        raise ValueError(
            f"Text {row} has {int(lengths[row])} tokens and a prompt of {int(given[row])}: a prompt has at least one "
            f"token{', and at least one must follow it' if behind else ' and no more than the text'}."
        )
    return given - 1


def _ids(model: LoadedModel | nn.Module, text: Any, add_special_tokens: bool) -> list[int]:
    if not isinstance(text, str):
        return [int(token) for token in text]
    if not isinstance(model, LoadedModel):
        raise ValueError("Strings need a tokenizer: pass a LoadedModel, or token ids.")
    return list(model.require_tokenizer()(text, add_special_tokens=add_special_tokens)["input_ids"])


def _rows(chunk: Chunk, keep: Bool[Tensor, " token"]) -> dict[str, Tensor]:
    return {"text": chunk.text[keep], "position": chunk.position[keep], "token_id": chunk.token_ids[keep]}


def _in_order(found: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Batches put together, on the CPU, by text and position."""
    whole = {name: torch.cat([part[name].cpu() for part in found]) for name in found[0]}
    order = whole["position"].argsort(stable=True)
    order = order[whole["text"][order].argsort(stable=True)]
    return {name: value[order] for name, value in whole.items()}


def _frame(columns: Mapping[str, Tensor]) -> pd.DataFrame:
    return pd.DataFrame({name: value.numpy() for name, value in columns.items()})

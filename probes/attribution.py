"""Why a probe says what it says: its score at one position as an exact sum over layers, heads and source tokens.

The stream at the probed site is the embedding plus what every block before it adds, so for a linear probe (w, b)

    score = b + w . x_0 + sum over layers of (w . attention + w . mlp)
    w . attention = sum_h w . (z_h W_O^h) + w . bias,    w . (z_h W_O^h) = sum_j A_h[t, j] (v_j W_O^h) . w

(t the probed position, j the source tokens; Elhage et al. 2021 for the decomposition; the names "HeadScore" and
"TokenScore" are of Popovic & Faerber, arXiv 2604.19934, whose own definitions were out of reach [U]: these are derived
here). The blocks' trunks are those that `dissect` proved, so factors and vectors on the way are counted
(`attribution_terms` carries w back through them).

For several classes a weight means nothing up to a constant: `output=k`, or the name of class k, takes w_k less the mean
of all classes.

Beware: exact is not causal. A part that adds to the score may be cancelled by a later one, and taking it out changes
later parts. The stream must be a sum: models with a norm on the trunk (BERT) are refused, and models with a norm after
attention (Gemma 2) can be split by layer only.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64, Int
from torch import Tensor, nn

from microtome.capture.batches import PaddingRecipe, make_batch, plan_batches
from microtome.capture.dissect import dissect
from microtome.capture.encoded_text import EncodedText, EncodedTexts
from microtome.capture.forward_arguments import input_device
from microtome.capture.limits import pad_id
from microtome.capture.models import LoadedModel
from microtome.capture.padding import call_options, limit_for
from microtome.capture.sites import Site
from microtome.capture.tap_plan import Read
from microtome.capture.taps import Tape, taps
from microtome.capture.texts import encode_texts
from microtome.probes.attribution_terms import Term, double, probe_weights, stream_terms, with_heads

MAX_TOKENS = 1024


@dataclass(frozen=True, eq=False)
class Attribution:
    """Parts of a probe's score.

    Attributes:
        table: text, component (embed, attention, attention bias, mlp, ..., intercept), layer, head, and with
            split="token" position and token (the source for attention, the probed one for all else); value in the
            unit of the score.
        scores: w . x + b of each text, read at the probed site.
        error: largest difference between a score and the sum of its parts, as a share of the sum of their sizes.
        split: how fine the parts are: "layer", "head" or "token".
    """

    table: pd.DataFrame
    scores: Float64[Tensor, " text"]
    error: float
    split: str

    def __repr__(self) -> str:
        return f"Attribution({len(self.scores)} texts by {self.split}, {len(self.table)} parts, error {self.error:.1e})"

    def by_token(self) -> pd.DataFrame:
        """What attention brought from each source token, summed over layers and heads: text, position, token, value.

        Raises ValueError unless the split is "token".
        """
        if self.split != "token":
            raise ValueError(f"These parts are split by {self.split}. Call attribute(..., split='token').")
        moved = self.table[self.table["component"] == "attention"]
        return moved.groupby(["text", "position", "token"], as_index=False)["value"].sum()

    def centred(self, reference: "Attribution") -> pd.DataFrame:
        """The table with `centred`: value less the mean of the same part over the reference's texts.

        Sums to the score less the reference's mean score.
        Raises ValueError for another split, or for parts by token, which have no counterpart in another text.
        """
        if "token" in (self.split, reference.split) or self.split != reference.split:
            raise ValueError(
                f"Parts by {self.split} cannot be centred on parts by {reference.split}. Split both by 'head' or both "
                "by 'layer'."
            )
        part = ["component", "layer", "head"]
        mean = reference.table.groupby(part, dropna=False)["value"].mean().rename("mean").reset_index()
        joined = self.table.merge(mean, on=part, how="left", validate="many_to_one")
        if joined["mean"].isna().any():
            raise ValueError("The reference lacks some of the parts: it is of another model or site.")
        return joined.assign(centred=joined["value"] - joined["mean"]).drop(columns="mean")


def attribute(
    model: LoadedModel | nn.Module,
    texts: Any,
    probe: Any,
    *,
    site: str | tuple | Site,
    split: str = "head",
    positions: int | Iterable[int] = -1,
    output: int | str | None = None,
    **encoding: Any,
) -> Attribution:
    """Split a probe's score on every text.

    Args:
        texts: strings, message lists or token ids, as `capture` takes them.
        probe: a sweep that probed the site; (weights [d_model], intercept) of the features as given; or an estimator
            with coef_ and intercept_.
        site: where the probe reads: "resid_post.11" or "resid_pre.11".
        split: "layer" (one part per contribution), "head", or "token" (heads, by source token).
        positions: the probed token, one for all or one per text; negative from the end of the text.
        output: which class, for a probe of several: its number, or its name in the sweep or the estimator's classes_.
        encoding: as of `encode_texts`, such as add_special_tokens.

    Raises:
        ValueError: another site, a stream that is no plain sum up to there, attention that cannot be split so far
            (the message says why), a probe of another width or without a chosen class, parts that do not sum up.
        KeyError: a site that the sweep did not probe.
        IndexError: a position that a text does not have.
        TypeError: a probe without weights. KeyError: a sweep that has not probed the site.
    """
    module, tokenizer = (model.module, model.tokenizer) if isinstance(model, LoadedModel) else (model, None)
    if split not in ("layer", "head", "token"):
        raise ValueError(f"split={split!r}; give 'layer', 'head' or 'token'.")
    anatomy = dissect(module)
    site = Site.parse(site)
    if site.kind not in ("resid_post", "resid_pre") or site.layer is None:
        raise ValueError(
            f"{site} is not a place on the stream that this can split. Probe 'resid_post.LAYER' or 'resid_pre.LAYER'."
        )
    weight, intercept = probe_weights(probe, output, anatomy.d_model, site)
    terms, start, start_weight, constant = stream_terms(module, anatomy, site, weight)
    if split != "layer":
        terms = [with_heads(term, module, anatomy) for term in terms]
    encoded = encode_texts(texts, tokenizer, module=module, **encoding)
    if not isinstance(encoded, EncodedTexts):
        raise ValueError("texts are ready model inputs; attribution needs strings or token ids.")
    rows = list(encoded.rows)
    probed = _positions(positions, rows)

    recipe = anatomy.padding or PaddingRecipe()
    lengths = [row.length for row in rows]
    limits = {"max_tokens": MAX_TOKENS} | ({} if anatomy.padding is not None else {"max_rows": 1})
    parts: list[pd.DataFrame] = []
    scores = torch.zeros(len(rows), dtype=torch.float64)
    for row_ids in plan_batches(lengths, **limits):
        batch = make_batch(rows, row_ids, pad_id=pad_id(module, tokenizer), recipe=recipe, device=input_device(module))
        at = _Places(row_ids, batch.attention_mask, probed[row_ids], [rows[row] for row in row_ids])
        with torch.no_grad(), taps(module, _reads(terms, start, site, split, at), anatomy=anatomy, stop=True) as tape:
            module(**batch.model_inputs(), **call_options(module))
        scores[row_ids] = double(tape[site]) @ weight + intercept
        fixed = torch.full((len(row_ids),), intercept + constant, dtype=torch.float64)
        parts += [at.part("intercept", None, fixed), at.part("embed", None, double(tape[start]) @ start_weight)]
        for term in terms:
            parts += _parts(term, tape, split, at, limit_for(module))
    table = pd.concat(parts, ignore_index=True).astype({"layer": "Int64", "head": "Int64"})
    table = table.sort_values("text", kind="stable", ignore_index=True)
    if split != "token":
        table = table.drop(columns=["position", "token"])
    by_text = table.groupby("text")["value"]
    total, size = by_text.sum().to_numpy(), by_text.agg(lambda values: values.abs().sum()).to_numpy()
    error = float((np.abs(total - scores.numpy()) / np.maximum(size, 1e-300)).max())
    if error > limit_for(module):
        raise ValueError(
            f"The parts miss the score by {error:.1e} of their sizes at {site} (limit {limit_for(module):.0e}): "
            "something beside the blocks' contributions enters the stream of this model, so it cannot be split."
        )
    return Attribution(table, scores, error, split)


@dataclass(frozen=True, eq=False)
class _Places:
    """Which texts a batch holds, and which place of each row is probed."""

    texts: list[int]
    mask: Int[Tensor, "batch position"]
    probed: Int[np.ndarray, " batch"]
    rows: list[EncodedText]

    @property
    def columns(self) -> Int[Tensor, " batch"]:
        """The probed place of each padded row."""
        first = self.mask.argmax(1)
        return first + torch.from_numpy(self.probed).to(first.device)

    def pick(self, value: Tensor) -> Tensor:
        return value[torch.arange(len(value), device=value.device), self.columns.to(value.device)]

    def part(self, component: str, layer: int | None, values: Float64[Tensor, " batch"]) -> pd.DataFrame:
        """Lines of one part: one for each text."""
        return pd.DataFrame(
            {
                "text": self.texts,
                "component": component,
                "layer": layer,
                "head": None,
                "position": self.probed,
                "token": [row.tokens[place] for row, place in zip(self.rows, self.probed, strict=True)],
                "value": values.numpy(),
            }
        ).astype({"layer": "Int64", "head": "Int64"})

    def head_parts(self, layer: int, values: Float64[Tensor, "batch head"]) -> pd.DataFrame:
        """Lines of every head."""
        heads = values.shape[1]
        lines = self.part("attention", layer, values[:, 0])
        lines = lines.loc[lines.index.repeat(heads)].reset_index(drop=True)
        return lines.assign(head=np.tile(np.arange(heads), len(values)), value=values.flatten().numpy())

    def token_parts(self, layer: int, values: Float64[Tensor, "batch head key"]) -> pd.DataFrame:
        """Lines of every head and source token."""
        lines = []
        for number, row in enumerate(self.rows):
            real = values[number][:, self.mask[number].cpu().bool()]
            heads, keys = real.shape
            lines.append(
                pd.DataFrame(
                    {
                        "text": self.texts[number],
                        "component": "attention",
                        "layer": layer,
                        "head": np.repeat(np.arange(heads), keys),
                        "position": np.tile(np.arange(keys), heads),
                        "token": list(row.tokens) * heads,
                        "value": real.flatten().numpy(),
                    }
                )
            )
        return pd.concat(lines, ignore_index=True)


def _reads(terms: list[Term], start: Site, site: Site, split: str, at: _Places) -> list[Read]:
    reads = [Read(place, select=at.pick) for place in dict.fromkeys([start, site, *(term.site for term in terms)])]
    for term in terms:
        if term.heads is None:
            continue
        reads.append(Read(term.block.site("z"), select=at.pick))
        if split == "token":
            reads += [Read(term.block.site("pattern"), queries=at.columns[:, None]), Read(term.block.site("v"))]
    return reads


def _parts(term: Term, tape: Tape, split: str, at: _Places, limit: float) -> list[pd.DataFrame]:
    """Lines of one contribution."""
    layer, whole = term.block.layer, double(tape[term.site]) @ term.weight
    if term.heads is None:
        return [at.part(term.role, layer, whole)]
    heads = (double(tape[term.block.site("z")]) * term.heads).sum(-1)
    bias, size = whole - heads.sum(1), float(heads.abs().sum(1).max()) + abs(term.bias)
    if float((bias - term.bias).abs().max()) > 10 * limit * size:
        raise ValueError(
            f"{term.site} is not the sum of its heads and a bias: a norm or another map comes after the output "
            "projection (Gemma 2 has such a norm). Call attribute(..., split='layer')."
        )
    lines = [at.part("attention bias", layer, bias)]
    if split == "head":
        return [*lines, at.head_parts(layer, heads)]
    values = double(tape[term.block.site("v")])
    values = values.repeat_interleave(len(term.heads) // values.shape[2], 2)
    pattern = double(tape[term.block.site("pattern")])[:, :, 0]
    tokens = pattern * torch.einsum("bkhd,hd->bhk", values, term.heads)
    if float((tokens.sum(2) - heads).abs().max()) > 10 * limit * float(tokens.abs().sum(2).max()):
        raise ValueError(
            f"{term.block.site('z')} is not pattern times values: a gate or norm acts between attention and the output "
            "projection. Call attribute(..., split='head')."
        )
    return [*lines, at.token_parts(layer, tokens)]


def _positions(positions: int | Iterable[int], rows: list[EncodedText]) -> Int[np.ndarray, " text"]:
    asked = [positions] * len(rows) if isinstance(positions, int) else [int(place) for place in positions]
    if len(asked) != len(rows):
        raise ValueError(f"positions has {len(asked)} entries for {len(rows)} texts. Pass one for all, or one each.")
    for text, (place, row) in enumerate(zip(asked, rows, strict=True)):
        if not -row.length <= place < row.length:
            raise IndexError(f"text {text} has {row.length} tokens; there is no position {place}.")
    return np.array([place % row.length for place, row in zip(asked, rows, strict=True)], dtype=np.int64)

"""Why a token gets its logit: an exact sum over embeddings, heads, MLPs or neurons, and source tokens.

    z[y] = factor (n(r_L) . W_U[y] + b_U[y]),     n(r) = g r / s + b  with s kept at its real value s(r_L)
    part c of the stream, r_L = sum of parts:     factor (g c / s) . W_U[y]           (LayerNorm: c centred first)

so that parts + norm shift (factor b . W_U[y]) + unembedding bias (factor b_U[y]) = the logit, or with `against=y'` the
difference of two logits (u = W_U[y] - W_U[y']). A head's part is z_h W_O^h, where a norm follows attention (Gemma 2)
g_post z_h W_O^h / rms(sum_h z_h W_O^h + b_O); by source token it splits into A_h[t, j] v_j W_O^h. A neuron's is
c_i v_i. What values carry of a bias b_V is inside the heads. Direct logit attribution: Elhage et al. 2021, "A
mathematical framework for transformer circuits"; Wang et al. 2022, arXiv:2211.00593.

Models that cap their logits (Gemma 2): the logit before the cap is split, and the capped one is told beside it.

Beware: this is the direct path alone. A head that feeds later heads gets nothing for that, and when a part is taken out
later ones may make up for it (self-repair: McGrath et al. 2023, arXiv:2307.15771), so a large part need not be a large
effect: `microtome.lenses.attribution_scores` puts both side by side. A single logit means nothing up to what is added
to all tokens; a difference of two does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from microtome.capture.anatomy import Anatomy
from microtome.capture.batches import PaddingRecipe, make_batch, plan_batches
from microtome.capture.dissect import dissect
from microtome.capture.forward_arguments import input_device
from microtome.capture.limits import pad_id
from microtome.capture.models import LoadedModel
from microtome.capture.padding import call_options, limit_for
from microtome.capture.tap_plan import Edit, EditFunction, SiteName
from microtome.capture.taps import taps
from microtome.capture.text_source import TextSource, text_source
from microtome.lenses.attribution_rows import Places, Positions, Tokens, token_numbers, wanted_positions
from microtome.lenses.logit_parts import LogitParts
from microtome.lenses.token_words import token_words

MAX_TOKENS = 1024
LARGEST_NEURONS = 100
_SHOWN_LOGITS = 2
BY = ("layer", "head", "neuron", "token")


@dataclass(frozen=True, eq=False)
class LogitAttribution:
    """Parts of logits, in logits.

    Attributes:
        table: row (of `logits`), text, position, component (embed, embed rest, attention, attention bias, mlp, neuron,
            other neurons, mlp bias, post-norm shift, trunk shift, norm shift, unembedding bias), layer, head, neuron,
            source and source_token (split by token: where a head's part was read), value, and residual: the row's
            sum less its logit.
        logits: text, position, token (at that position), target, target_id, against, against_id, logit (before a cap;
            of a difference, the difference), sum, residual, scale (of the final norm), model_logit (the model's own,
            after its cap), cap, top, top_logit (the model's first token).
        by: how fine the parts are.
    """

    table: pd.DataFrame
    logits: pd.DataFrame
    by: str

    def __repr__(self) -> str:
        worst = self.logits["residual"].abs().max()
        lines = [
            f"LogitAttribution({len(self.logits)} logits by {self.by}, {len(self.table)} parts, residual {worst:.1e})"
        ]
        if {"target", "against", "token", "logit", "top"} <= set(self.logits.columns):
            for row in self.logits.head(_SHOWN_LOGITS).itertuples():  # quoted, so that a leading space is seen
                less = "" if pd.isna(row.against_id) else f" less {row.against!r}"
                said = f"{row.target!r}{less} after {row.token!r}: {row.logit:.3f}"
                lines.append(f"  row {row.Index}: {said}, the model's first is {row.top!r}")
        return "\n".join(lines)

    def of(self, row: int = 0) -> pd.DataFrame:
        """The parts of one logit, largest first."""
        parts = self.table[self.table["row"] == row]
        return parts.sort_values("value", key=np.abs, ascending=False, ignore_index=True)

    def by_layer(self) -> pd.DataFrame:
        """Sums over heads, neurons and tokens: row, component, layer, value; biases beside what they belong to."""
        parts = self.table.assign(component=self.table["component"].replace({"neuron": "mlp", "other neurons": "mlp"}))
        return parts.groupby(["row", "component", "layer"], as_index=False, dropna=False, sort=False)["value"].sum()

    def heads(self) -> pd.DataFrame:
        """One row per logit and head, summed over source tokens: row, layer, head, value.

        Raises ValueError if parts are by layer.
        """
        if self.by == "layer":
            raise ValueError("These parts are by layer. Call logit_attribution(..., by='head').")
        parts = self.table[(self.table["component"] == "attention") & self.table["head"].notna()]
        return parts.groupby(["row", "layer", "head"], as_index=False)["value"].sum()

    def by_source(self) -> pd.DataFrame:
        """What heads brought from each token: row, source, source_token, value.

        Raises ValueError unless parts are by token.
        """
        if self.by != "token":
            raise ValueError(f"These parts are by {self.by}. Call logit_attribution(..., by='token').")
        parts = self.table[self.table["source"].notna()]
        return parts.groupby(["row", "source", "source_token"], as_index=False)["value"].sum()


def logit_attribution(
    model: LoadedModel | nn.Module,
    texts: Any,
    positions: Positions = -1,
    *,
    target: Tokens = None,
    against: Tokens = None,
    by: str = "head",
    largest_neurons: int = LARGEST_NEURONS,
    edits: Mapping[SiteName, EditFunction | Edit] | None = None,
    anatomy: Anatomy | None = None,
    max_tokens: int = MAX_TOKENS,
    **encoding: Any,
) -> LogitAttribution:
    """Split logits into what each part of the model wrote.

    Args:
        model: a language model in eval mode.
        texts: strings, message lists or token ids, as `capture` takes them; a lone string is refused.
        positions: where the logit is read (it scores the next token): one for all texts, one per text, or a list per
            text; negative from the end.
        target: the token, as a string or id, one for all texts or one per text; None takes the model's first at each
            place.
        against: a second token, another one; then the difference of the two logits is split.
        by: "layer" (one part per contribution), "head", "neuron" (heads, and neurons of every MLP), or "token" (heads
            by source token).
        largest_neurons: how many neurons of a row are named, all layers together; the rest is one part per layer.
        edits: of the running model, as of `taps`: what is split is the edited model's logit.
        max_tokens: padded tokens in one forward.
        encoding: as for `capture`, such as add_special_tokens.

    Raises:
        ValueError: another `by`, NaN, no plain language model, a stream or norm that cannot be split (the reason is
            said), a target that is not one token, or is the token `against`, parts that do not sum to the logit.
        IndexError: a position that a text does not have.
    """
    if by not in BY:
        raise ValueError(f"by={by!r}; give 'layer', 'head', 'neuron' or 'token'.")
    if largest_neurons < 0:
        raise ValueError(f"largest_neurons={largest_neurons}: give 0 or more.")
    loaded = model if isinstance(model, LoadedModel) else LoadedModel.from_module(model, name=type(model).__name__)
    module = loaded.module
    if module.training:
        raise ValueError(f"{type(module).__name__} is in training mode. Call model.eval() first.")
    anatomy = dissect(module) if anatomy is None else anatomy
    parts = LogitParts.of(module, anatomy, by, largest_neurons)
    source = text_source(texts, loaded, **encoding)
    if not isinstance(source, TextSource):
        raise ValueError("texts are ready model inputs; attribution needs strings or token ids.")
    rows = source.encode(0, len(source)).rows
    wanted = wanted_positions(positions, rows)
    ids = [
        token_numbers(tokens, loaded.tokenizer, parts.end.vocab, len(rows), name)
        for name, tokens in (("target", target), ("against", against))
    ]
    _require_different(*ids, loaded)
    recipe = anatomy.padding or PaddingRecipe()
    limits = {"max_tokens": max_tokens} | ({} if anatomy.padding is not None else {"max_rows": 1})
    tables, logits = [], []
    for row_ids in plan_batches([row.length for row in rows], **limits):
        batch = make_batch(
            rows, row_ids, pad_id=pad_id(module, loaded.tokenizer), recipe=recipe, device=input_device(module)
        )
        places = Places.of_batch(row_ids, batch.attention_mask, wanted)
        with torch.no_grad(), taps(module, parts.reads(places), edits, anatomy=anatomy) as tape:
            module(**batch.model_inputs(), **call_options(module))
        made = parts.split(tape, places, rows, *([None if x is None else [x[t] for t in places.texts] for x in ids]))
        tables.append(made[0])
        logits.append(made[1])
    return _assembled(tables, logits, by, loaded, limit_for(module), anatomy.model_class)


def _require_different(target: list[int] | None, against: list[int] | None, loaded: LoadedModel) -> None:
    """A logit less itself is 0, part by part."""
    for number, (one, other) in enumerate(zip(target or [], against or [], strict=False)):
        if one == other:
            word = repr(token_words(loaded, [one])[0])
            raise ValueError(f"target and against are both {word} (token {one}) for text {number}. Name two tokens.")


def _assembled(
    tables: list[pd.DataFrame], logits: list[pd.DataFrame], by: str, loaded: LoadedModel, limit: float, model_class: str
) -> LogitAttribution:
    """Batches together, in the order of texts and positions; the sums checked."""
    starts = np.cumsum([0, *map(len, logits)])
    table = pd.concat(
        [t.assign(row=t["row"] + start) for t, start in zip(tables, starts[:-1], strict=True)], ignore_index=True
    )
    scores = pd.concat(logits, ignore_index=True)
    order = scores.sort_values(["text"], kind="stable").index.to_numpy()
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    table = table.assign(row=rank[table["row"]]).sort_values("row", kind="stable", ignore_index=True)
    scores = scores.loc[order].reset_index(drop=True)
    by_row = table.groupby("row")["value"]
    total, size = by_row.sum().to_numpy(), by_row.agg(lambda values: values.abs().sum()).to_numpy()
    residual = total - scores["logit"].to_numpy(dtype=float)
    error = float((np.abs(residual) / np.maximum(size, 1e-300)).max())
    if not error <= limit:
        raise ValueError(
            f"The parts miss the logit by {error:.1e} of their sizes (limit {limit:.0e}): something beside the blocks' "
            f"contributions enters the stream of this {model_class}, so its logits cannot be split."
        )
    scores = scores.assign(sum=total, residual=residual)
    for name in ("target", "against", "top"):
        scores[name] = ["" if pd.isna(number) else token_words(loaded, [number])[0] for number in scores[f"{name}_id"]]
    first = ["text", "position", "token", "target", "target_id", "against", "against_id", "logit", "sum", "residual"]
    scores = scores[[*first, "scale", "model_logit", "cap", "top", "top_id", "top_logit"]]
    scores = scores.astype({"target_id": "int64", "against_id": "Int64", "top_id": "int64", "cap": "float64"})
    return LogitAttribution(table.assign(residual=residual[table["row"]]), scores, by)

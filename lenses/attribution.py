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

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor, nn

from microtome.capture.anatomy import Anatomy
from microtome.capture.batches import PaddingRecipe, make_batch, plan_batches
from microtome.capture.dissect import dissect
from microtome.capture.encoded_text import EncodedText
from microtome.capture.forward_arguments import input_device
from microtome.capture.limits import pad_id
from microtome.capture.models import LoadedModel
from microtome.capture.padding import call_options, limit_for
from microtome.capture.sites import Site
from microtome.capture.tap_plan import Read
from microtome.capture.taps import Tape, taps
from microtome.capture.text_source import TextSource, text_source
from microtome.lenses.attribution_rows import Places, Positions, Tokens, token_numbers, wanted_positions
from microtome.lenses.frozen_norm import FrozenNorm, frozen_norm
from microtome.lenses.stream_terms import BackStep, LastMap, StreamTerm, back_steps, double, last_map
from microtome.lenses.unembedding import Unembedding, unembedding_of

MAX_TOKENS = 1024
LARGEST_NEURONS = 100
By = Literal["layer", "head", "neuron", "token"]


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
        return (
            f"LogitAttribution({len(self.logits)} logits by {self.by}, {len(self.table)} parts, residual {worst:.1e})"
        )

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
    by: By = "head",
    largest_neurons: int = LARGEST_NEURONS,
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
        against: a second token; then the difference of the two logits is split.
        by: "layer" (one part per contribution), "head", "neuron" (heads, and neurons of every MLP), or "token" (heads
            by source token).
        largest_neurons: how many neurons of a row are named, all layers together; the rest is one part per layer.
        max_tokens: padded tokens in one forward.
        encoding: as for `capture`, such as add_special_tokens.

    Raises:
        ValueError: another `by`, no plain language model, a stream or norm that cannot be split (the reason is said),
            a target that is not one token, parts that do not sum to the logit.
        IndexError: a position that a text does not have.
    """
    if by not in ("layer", "head", "neuron", "token"):
        raise ValueError(f"by={by!r}; give 'layer', 'head', 'neuron' or 'token'.")
    loaded = model if isinstance(model, LoadedModel) else LoadedModel.from_module(model, name=type(model).__name__)
    module = loaded.module
    if module.training:
        raise ValueError(f"{type(module).__name__} is in training mode. Call model.eval() first.")
    anatomy = dissect(module) if anatomy is None else anatomy
    parts = _Parts.of(module, anatomy, by, largest_neurons)
    source = text_source(texts, loaded, **encoding)
    if not isinstance(source, TextSource):
        raise ValueError("texts are ready model inputs; attribution needs strings or token ids.")
    rows = source.encode(0, len(source)).rows
    wanted = wanted_positions(positions, rows)
    ids = [
        token_numbers(tokens, loaded.tokenizer, parts.end.vocab, len(rows), name)
        for name, tokens in (("target", target), ("against", against))
    ]
    recipe = anatomy.padding or PaddingRecipe()
    limits = {"max_tokens": max_tokens} | ({} if anatomy.padding is not None else {"max_rows": 1})
    tables, logits = [], []
    for row_ids in plan_batches([row.length for row in rows], **limits):
        batch = make_batch(
            rows, row_ids, pad_id=pad_id(module, loaded.tokenizer), recipe=recipe, device=input_device(module)
        )
        places = Places.of_batch(row_ids, batch.attention_mask, wanted)
        with torch.no_grad(), taps(module, parts.reads(places), anatomy=anatomy) as tape:
            module(**batch.model_inputs(), **call_options(module))
        made = parts.split(tape, places, rows, *([None if x is None else [x[t] for t in places.texts] for x in ids]))
        tables.append(made[0])
        logits.append(made[1])
    return _assembled(tables, logits, by, loaded, limit_for(module), anatomy.model_class)


@dataclass(frozen=True, eq=False)
class _Parts:
    """What is read of a model, and how a row's logit falls into parts."""

    by: By
    largest_neurons: int
    end: Unembedding
    norm: FrozenNorm | None
    steps: list[BackStep]
    maps: dict[Site, LastMap]
    head_columns: dict[Site, Tensor]
    first: Site
    last: Site
    has_embed: bool
    limit: float

    @classmethod
    def of(cls, module: nn.Module, anatomy: Anatomy, by: By, largest_neurons: int) -> "_Parts":
        end, steps = unembedding_of(module, anatomy), back_steps(module, anatomy)
        maps: dict[Site, LastMap] = {}
        columns: dict[Site, Tensor] = {}
        for step in steps:
            if (term := step.term) is None or by == "layer":
                continue
            if term.role == "attention":
                tap = anatomy.tap(term.block.site("head_out"))  # says why where heads have no writes
                maps[term.site] = last_map(module, tap.through, term.point, anatomy.d_model)
                columns[term.site] = tap.heads.columns.cpu()
            elif term.role == "mlp" and by == "neuron":
                tap = anatomy.tap(term.block.site("mlp_act"))
                maps[term.site] = last_map(module, tap.point.module, term.point, anatomy.d_model)
        return cls(
            by,
            largest_neurons,
            end,
            None if end.norm is None else frozen_norm(end.norm, anatomy.d_model),
            steps,
            maps,
            columns,
            anatomy.main[0].site("resid_pre"),
            anatomy.main[-1].site("resid_post"),
            Site("embed") in anatomy.taps,
            limit_for(module),
        )

    @property
    def terms(self) -> list[StreamTerm]:
        return [step.term for step in self.steps if step.term is not None]

    def reads(self, places: Places) -> list[Read]:
        at_rows = [self.first, self.last, Site("logits"), *(term.site for term in self.terms)]
        at_rows += [Site("embed")] if self.has_embed else []
        at_rows += [t.block.site("z" if t.role == "attention" else "mlp_act") for t in self.terms if t.site in self.maps]
        reads = [Read(site, select=places.pick) for site in dict.fromkeys(at_rows)]
        if self.by == "token":
            for term in self.terms:
                if term.site in self.maps:
                    reads += [Read(term.block.site("pattern"), queries=places.queries), Read(term.block.site("v"))]
        return reads

    def split(
        self,
        tape: Tape,
        places: Places,
        texts: tuple[EncodedText, ...],
        target: list[int] | None,
        against: list[int] | None,
    ) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Parts and logits of a batch's rows; `row` counts within the batch."""
        stream, logits = double(tape[self.last]), double(tape["logits"])
        top_logit, top = logits.max(-1)
        chosen = top if target is None else torch.tensor(target)
        direction, bias, model_logit = self._unembedded(chosen, logits)
        scores = {
            "text": places.texts,
            "position": places.positions,
            "token": [texts[t].tokens[p] for t, p in zip(places.texts, places.positions, strict=True)],
            "target_id": chosen,
            "against_id": pd.NA,
            "model_logit": model_logit,
            "cap": self.end.cap,
            "top_id": top,
            "top_logit": top_logit,
        }
        if against is not None:
            minus = self._unembedded(torch.tensor(against), logits)
            direction, bias, model_logit = (a - b for a, b in zip((direction, bias, model_logit), minus, strict=True))
            scores |= {"against_id": against, "model_logit": model_logit}
        normed = stream if self.norm is None else self.norm(stream)
        # before a cap the model has no tensor of this logit: it is made from the final stream, and checked behind it
        exact = (normed * direction).sum(-1) + bias
        scores["logit"] = model_logit if self.end.cap is None else exact
        scale = torch.ones(len(stream), dtype=torch.float64) if self.norm is None else self.norm.scale(stream)
        scores["scale"] = scale
        if self.end.cap is not None:
            self._check_cap(exact, model_logit, against is not None)

        lines = _Lines(places)
        weight = direction if self.norm is None else self.norm.back(direction, scale)
        for step in self.steps:
            if step.term is not None:
                self._split_term(step.term, weight * step.factor, tape, places, texts, lines)
            elif step.is_shift:
                lines.add("trunk shift", (weight * step.factor).sum(-1), layer=step.layer)
            else:
                weight = weight * step.factor
        self._split_start(weight, tape, lines)
        if self.norm is not None and bool(self.norm.shift.any()):
            lines.add("norm shift", direction @ self.norm.shift)
        if self.end.bias is not None:
            lines.add("unembedding bias", bias)
        return lines.table(self.largest_neurons), pd.DataFrame({k: np.asarray(v) if isinstance(v, Tensor) else v for k, v in scores.items()})

    def _unembedded(self, ids: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight, factor = self.end.weight, self.end.factor
        direction = factor * double(weight[ids.to(weight.device)])
        bias = torch.zeros(len(ids), dtype=torch.float64)
        if self.end.bias is not None:
            bias = factor * double(self.end.bias[ids.to(weight.device)])
        return direction, bias, logits.gather(1, ids[:, None])[:, 0]

    def _check_cap(self, exact: Tensor, model_logit: Tensor, is_difference: bool) -> None:
        if is_difference:  # a difference of capped logits is not a function of the difference
            return
        cap = float(self.end.cap)
        error = float((cap * torch.tanh(exact / cap) - model_logit).abs().max())
        if error > 10 * self.limit * cap:
            raise ValueError(f"Logits behind the cap of {cap:g} miss the model's by {error:.1e}; they cannot be split.")

    def _split_start(self, weight: Float64[Tensor, "row d_model"], tape: Tape, lines: "_Lines") -> None:
        start = double(tape[self.first])
        if not self.has_embed or (embed := double(tape["embed"])).shape != start.shape:
            lines.add("embed", (start * weight).sum(-1))
            return
        # scaled embeddings are embeddings; a plain sum's factor is 1
        factor = float((embed * start).sum() / embed.square().sum().clamp(min=1e-300))
        if not torch.allclose(start, factor * embed, rtol=1e-4, atol=1e-4 * float(start.abs().max())):
            factor = 1.0
        lines.add("embed", factor * (embed * weight).sum(-1))
        rest = ((start - factor * embed) * weight).sum(-1)
        if factor == 1.0 and bool((rest.abs() > 1e-12).any()):
            lines.add("embed rest", rest)

    def _split_term(
        self,
        term: StreamTerm,
        weight: Float64[Tensor, "row d_model"],
        tape: Tape,
        places: Places,
        texts: tuple[EncodedText, ...],
        lines: "_Lines",
    ) -> None:
        layer, whole = term.block.layer, (double(tape[term.site]) * weight).sum(-1)
        if (last := self.maps.get(term.site)) is None:
            lines.add(term.role, whole, layer=layer)
            return
        is_attention = term.role == "attention"
        inputs = double(tape[term.block.site("z" if is_attention else "mlp_act")])
        if is_attention:
            columns = self.head_columns[term.site]
            flat = torch.zeros(len(inputs), columns.numel(), dtype=torch.float64)
            flat[:, columns.flatten()] = inputs.flatten(1)
            back, bias, shift = last.back(weight, flat)
            back = back[:, columns.flatten()].view_as(inputs)
            values = (inputs * back).sum(-1)
        else:
            back, bias, shift = last.back(weight, inputs)
            values = inputs * back
        missed = float((values.sum(1) + bias + shift - whole).abs().max())
        if missed > 10 * self.limit * float(values.abs().sum(1).max() + whole.abs().max()):
            raise ValueError(
                f"{term.site} is not the sum of its {'heads' if is_attention else 'neurons'} and a bias (off by "
                f"{missed:.1e}): another map or an unknown norm is between. Call logit_attribution(..., by='layer')."
            )
        if not is_attention:
            lines.add_neurons(layer, values)
        elif self.by == "token":
            self._split_sources(term, back, values, tape, places, texts, lines)
        else:
            lines.add("attention", values, layer=layer, head=np.arange(values.shape[1]))
        if bool(last.bias.any()):
            lines.add(f"{term.role} bias", bias, layer=layer)
        if last.post_norm is not None and bool(last.post_norm.shift.any()):
            lines.add("post-norm shift", shift, layer=layer)

    def _split_sources(
        self,
        term: StreamTerm,
        back: Float64[Tensor, "row head d_head"],
        values: Float64[Tensor, "row head"],
        tape: Tape,
        places: Places,
        texts: tuple[EncodedText, ...],
        lines: "_Lines",
    ) -> None:
        carried, pattern = double(tape[term.block.site("v")]), double(tape[term.block.site("pattern")])
        carried = carried.repeat_interleave(back.shape[1] // carried.shape[2], 2)
        batch_row = places.batch_row.cpu()
        pattern = pattern[batch_row, :, places.slot.cpu()]
        for row, slot in enumerate(batch_row.tolist()):  # rows have keys of their own number
            sources = pattern[row] * torch.einsum("khd,hd->hk", carried[slot], back[row])
            missed = float((sources.sum(1) - values[row]).abs().max())
            if missed > 10 * self.limit * float(sources.abs().sum(1).max()):
                raise ValueError(
                    f"{term.block.site('z')} is not pattern times values (off by {missed:.1e}): a gate or norm acts "
                    "between attention and the output projection. Call logit_attribution(..., by='head')."
                )
            real = places.mask[slot].bool().cpu()
            lines.add_sources(row, term.block.layer, sources[:, real], texts[places.texts[row]].tokens)


class _Lines:
    """Collects parts of a batch's rows as columns."""

    def __init__(self, places: Places):
        self._places, self._frames, self._neurons = places, [], []

    def add(
        self, component: str, values: Float64[Tensor, "row *part"], layer: int | None = None, head: Any = None
    ) -> None:
        """One value per row, or one per row and head."""
        n, each = len(values), values[0].numel()
        self._frames.append(
            {
                "row": np.repeat(np.arange(n), each),
                "component": component,
                "layer": layer,
                "head": None if head is None else np.tile(head, n),
                "value": values.flatten().numpy(),
            }
        )

    def add_neurons(self, layer: int, values: Float64[Tensor, "row neuron"]) -> None:
        """Kept until all layers are there, so that the largest can be chosen among them."""
        self._neurons.append((layer, values))

    def add_sources(
        self, row: int, layer: int, values: Float64[Tensor, "head source"], tokens: tuple[str, ...]
    ) -> None:
        """A head's value by source token; tokens behind the row's own, of which nothing is read, are left out."""
        position = int(self._places.positions[row])
        kept = values if bool(values[:, position + 1 :].any()) else values[:, : position + 1]
        heads, sources = kept.shape
        self._frames.append(
            {
                "row": np.full(kept.numel(), row),
                "component": "attention",
                "layer": layer,
                "head": np.repeat(np.arange(heads), sources),
                "source": np.tile(np.arange(sources), heads),
                "source_token": list(tokens[:sources]) * heads,
                "value": kept.flatten().numpy(),
            }
        )

    def name_neurons(self, count: int) -> Iterator[dict]:
        """The largest neurons of every row, and the rest of each layer."""
        if not self._neurons:
            return
        layers = [layer for layer, _ in self._neurons]
        width = [values.shape[1] for _, values in self._neurons]
        layer_of, neuron_of = np.repeat(layers, width), np.concatenate([np.arange(w) for w in width])
        values = torch.cat([v for _, v in self._neurons], 1)
        largest = values.abs().topk(min(count, values.shape[1]), 1).indices
        rows = np.repeat(np.arange(len(values)), largest.shape[1])
        flat = largest.flatten().numpy()
        yield {
            "row": rows,
            "component": "neuron",
            "layer": layer_of[flat],
            "neuron": neuron_of[flat],
            "value": values.gather(1, largest).flatten().numpy(),
        }
        rest = values.scatter(1, largest, 0.0)
        for layer, part in zip(layers, rest.split(width, 1), strict=True):
            yield {
                "row": np.arange(len(values)),
                "component": "other neurons",
                "layer": layer,
                "value": part.sum(1).numpy(),
            }

    def table(self, largest_neurons: int = LARGEST_NEURONS) -> pd.DataFrame:
        frames = [*self._frames, *self.name_neurons(largest_neurons)]
        columns = ["row", "component", "layer", "head", "neuron", "source", "source_token", "value"]
        whole = {
            name: np.concatenate(
                [np.broadcast_to(np.asarray(f.get(name), dtype=object), len(f["row"])) for f in frames]
            )
            for name in columns
        }
        table = pd.DataFrame(whole).astype(
            {"row": "int64", **dict.fromkeys(("layer", "head", "neuron", "source"), "Int64"), "value": "float64"}
        )
        table.insert(1, "text", self._places.texts[table["row"]])
        table.insert(2, "position", self._places.positions[table["row"]])
        return table


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
        scores[name] = [_word(loaded.tokenizer, number) for number in scores[f"{name}_id"]]
    first = ["text", "position", "token", "target", "target_id", "against", "against_id", "logit", "sum", "residual"]
    scores = scores[[*first, "scale", "model_logit", "cap", "top", "top_id", "top_logit"]]
    scores = scores.astype({"target_id": "int64", "against_id": "Int64", "top_id": "int64", "cap": "float64"})
    return LogitAttribution(table.assign(residual=residual[table["row"]]), scores, by)


def _word(tokenizer: Any, number: Any) -> str:
    if pd.isna(number):
        return ""
    return str(int(number)) if tokenizer is None else tokenizer.decode([int(number)])

"""What is read of a model to split its logits, and how the rows of one forward fall into parts.

Each contribution is read with the direction that the logit has there (`microtome.lenses.stream_terms`), whole, by head,
by neuron, or by head and source token; every finer split is checked against the whole before it is taken.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor, nn

from microtome.capture.anatomy import Anatomy
from microtome.capture.encoded_text import EncodedText
from microtome.capture.padding import limit_for
from microtome.capture.sites import Site
from microtome.capture.tap_plan import Read
from microtome.capture.taps import Tape
from microtome.lenses.attribution_lines import AttributionLines
from microtome.lenses.attribution_rows import Places
from microtome.lenses.frozen_norm import FrozenNorm, frozen_norm
from microtome.lenses.stream_terms import BackStep, LastMap, StreamTerm, back_steps, double, last_map
from microtome.lenses.unembedding import Unembedding, unembedding_of


@dataclass(frozen=True, eq=False)
class LogitParts:
    """What is read of a model, and how a row's logit falls into parts."""

    by: str
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
    def of(cls, module: nn.Module, anatomy: Anatomy, by: str, largest_neurons: int) -> "LogitParts":
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
        split = [term for term in self.terms if term.site in self.maps]
        at_rows += [term.block.site("z" if term.role == "attention" else "mlp_act") for term in split]
        reads = [Read(site, select=places.pick) for site in dict.fromkeys(at_rows)]
        if self.by == "token":
            for term in split:
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
        if bool((wrong := ~torch.isfinite(stream).all(-1) | logits.isnan().any(-1)).any()):
            raise ValueError(
                f"The stream of text {int(places.texts[int(wrong.nonzero()[0, 0])])} or its logits are NaN or "
                "infinite. Look at that text; a model in float16 overflows at 65504, load it in float32."
            )
        top_logit, top = logits.max(-1)
        chosen = top if target is None else torch.tensor(target)
        direction, bias, model_logit = self._unembedded(chosen, logits)
        scores = {
            "text": places.texts,
            "position": places.positions,
            "token": [texts[t].tokens[p] for t, p in zip(places.texts, places.positions, strict=True)],
            "target_id": chosen.numpy(),
            "against_id": pd.NA,
            "model_logit": model_logit.numpy(),
            "cap": self.end.cap,
            "top_id": top.numpy(),
            "top_logit": top_logit.numpy(),
        }
        if against is not None:
            minus = self._unembedded(torch.tensor(against), logits)
            direction, bias, model_logit = (a - b for a, b in zip((direction, bias, model_logit), minus, strict=True))
            scores |= {"against_id": against, "model_logit": model_logit.numpy()}
        normed = stream if self.norm is None else self.norm(stream)
        # before a cap the model has no tensor of this logit: it is made from the final stream, and checked behind it
        exact = (normed * direction).sum(-1) + bias
        scores["logit"] = (model_logit if self.end.cap is None else exact).numpy()
        scale = torch.ones(len(stream), dtype=torch.float64) if self.norm is None else self.norm.scale(stream)
        scores["scale"] = scale.numpy()
        if self.end.cap is not None:
            self._check_cap(exact, model_logit, against is not None)

        lines = AttributionLines(places)
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
        return lines.table(self.largest_neurons), pd.DataFrame(
            {k: np.asarray(v) if isinstance(v, Tensor) else v for k, v in scores.items()}
        )

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

    def _split_start(self, weight: Float64[Tensor, "row d_model"], tape: Tape, lines: "AttributionLines") -> None:
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
        lines: "AttributionLines",
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
        lines: "AttributionLines",
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

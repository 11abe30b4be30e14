"""One batch of the causal test: a clean forward, a forward for each thing that is written, sums by text.

    for each batch: clean -> for each operator, number of tokens, condition: spliced -> KL, agreement, nats by text

Only what the unembedding reads is kept of a forward, and only the blocks behind the target run again (`still_blocks`).
Positions before the first one written over are the clean ones and are not scored again; the conditions of one operator
and number go through the vocabulary together, so that the clean side is computed once and no tensor of tokens x
vocabulary is made.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from microtome.capture.batches import Batch, PaddingRecipe, make_batch
from microtome.capture.forward_arguments import input_device
from microtome.capture.padding import call_options
from microtome.capture.sites import Site
from microtome.capture.still_blocks import blocks_standing_still, outputs_kept
from microtome.capture.tap_plan import Read
from microtome.capture.taps import Tape, taps
from microtome.kernels.vocabulary_statistics import vocabulary_cross_entropy, vocabulary_statistics
from microtome.lenses.corpus_pass import CorpusPass
from microtome.lenses.strata import TokenRule
from microtome.lenses.transport.routes import NO_SOURCE, source_columns
from microtome.lenses.transport.splice import splice_edits
from microtome.lenses.transport.splice_conditions import Splice
from microtome.lenses.transport.splice_positions import At, spliced_tokens
from microtome.lenses.transport.still_layers import still_layers
from microtome.lenses.unembedding import Unembedding

# of each text and case: "spliced" are the tokens written over, "later" the others behind the first of them; nats are
# of the tokens that follow the first one written over
SUMS = (
    *("spliced", "sinks", "kl_spliced", "agrees_spliced", "later", "kl_later", "agrees_later"),
    *("tokens", "nats", "clean_nats"),
)
TEXT_SUMS = ("tokens", "nats", "sinks")  # of each text: predicted tokens, their clean nats, tokens that are sinks


@dataclass(frozen=True, eq=False)
class SplicePass:
    """What is run, the same for every batch.

    Attributes:
        plan: texts, model and the one site that the unembedding reads.
        end: the unembedding.
        splices, at: operators with their controls; numbers of tokens.
        conditions: of each splice.
        seed, sinks, first: of the choice of tokens: whether sinks may be chosen, and from which position on.
        medians: by residual site, what massive tokens are judged by; none judges by position and token alone.
        stands: by splice, whether its first blocks may stand still: found at its first forward.
    """

    plan: CorpusPass
    end: Unembedding
    splices: tuple[Splice, ...]
    conditions: tuple[tuple[str, ...], ...]
    at: tuple[At, ...]
    seed: int
    sinks: bool
    first: int
    medians: Mapping[str, float]
    stands: dict[int, bool] = field(default_factory=dict)

    @property
    def cases(self) -> list[tuple[int, At, str]]:
        """Number of the splice, number of tokens, condition; in the order of sums."""
        return [
            (number, at, condition)
            for number, names in enumerate(self.conditions)
            for at in self.at
            for condition in names
        ]

    def run(self, number: int, tick: Callable[[int], None]) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
        """Texts of one batch, their sums `[text, case, SUMS]` and `[text, TEXT_SUMS]`. tick: tokens of each forward."""
        batch = make_batch(
            self.plan.texts,
            self.plan.batches[number],
            pad_id=self.plan.pad,
            recipe=self.plan.anatomy.padding or PaddingRecipe(),
            device=input_device(self.plan.module),
        )
        is_real = batch.attention_mask.bool()
        has_next = is_real & torch.cat([is_real[:, 1:], torch.zeros_like(is_real[:, :1])], 1)
        targets = torch.where(has_next, batch.input_ids.roll(-1, 1), -1)
        heads = {site for splice in self.splices if (site := splice.operator.route.head) is not None}
        reads = [Read(site, select=_largest) for site in self.medians if Site.parse(site) != self.plan.sites[0]]
        reads += [Read(head, queries="all") for head in heads]
        module, anatomy = self.plan.module, self.plan.anatomy
        needed = {n for splice in self.splices for n in still_layers(splice.operator, anatomy, module)[0]}
        with outputs_kept(module, anatomy, tuple(needed)) as held:
            tape = self._forward(batch, reads)
        tick(int(is_real.sum()))
        clean = tape[self.plan.sites[0]]
        sink = self._sinks(batch, is_real, tape)
        nats = torch.zeros(targets.shape, dtype=torch.float64)
        nats[has_next.cpu()] = self._nats(clean, has_next, targets)
        of_text = torch.stack([has_next.sum(1).cpu(), nats.sum(1), sink.sum(1).cpu()], 1).double().numpy()
        sums = np.zeros((len(is_real), len(self.cases), len(SUMS)))
        case = 0
        for n, (splice, names) in enumerate(zip(self.splices, self.conditions, strict=True)):
            allowed = self._allowed(splice, batch, is_real, sink, tape)
            chosen, _ = spliced_tokens(allowed, has_next, batch.input_ids, is_real, self.at, self.seed)
            for at in self.at:
                mask = chosen[at]
                rows = is_real & (mask.cumsum(1) > 0)
                here = slice(case, case + len(names))
                case = here.stop
                if not bool(mask.any()):
                    tick(int(is_real.sum()) * len(names))
                    continue
                count = self._stands(n, batch, mask, is_real, held)
                states = []
                for condition in names:
                    edits = splice_edits(
                        splice.operator,
                        mask,
                        is_real=is_real,
                        token_ids=batch.input_ids,
                        by=splice.writer(condition),
                    )
                    with blocks_standing_still(module, anatomy, held, count):
                        states.append(self._forward(batch, [], edits, rows)[self.plan.sites[0]])
                    tick(int(is_real.sum()))
                found = self._statistics(torch.stack(states), clean, rows, targets)
                sums[:, here] = _sums(found, mask, rows, has_next, sink, nats)
                _require_numbers(sums[:, here], splice, names, at, batch.row_ids)
        return batch.row_ids, sums, of_text

    def _stands(self, n: int, batch: Batch, mask: Tensor, is_real: Tensor, held: Mapping[int, Any]) -> int:
        """How many blocks may stand still: none where the operator's own splice then differs in any bit."""
        splice, last = self.splices[n], self.plan.sites[0]
        needed, count = still_layers(splice.operator, self.plan.anatomy, self.plan.module)
        if not count or not set(needed) <= set(held):
            return 0
        if n not in self.stands:
            edits = splice_edits(splice.operator, mask, is_real=is_real, token_ids=batch.input_ids)
            with blocks_standing_still(self.plan.module, self.plan.anatomy, held, count):
                still = self._forward(batch, [], edits, is_real)[last]
            self.stands[n] = torch.equal(still, self._forward(batch, [], edits, is_real)[last])
        return count if self.stands[n] else 0

    def _forward(
        self,
        batch: Batch,
        reads: Sequence[Read],
        edits: Any = None,
        rows: Bool[Tensor, "batch token"] | None = None,
    ) -> Tape:
        def chosen(value: Tensor) -> Tensor:
            return value if rows is None else value[rows.to(value.device)]

        last = Read(self.plan.sites[0], select=chosen)
        module = self.plan.module
        with (
            torch.no_grad(),
            taps(module, [last, *reads], edits, anatomy=self.plan.anatomy, stop=True) as tape,
        ):
            module(**batch.model_inputs(), **call_options(module))
        return tape

    def _sinks(self, batch: Batch, is_real: Tensor, tape: Tape) -> Bool[Tensor, "batch token"]:
        sink = is_real & (is_real.long().cumsum(1) == 1)
        special = torch.cat([self.plan.texts[text].is_special for text in batch.row_ids]).to(is_real.device)
        sink[is_real.nonzero(as_tuple=True)] |= special
        rule = TokenRule()
        for site, median in self.medians.items():
            value = tape[site]
            largest = value if value.dim() == 2 else _largest(value)
            sink |= is_real & (largest.to(is_real.device) > rule.threshold(median))
        return sink

    def _allowed(
        self, splice: Splice, batch: Batch, is_real: Tensor, sink: Tensor, tape: Tape
    ) -> Bool[Tensor, "batch token"]:
        allowed = is_real if self.sinks else is_real & ~sink
        allowed = allowed & (is_real.long().cumsum(1) > self.first)
        route = splice.operator.route
        if route.is_same:
            return allowed
        pattern = None if route.head is None else tape[route.head].to(is_real.device)
        return allowed & (source_columns(route, is_real, pattern, batch.input_ids) != NO_SOURCE)

    def _nats(self, clean: Tensor, rows: Tensor, targets: Tensor) -> Float64[Tensor, " row"]:
        if not bool(rows.any()):
            return torch.zeros(0, dtype=torch.float64)
        states, end = clean[rows.to(clean.device)].to(self.end.weight.device), self.end
        ids = targets[rows].to(states.device)
        options = {"bias": end.bias, "factor": end.factor, "cap": end.cap}
        return vocabulary_cross_entropy(states[None], ids, end.weight, **options)[0].double().cpu()

    def _statistics(
        self,
        states: Float[Tensor, "condition row d_model"],
        clean: Float[Tensor, "batch token d_model"],
        rows: Bool[Tensor, "batch token"],
        targets: Int[Tensor, "batch token"],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """KL, agreement and log p of the target by condition and row, on the CPU."""
        home, end = self.end.weight.device, self.end
        final, ids = clean[rows.to(clean.device)].to(home), targets[rows].to(home)
        options = {"bias": end.bias, "factor": end.factor, "cap": end.cap}
        found = vocabulary_statistics(states.to(home), end.weight, final=final, targets=ids, top=1, **options)
        assert found.kl is not None
        assert found.agrees is not None
        assert found.target_log_prob is not None
        return found.kl.double().cpu(), found.agrees.double().cpu(), found.target_log_prob.double().cpu()


def _largest(value: Float[Tensor, "batch token d_model"]) -> Float[Tensor, "batch token"]:
    return torch.maximum(value.amax(2), -value.amin(2))


def _sums(
    found: tuple[Tensor, Tensor, Tensor],
    mask: Bool[Tensor, "batch token"],
    later: Bool[Tensor, "batch token"],
    has_next: Bool[Tensor, "batch token"],
    sink: Bool[Tensor, "batch token"],
    clean_nats: Float[Tensor, "batch token"],
) -> np.ndarray:
    """`[text, condition, SUMS]` of rows, text after text."""
    mask, later, has_next, sink = (one.cpu() for one in (mask, later, has_next, sink))
    kl, agrees, log_prob = found
    text, spliced, scored = later.nonzero()[:, 0], mask[later].double(), has_next[later].double()
    nats = -torch.where(has_next[later], log_prob, 0.0)
    own_nats = clean_nats[later] * scored
    ones = torch.ones_like(kl)
    rows = {
        "spliced": ones * spliced,
        "sinks": ones * (sink & mask)[later],
        "kl_spliced": kl * spliced,
        "agrees_spliced": agrees * spliced,
        "later": ones * (1 - spliced),
        "kl_later": kl * (1 - spliced),
        "agrees_later": agrees * (1 - spliced),
        "tokens": ones * scored,
        "nats": nats,
        "clean_nats": ones * own_nats,
    }
    stacked = torch.stack([rows[name] for name in SUMS], -1)
    sums = torch.zeros(len(kl), len(mask), len(SUMS), dtype=torch.float64).index_add_(1, text, stacked)
    return sums.transpose(0, 1).numpy()


def _require_numbers(sums: np.ndarray, splice: Splice, names: Sequence[str], at: At, texts: Sequence[int]) -> None:
    if np.isfinite(sums).all():
        return
    row, condition, _ = (int(place[0]) for place in np.nonzero(~np.isfinite(sums)))
    raise ValueError(
        f"{names[condition]} written at {splice.operator.target} ({at} tokens) gives NaN or infinity in text "
        f"{texts[row]}. Load the model in float32, or leave the text out."
    )

"""Rows of held-out texts for transport: each batch's values, the tokens that count, and where each one's source lies.

A row is a target token j with its source token i by a route. It counts where j is in the stratum and i exists; with
stratum "rest" i must be in it too (a sink as the source is one near-constant vector), unless the route is "with sinks".
Sinks are those of `TokenRule`, as in moments; give `medians` of the moments that the operators came from, so that both
judge massive tokens alike: without them the thresholds come from the first batch, as they do in `moments_of`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor, nn

from microtome.capture.anatomy import Anatomy
from microtome.capture.batches import MAX_TOKENS, PaddingRecipe, make_batch
from microtome.capture.dissect import dissect
from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.capture.tap_plan import Edit
from microtome.lenses.corpus_pass import Chunk, CorpusPass, corpus_pass
from microtome.lenses.documents import document_numbers
from microtome.lenses.moments_pass import expand_sites
from microtome.lenses.strata import STRATA, TokenRule, ordinary_median
from microtome.lenses.transport.routes import NO_SOURCE, Route, source_columns

_MEDIAN_ROWS = 2048  # as in moments


@dataclass(frozen=True, eq=False)
class TransportRows:
    """One batch.

    Attributes:
        values: by the site's name, `[token, width]`, of every real token.
        document: of each token, from 0 to the number of documents.
        is_kept: tokens of the stratum.
        sources: by route, the row of each token's source, -1 where it has none.
        needs_kept: whether a source must be of the stratum too.
    """

    values: Mapping[str, Tensor]
    document: Int64[Tensor, " token"]
    is_kept: Bool[Tensor, " token"]
    sources: Mapping[Route, Int64[Tensor, " token"]]
    needs_kept: bool

    def pairs(self, route: Route) -> tuple[Int64[Tensor, " row"], Int64[Tensor, " row"]]:
        """Tokens of the targets that count, and of their sources."""
        source = self.sources[route]
        counts = self.is_kept & (source != NO_SOURCE)
        if self.needs_kept and not route.sinks:
            counts &= self.is_kept[source.clamp_min(0)]
        target = counts.nonzero()[:, 0]
        return target, source[target]


@dataclass(frozen=True, eq=False)
class TransportPass:
    """A pass over texts that is planned; `batches()` runs it.

    Attributes:
        documents: number of different ones; a document's place among them is what rows carry.
    """

    job: CorpusPass
    sites: tuple[Site, ...]
    routes: tuple[Route, ...]
    document_of: Int64[Tensor, " text"]
    documents: int
    stratum: str
    rule: TokenRule
    medians: Mapping[str, float]
    pattern: dict[Site, Tensor]

    def batches(self) -> Iterator[TransportRows]:
        """Batch after batch; nothing is kept."""
        medians = dict(self.medians)
        for chunk in self.job.chunks():
            named = {str(site): value.flatten(1) for site, value in chunk.values.items()}
            is_sink = self._reasons(chunk, named, medians) > 0
            is_kept = {"rest": ~is_sink, "sinks": is_sink, "all": torch.ones_like(is_sink)}[self.stratum]
            yield TransportRows(
                {str(site): named[str(site)] for site in self.sites},
                self.document_of[chunk.text.cpu()],
                is_kept,
                self._sources(chunk.number),
                self.stratum == "rest",
            )

    def _reasons(self, chunk: Chunk, named: Mapping[str, Tensor], medians: dict[str, float]) -> Tensor:
        looked_at = {name: named[name] for name in self.rule.sites(list(named))}
        ordinary = ((chunk.position != 0) & ~chunk.is_special)[:_MEDIAN_ROWS]
        for name, rows in looked_at.items():
            if name not in medians:
                medians[name] = ordinary_median(rows[:_MEDIAN_ROWS], ordinary)
        return self.rule.reasons(chunk.position, chunk.is_special, looked_at, medians)

    def _sources(self, number: int) -> dict[Route, Tensor]:
        recipe = self.job.anatomy.padding or PaddingRecipe()
        batch = make_batch(
            self.job.texts, self.job.batches[number], pad_id=self.job.pad, recipe=recipe, device=torch.device("cpu")
        )
        is_real = batch.attention_mask.bool()
        row_of = (is_real.flatten().cumsum(0) - 1).view(is_real.shape)
        found = {}
        for route in self.routes:
            pattern = None if route.head is None else self.pattern[route.head].cpu()
            columns = source_columns(route, is_real, pattern)
            rows = torch.where(columns == NO_SOURCE, NO_SOURCE, row_of.gather(1, columns.clamp_min(0)))
            found[route] = rows[is_real]
        return found


def transport_pass(
    model: LoadedModel | nn.Module,
    texts: Any,
    sites: Sequence[str],
    routes: Sequence[Route] = (Route(),),
    *,
    documents: Any = None,
    stratum: str = "rest",
    rule: TokenRule | None = None,
    medians: Mapping[str, float] | None = None,
    max_tokens: int = MAX_TOKENS,
    **encoding: Any,
) -> TransportPass:
    """Plan a pass; nothing runs yet.

    Args:
        model: from `load_model`, or a transformers module in eval mode.
        texts: held-out ones: strings, message lists or token ids.
        sites: to read.
        routes: whose sources are wanted.
        documents: name or number of each text's document; each its own if None.
        stratum: "rest" (neither sinks nor BOS), "sinks" or "all".
        rule, medians: which tokens are sinks; `Moments.rule` and `Moments.medians` for those of moments.
        max_tokens: padded tokens per batch.
        encoding: truncate, max_length, add_special_tokens, as for `capture`.

    Raises:
        ValueError: another stratum, documents of another number, texts that are none.
        KeyError, IndexError: a site that the model does not offer.
    """
    if stratum not in STRATA:
        raise ValueError(f"stratum is {stratum!r}; there are {STRATA}.")
    anatomy = dissect(model.module if isinstance(model, LoadedModel) else model)
    wanted = anatomy.expand(list(sites))
    rule = _with_sites(rule or TokenRule(), anatomy)
    looked_at = [site for name in rule.sites([]) if (site := Site.parse(name)) not in wanted]
    pattern: dict[Site, Tensor] = {}
    routes = tuple(dict.fromkeys(routes))

    def keep(head: Site) -> Edit:
        def function(value: Tensor) -> Tensor:
            pattern[head] = value.detach()
            return torch.zeros_like(value)

        return Edit(function, queries="all")

    heads = {route.head: keep(route.head) for route in routes if route.head is not None}
    job = corpus_pass(
        model, texts, [*wanted, *looked_at], anatomy=anatomy, edits=heads, max_tokens=max_tokens, **encoding
    )
    numbers = document_numbers(documents, len(job.texts))
    codes = torch.from_numpy(numbers).unique(return_inverse=True)[1]
    return TransportPass(
        job,
        tuple(wanted),
        routes,
        codes,
        int(codes.max()) + 1,
        stratum,
        rule,
        dict(medians or {}),
        pattern,
    )


def _with_sites(rule: TokenRule, anatomy: Anatomy) -> TokenRule:
    """Massive tokens are looked for at every residual depth, so that strata do not depend on the sites read."""
    if not rule.massive or rule.looked_at is not None:
        return rule
    try:
        return replace(rule, looked_at=tuple(map(str, expand_sites(anatomy, "resid"))))
    except KeyError:  # a model without a residual stream that was found
        return rule

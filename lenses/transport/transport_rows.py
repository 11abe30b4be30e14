"""Rows of held-out texts for transport: each batch's values, the tokens that count, and where each one's source lies.

Rows are those of `routed_moments` of one route alone: each target token that has a source, a sink if either is one
(`route_rows`). Tokens are judged by `TokenRule`, as in moments; give `medians` of the moments that the operators came
from, so that both judge massive tokens alike: without them the thresholds come from the first batch, as they do there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from microtome.capture.batches import MAX_TOKENS
from microtome.capture.dissect import dissect
from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.lenses.corpus_pass import Chunk, CorpusPass, corpus_pass
from microtome.lenses.documents import document_numbers
from microtome.lenses.moments import CHUNK
from microtome.lenses.moments_pass import rule_of
from microtome.lenses.strata import STRATA, TokenRule, ordinary_median
from microtome.lenses.transport.route_rows import row_reasons, source_rows
from microtome.lenses.transport.routes import NO_SOURCE, Route


@dataclass(frozen=True, eq=False)
class TransportRows:
    """One batch.

    Attributes:
        values: by the site's name, `[token, width]`, of every real token.
        document: of each token, from 0 to the number of documents.
        reasons: of each token, as a number of `strata.REASONS`.
        sources: by route, the row of each token's source, -1 where it has none.
        stratum: of the rows that count.
    """

    values: Mapping[str, Tensor]
    document: Int64[Tensor, " token"]
    reasons: Int64[Tensor, " token"]
    sources: Mapping[Route, Int64[Tensor, " token"]]
    stratum: str = "rest"

    def pairs(self, route: Route) -> tuple[Int64[Tensor, " row"], Int64[Tensor, " row"]]:
        """Tokens of the targets that count, and of their sources."""
        source = self.sources[route]
        target = (source != NO_SOURCE).nonzero()[:, 0]
        source = source[target]
        if self.stratum != "all":
            is_sink = row_reasons(self.reasons, target, [source]) > 0
            counts = is_sink if self.stratum == "sinks" else ~is_sink
            target, source = target[counts], source[counts]
        return target, source


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

    def batches(self) -> Iterator[TransportRows]:
        """Batch after batch; nothing is kept."""
        medians = dict(self.medians)
        for chunk in self.job.chunks():
            named = {str(site): value.flatten(1) for site, value in chunk.values.items()}
            yield TransportRows(
                {str(site): named[str(site)] for site in self.sites},
                self.document_of[chunk.text.cpu()],
                self._reasons(chunk, named, medians),
                {route: source_rows(route, chunk).cpu() for route in self.routes},
                self.stratum,
            )

    def _reasons(self, chunk: Chunk, named: Mapping[str, Tensor], medians: dict[str, float]) -> Tensor:
        looked_at = {name: named[name] for name in self.rule.sites(list(named))}
        ordinary = ((chunk.position != 0) & ~chunk.is_special)[:CHUNK]
        for name, rows in looked_at.items():
            if name not in medians:
                medians[name] = ordinary_median(rows[:CHUNK], ordinary)
        return self.rule.reasons(chunk.position, chunk.is_special, looked_at, medians)


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
        stratum: of the rows that count: "rest" (neither target nor source is set apart), "sinks" or "all".
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
    rule = rule_of(rule or TokenRule(), anatomy)
    looked_at = [site for name in rule.sites([]) if (site := Site.parse(name)) not in wanted]
    routes = tuple(dict.fromkeys(routes))
    heads = list(dict.fromkeys(route.head for route in routes if route.head is not None))
    job = corpus_pass(
        model, texts, [*wanted, *looked_at], patterns=heads, anatomy=anatomy, max_tokens=max_tokens, **encoding
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
    )

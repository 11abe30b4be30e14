"""The rows of one site over a corpus, sinks left out: what a dictionary is trained on.

Sinks are the first token of a text, special tokens and massive activations, by `strata.TokenRule`: near-constant
vectors of huge norm, which would take most of the variance and some features, and hide how well all other tokens are
rebuilt. Massive activations are looked for at the sites the rule names; at the site itself, or for a site outside the
residual stream at the stream behind its block, where it names none. What a large value is measured by is the median of
|r| in the first batch of the plan, as in `moments`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from microtome.capture.anatomy import Anatomy
from microtome.capture.dissect import dissect
from microtome.capture.fingerprint import new_fingerprint, tensor_bytes
from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.lenses.corpus_pass import Chunk, CorpusPass, corpus_pass
from microtome.lenses.strata import TokenRule, ordinary_median


@dataclass(frozen=True, eq=False)
class SiteRows:
    """A planned pass that gives the rows of one site; made by `site_rows`.

    Attributes:
        job: reads the site and where massive activations are looked for.
        site: a single one; whole heads are laid side by side.
        rule: what makes a token a sink.
        medians: of |r| at ordinary tokens, by site looked at.
        width: channels of a row.
        digest: hash of the first batch's rows: the same for the same model, texts and machine.
    """

    job: CorpusPass
    site: Site
    rule: TokenRule
    medians: Mapping[str, float]
    width: int
    digest: str

    def is_sink(self, chunk: Chunk) -> Bool[Tensor, " token"]:
        """Which tokens of a chunk are sinks; on the CPU."""
        return sinks_of(chunk, self.rule, self.medians)

    def rows_of(self, chunk: Chunk) -> Float[Tensor, "token width"]:
        """The chunk's rows without sinks, float32, on the CPU.

        Raises:
            ValueError: NaN or infinity.
        """
        kept = (~self.is_sink(chunk)).nonzero()[:, 0]
        value = chunk.values[self.site].flatten(1)
        rows = value[kept.to(value.device)].float().cpu()
        if not bool(torch.isfinite(rows).all()):
            raise ValueError(f"{self.site} holds NaN or infinity in batch {chunk.number}. Load the model in float32.")
        return rows

    def of_batches(self, numbers: tuple[int, ...]) -> Float[Tensor, "row width"]:
        """Rows of these batches of the plan, in the order given."""
        parts = [self.rows_of(chunk) for number in numbers for chunk in self._one(number)]
        return torch.cat(parts) if parts else torch.empty(0, self.width)

    def blocks(self, most: int, *, seed: int, epoch: int) -> list[tuple[int, ...]]:
        """The batches in blocks of about `most` tokens at the most, one batch at least.

        One block of all in the plan's order where all fit, so that its rows may be kept; else in an order of the epoch.
        """
        if self.job.tokens <= most:
            return [tuple(range(len(self.job.batches)))]
        order = np.random.default_rng([seed, 1, epoch]).permutation(len(self.job.batches)).tolist()
        blocks: list[list[int]] = [[]]
        held = 0
        for number in order:
            count = self.job.tokens_of(number)
            if blocks[-1] and held + count > most:
                blocks.append([])
                held = 0
            blocks[-1].append(number)
            held += count
        return [tuple(block) for block in blocks]

    def _one(self, number: int) -> Iterator[Chunk]:
        yield next(self.job.chunks(start=number))


def site_rows(
    model: LoadedModel | nn.Module,
    texts: Any,
    site: str | tuple | Site,
    *,
    rule: TokenRule | None = None,
    anatomy: Anatomy | None = None,
    **options: Any,
) -> SiteRows:
    """Plan the pass and run its first batch, for medians and width.

    Args:
        rule: which tokens are sinks, `TokenRule()` if None; `NO_SINKS` leaves none out.
        options: of the texts, as `corpus_pass` takes them.

    Raises:
        ValueError: a name that stands for several sites, or what `corpus_pass` refuses.
        KeyError, IndexError: a site that this model does not offer.
    """
    anatomy = dissect(model.module if isinstance(model, LoadedModel) else model) if anatomy is None else anatomy
    found = anatomy.expand(site)
    if len(found) != 1:
        raise ValueError(f"{site} stands for {len(found)} sites, and a dictionary is of one. Name the layer.")
    chosen = found[0]
    rule = looked_at_near(rule or TokenRule(), chosen)
    watched = [each for each in anatomy.expand(list(rule.sites([]))) if each != chosen] if rule.massive else []
    job = corpus_pass(model, texts, [chosen, *watched], anatomy=anatomy, **options)
    first = next(job.chunks())
    value = first.values[chosen].flatten(1)
    digest = new_fingerprint()
    digest.update(tensor_bytes(value.contiguous().cpu()))
    return SiteRows(job, chosen, rule, medians_of(first, rule), value.shape[1], digest.hexdigest())


NO_SINKS = TokenRule(first=False, special=False, massive=False)


def looked_at_near(rule: TokenRule, site: Site) -> TokenRule:
    """The rule with a place to look for massive activations: the site, or the stream behind its block."""
    if not rule.massive or rule.looked_at is not None:
        return rule
    if site.kind in ("resid_pre", "resid_mid", "resid_post"):
        return replace(rule, looked_at=(str(site),))
    if site.layer is None:
        return replace(rule, massive=False)
    return replace(rule, looked_at=(str(Site("resid_post", site.layer, stack=site.stack)),))


def medians_of(chunk: Chunk, rule: TokenRule) -> dict[str, float]:
    """Median of |r| at the ordinary tokens of a chunk, by site looked at."""
    ordinary = (chunk.position > 0) & ~chunk.is_special
    return {name: ordinary_median(chunk.values[Site.parse(name)], ordinary) for name in rule.sites([])}


def sinks_of(chunk: Chunk, rule: TokenRule, medians: Mapping[str, float]) -> Bool[Tensor, " token"]:
    """Which tokens of a chunk are sinks; on the CPU."""
    looked_at = {name: chunk.values[Site.parse(name)] for name in rule.sites([])}
    return rule.reasons(chunk.position, chunk.is_special, looked_at, medians) > 0

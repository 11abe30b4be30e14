"""Moments across models that share a tokenizer: one pass of each over the same batches, all values into one `Moments`.

    moments = moments_of_models({"a": model, "b": other}, texts, documents=documents, save="runs/a_b")
    moments.pair("a/resid_post.3", "b/resid_post.9", "test")

Sites are named "model/site". Row t of all models is the same token of the same text, which is checked. A token is a
sink if one of the models treats it as one: massive activations are looked for at every residual site of each.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from microtome.capture.batches import MAX_TOKENS
from microtome.capture.dissect import dissect
from microtome.capture.encoded_text import EncodedText
from microtome.capture.models import LoadedModel
from microtome.capture.running_model import running_model
from microtome.capture.sites import Site
from microtome.capture.tap_plan import SiteName
from microtome.lenses.corpus_pass import Chunk, CorpusPass, corpus_pass
from microtome.lenses.document_shards import SHARES, shards_by_document
from microtome.lenses.documents import document_numbers
from microtome.lenses.moments import CHUNK, Moments
from microtome.lenses.moments_pass import Shards, expand_sites, rule_of, widths_of
from microtome.lenses.resumed_moments import accumulate
from microtome.lenses.site_pairs import Pairs, SiteKey, site_name
from microtome.lenses.strata import TokenRule

Models = Mapping[str, LoadedModel | nn.Module]
Sites = Sequence[SiteName] | SiteName | Mapping[str, Sequence[SiteName] | SiteName]


@dataclass(frozen=True, eq=False)
class JointPass:
    """Passes of several models over the same batches.

    Attributes:
        parts: by name; of the same texts and batches.
    """

    parts: Mapping[str, CorpusPass]

    @property
    def first(self) -> CorpusPass:
        """Whose texts, batches and special tokens stand for all."""
        return next(iter(self.parts.values()))

    @property
    def texts(self) -> Sequence[EncodedText]:
        """As the first model sees them."""
        return self.first.texts

    @property
    def batches(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the texts that run together."""
        return self.first.batches

    @property
    def tokens(self) -> int:
        """Real tokens of all texts."""
        return self.first.tokens

    def tokens_of(self, number: int) -> int:
        """Real tokens of one batch."""
        return self.first.tokens_of(number)

    def chunks(self, start: int = 0) -> Iterator[Chunk]:
        """The batches from number `start` on; values by (model's name, site)."""
        for several in zip(*(part.chunks(start) for part in self.parts.values()), strict=True):
            special = torch.stack([chunk.is_special.cpu() for chunk in several]).any(0)
            values = {
                (name, site): value
                for name, chunk in zip(self.parts, several, strict=True)
                for site, value in chunk.values.items()
            }
            yield replace(several[0], is_special=special.to(several[0].is_special.device), values=values)


def moments_of_models(
    models: Models,
    texts: Any,
    sites: Sites = "resid",
    *,
    documents: Iterable[Any] | None = None,
    pairs: Pairs = "between",
    shards: Shards = SHARES,
    seed: int = 0,
    rule: TokenRule | None = None,
    shuffled: bool = False,
    medians: Mapping[str, float] | None = None,
    chunk: int = CHUNK,
    save: str | Path | None = None,
    checkpoint_minutes: int | float = 10,
    progress: bool = True,
    max_tokens: int = MAX_TOKENS,
    truncate: Literal["left", "right"] | None = None,
    max_length: int | None = None,
    add_special_tokens: bool = True,
) -> Moments:
    """Run the texts through every model and accumulate.

    Args:
        models: two or more by name, in eval mode. Seeds, sizes, checkpoints, `untrained(model)`.
        texts: strings, message lists or token ids.
        sites: as of `moments_of`, for all models, or by the model's name.
        pairs: "between" holds every site of one model with every site of another, "all" those within models too, or a
            list of names such as ("a/resid_post.3", "b/resid_post.9").
        rule: which tokens are sinks; `looked_at` names sites as "model/site".
        documents, shards, seed, shuffled, medians, chunk, save, checkpoint_minutes, truncate, max_length,
            add_special_tokens, max_tokens: as of `moments_of`.

    Raises:
        ValueError: fewer than two models, a name with "/", tokens that differ (names the text), and what `moments_of`
            raises.
        KeyError, IndexError: sites, or a rule's, for a model that is not there, or that a model does not have.
    """
    _check_names(models)
    chosen = _sites_by_model(models, sites)
    anatomies = {name: dissect(_module(model)) for name, model in models.items()}
    wanted = {name: expand_sites(anatomies[name], chosen[name]) for name in models}
    rule = _joint_rule(rule or TokenRule(), anatomies)
    looked_at: dict[str, list[Site]] = {name: [] for name in models}
    for owner, site in (looked.split("/", 1) for looked in rule.sites([])):
        looked_at[owner].append(Site.parse(site))
    parts = {
        name: corpus_pass(
            model,
            texts,
            [*wanted[name], *(site for site in looked_at[name] if site not in wanted[name])],
            anatomy=anatomies[name],
            max_tokens=max_tokens,
            truncate=truncate,
            max_length=max_length,
            add_special_tokens=add_special_tokens,
        )
        for name, model in models.items()
    }
    job = joint_pass(parts)
    known = document_numbers(documents, len(job.texts)).tolist()
    shards = shards_by_document(shards, known)
    widths: dict[SiteKey, int] = {}
    device = None
    for name, part in job.parts.items():
        own, home = widths_of(part, wanted[name])
        widths |= {(name, site): width for site, width in own.items()}
        device = home if device is None else device
    running = {name: running_model(_module(model)) for name, model in models.items()}
    moments = Moments(
        widths,
        pairs_between(list(widths)) if isinstance(pairs, str) and pairs == "between" else pairs,
        shards,
        seed=seed,
        rule=rule,
        shuffled=shuffled,
        chunk=chunk,
        medians=medians,
        provenance={
            "model": running,
            "loaded": {name: part.provenance["model"] for name, part in job.parts.items()},
            "texts": job.first.provenance["texts"],
            "environments": [],
        },
    )
    return accumulate(
        job, moments, known, device, save, checkpoint_minutes, progress, max_tokens=max_tokens, medians=medians
    )


def joint_pass(parts: Mapping[str, CorpusPass]) -> JointPass:
    """Passes side by side, in the batches of the one that takes the fewest texts at once.

    Raises:
        ValueError: a text of other tokens in two of them.
    """
    (first, one), *others = parts.items()
    for name, other in others:
        is_spelt = all(part.provenance["model"]["tokenizer_class"] is not None for part in (one, other))
        for number, (mine, theirs) in enumerate(zip(one.texts, other.texts, strict=True)):
            if _same_tokens(mine, theirs, is_spelt):
                continue
            raise ValueError(
                f"text {number} is {mine.length} tokens for {first!r} and {theirs.length} for {name!r}, or other ones: "
                "the models do not share a tokenizer. Capture each one's activations, and match them by words: "
                "aligned_activations(..., on='word_end')."
            )
    batches = max((part.batches for part in parts.values()), key=len)
    return JointPass({name: replace(part, batches=batches) for name, part in parts.items()})


def pairs_between(keys: Sequence[SiteKey]) -> list[tuple[str, str]]:
    """Every pair of sites of two models, by the part of their names before "/"."""
    names = [site_name(key) for key in keys]
    return [(a, b) for a, b in combinations(names, 2) if a.split("/", 1)[0] != b.split("/", 1)[0]]


def _same_tokens(mine: EncodedText, theirs: EncodedText, is_spelt: bool) -> bool:
    """The same ids; is_spelt: both models have a tokenizer, for which they stand for the same strings."""
    if mine.length != theirs.length or not torch.equal(mine.token_ids, theirs.token_ids):
        return False
    return not is_spelt or mine.tokens == theirs.tokens


def _check_names(models: Models) -> None:
    if len(models) < 2:
        raise ValueError(f"models has {len(models)} of them. Give two or more by name; of one, see moments_of.")
    if wrong := [name for name in models if not name or "/" in name]:
        raise ValueError(f"a model is called {wrong[0]!r}. Sites become 'model/site': give a name without '/'.")


def _sites_by_model(models: Models, sites: Sites) -> dict[str, Sequence[SiteName] | SiteName]:
    if not isinstance(sites, Mapping):
        return dict.fromkeys(models, sites)
    if set(sites) != set(models):
        raise KeyError(f"sites are given for {sorted(sites)}, models are {sorted(models)}. Give sites for each.")
    return dict(sites)


def _joint_rule(rule: TokenRule, anatomies: Mapping[str, Any]) -> TokenRule:
    """Massive tokens are looked for at every residual depth of every model."""
    if not rule.massive or rule.looked_at is not None:
        return rule
    found = []
    for name, anatomy in anatomies.items():
        found += [f"{name}/{site}" for site in rule_of(rule, anatomy).looked_at or ()]
    return replace(rule, looked_at=tuple(found))


def _module(model: LoadedModel | nn.Module) -> nn.Module:
    return model.module if isinstance(model, LoadedModel) else model

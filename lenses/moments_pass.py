"""Moments of a model over texts: one forward pass, one product per site, nothing kept but sums.

    moments = moments_of(load_model("smollm2"), texts, "resid", documents=documents, save="runs/moments")
    control = moments_of(untrained(model), texts, "resid", documents=documents)       # the same of a random model

All 31 x 31 pairs of SmolLM2's residuals are 0.33 GFLOP per token (2 x 496 blocks x 576^2) beside some 0.27 of its own
forward. Measured on 16 windows of 256 tokens (one thread, CPU seconds of one run, 30 November 2026): the forwards with
sites read took 9.7, accumulating 14.3 more (94 GFLOP/s, float64 sums included), copies, strata and hashes 1.7. Sums
take 1.3 GB a shard; writing that takes 2 s.

The texts run in the plan's order (longest first), which depends on them alone. With `save`, the state is written every
few minutes, and the same call goes on from there after a kill, to the very same bits on the same machine.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from tqdm.auto import tqdm

from microtome.capture.activations import Activations
from microtome.capture.anatomy import Anatomy
from microtome.capture.batches import MAX_TOKENS
from microtome.capture.dissect import dissect
from microtome.capture.models import LoadedModel
from microtome.capture.running_model import running_model
from microtome.capture.sites import Site
from microtome.capture.store import Store
from microtome.capture.tap_plan import SiteName
from microtome.lenses.corpus_pass import CorpusPass, corpus_pass
from microtome.lenses.document_shards import SHARES, DocumentShards, shards_by_document
from microtome.lenses.documents import document_numbers
from microtome.lenses.moments import CHUNK, Moments
from microtome.lenses.resumed_moments import CountIn, accumulate, count_tokens
from microtome.lenses.site_pairs import Pairs, SiteKey
from microtome.lenses.strata import TokenRule

Shards = Mapping[str, int | float] | Mapping[int, str] | Sequence[str] | int | DocumentShards


def moments_of(
    model: LoadedModel | nn.Module,
    texts: Any,
    sites: Sequence[SiteName] | SiteName = "resid",
    *,
    documents: Iterable[Any] | None = None,
    pairs: Pairs = "all",
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
    """Run the texts and accumulate.

    Args:
        model: from `load_model` or `untrained`, or a transformers module in eval mode.
        texts: strings, message lists or token ids.
        sites: in order of depth; "resid" stands for resid_pre.0 and every resid_post (r_0 to r_L). Whole heads
            ("z.3") are laid side by side.
        documents: name or number of the document of each text; each its own if None.
        pairs, seed, shuffled, medians, chunk: as in `Moments`.
        shards: as in `Moments`, or the shard's name of each text.
        rule: which tokens are sinks. Massive ones are looked for at every residual site if it names none.
        save: a folder; the state is there at the end, and every `checkpoint_minutes` on the way.
        truncate, max_length, add_special_tokens, max_tokens: as for `capture`.

    Raises:
        ValueError: more bytes than memory is free (before anything runs; says which band would fit); texts, documents
            or shards that do not agree; a folder with moments of another request (names the difference); NaN.
        KeyError, IndexError: a site that the model does not have.
        BlockingIOError: another process writes to the folder.
    """

    def same_token(anatomy: Anatomy) -> RowPlan:
        return RowPlan({site: site for site in expand_sites(anatomy, sites)}, pairs)

    return accumulated(
        model,
        texts,
        same_token,
        documents=documents,
        shards=shards,
        seed=seed,
        rule=rule,
        shuffled=shuffled,
        medians=medians,
        chunk=chunk,
        save=save,
        checkpoint_minutes=checkpoint_minutes,
        progress=progress,
        max_tokens=max_tokens,
        truncate=truncate,
        max_length=max_length,
        add_special_tokens=add_special_tokens,
    )


@dataclass(frozen=True)
class RowPlan:
    """What a row of moments is made of.

    Attributes:
        sites: by name in the moments, in order, the site whose values are read for it.
        pairs: of these names, as in `Moments`.
        patterns: heads to read.
        count_in: adds the rows of a chunk, whose tokens are of the documents given.
        sink_share: rows that a token set apart makes a sink, about.
        facts: for the provenance.
    """

    sites: Mapping[SiteKey, Site]
    pairs: Pairs = "all"
    patterns: tuple[Site, ...] = ()
    count_in: CountIn = count_tokens
    sink_share: int = 1
    facts: Mapping[str, Any] = field(default_factory=dict)


def accumulated(
    model: LoadedModel | nn.Module,
    texts: Any,
    plan: Callable[[Anatomy], RowPlan],
    *,
    documents: Iterable[Any] | None,
    shards: Shards,
    seed: int,
    rule: TokenRule | None,
    shuffled: bool,
    medians: Mapping[str, float] | None,
    chunk: int,
    save: str | Path | None,
    checkpoint_minutes: int | float,
    progress: bool,
    max_tokens: int,
    truncate: Literal["left", "right"] | None,
    max_length: int | None,
    add_special_tokens: bool,
) -> Moments:
    """The pass behind `moments_of`, for any plan of rows. Raises what it raises."""
    module = model.module if isinstance(model, LoadedModel) else model
    anatomy = dissect(module)
    rows = plan(anatomy)
    wanted = list(dict.fromkeys(rows.sites.values()))
    rule = rule_of(rule or TokenRule(), anatomy)
    read = [*wanted, *(s for name in rule.sites([]) if (s := Site.parse(name)) not in wanted)]
    job = corpus_pass(
        model,
        texts,
        read,
        patterns=list(rows.patterns),
        anatomy=anatomy,
        max_tokens=max_tokens,
        truncate=truncate,
        max_length=max_length,
        add_special_tokens=add_special_tokens,
    )
    documents = document_numbers(documents, len(job.texts)).tolist()
    shards = shards_by_document(shards, documents)
    widths, device = widths_of(job, wanted)
    running = running_model(module)
    moments = Moments(
        {key: widths[site] for key, site in rows.sites.items()},
        rows.pairs,
        shards,
        seed=seed,
        rule=rule,
        shuffled=shuffled,
        chunk=chunk,
        medians=medians,
        provenance={
            "model": running,
            "loaded": job.provenance["model"],
            "texts": job.provenance["texts"],
            "environments": [],
            **rows.facts,
        },
    )
    return accumulate(
        job,
        moments,
        documents,
        device,
        save,
        checkpoint_minutes,
        progress,
        max_tokens=max_tokens,
        medians=medians,
        count_in=rows.count_in,
        sink_share=rows.sink_share,
    )


def expand_sites(anatomy: Anatomy, sites: Sequence[SiteName] | SiteName) -> list[Site]:
    """Sites by name, in the order given; "resid" among them stands for resid_pre.0 and every resid_post.

    Raises what `Anatomy.expand` raises, and KeyError for a site without a row per token (pattern, state).
    """
    is_one = isinstance(sites, str | Site) or (isinstance(sites, tuple) and all(isinstance(n, int) for n in sites[1:]))
    names: list[SiteName] = []
    for name in [sites] if is_one else sites:
        names += ["resid_pre.0", "resid_post"] if name == "resid" else [name]
    return anatomy.expand(names)


def moments_of_activations(
    activations: Activations,
    *,
    documents: Iterable[Any] | None = None,
    pairs: Pairs = "all",
    shards: Shards = SHARES,
    seed: int = 0,
    rule: TokenRule | None = None,
    special_tokens: Sequence[str] = (),
    shuffled: bool = False,
    chunk: int = CHUNK,
    progress: bool = True,
) -> Moments:
    """The same of activations that were captured at all positions; of a `Store`, part after part.

    Args:
        documents: name or number of the document of each text, in the order of text numbers; each its own if None.
        special_tokens: what `rows["token"]` says at tokens such as BOS.

    Raises:
        ValueError: rows that are means over positions, fewer documents than texts, too little memory, NaN.
    """
    rule, special = rule or TokenRule(), set(special_tokens)
    tensors = activations.tensors
    widths = {site: int(torch.Size(tensor.shape[1:]).numel()) for site, tensor in tensors.items()}
    given = None if documents is None else list(documents)
    known = None if given is None else document_numbers(given, len(given)).tolist()
    shards = shards_by_document(shards, known)
    facts = {"model": activations.provenance.get("model"), "activations": activations.provenance}
    moments = Moments(widths, pairs, shards, seed=seed, rule=rule, shuffled=shuffled, chunk=chunk, provenance=facts)
    estimate = moments.estimate()
    estimate.require_memory()
    parts = activations.parts() if isinstance(activations, Store) else iter([activations])
    with tqdm(total=activations.n_rows, unit="rows", desc="moments", disable=not progress) as bar:
        for part in parts:
            text = torch.from_numpy(part.rows["text"].to_numpy(dtype="int64", copy=True))
            position = torch.from_numpy(part.rows["position"].to_numpy(dtype="int64", copy=True))
            if bool((position < 0).any()):
                raise ValueError("These rows are means over positions (position -1). Capture with positions='all'.")
            if known is not None and len(text) and int(text.max()) >= len(known):
                raise ValueError(f"text {int(text.max())} has no document; {len(known)} were given. Give all.")
            owners = text.tolist() if known is None else [known[t] for t in text.tolist()]
            tokens = torch.tensor([str(token) in special for token in part.rows["token"]], dtype=torch.bool)
            values = {site: part[site] for site in tensors}
            moments.update(values, documents=owners, position=position, is_special=tokens, text=text)
            bar.update(len(text))
    moments.finish()
    return moments


def rule_of(rule: TokenRule, anatomy: Anatomy) -> TokenRule:
    """Massive tokens are looked for at every residual depth, so that strata do not depend on the chosen sites."""
    if not rule.massive or rule.looked_at is not None:
        return rule
    try:
        return replace(rule, looked_at=tuple(map(str, expand_sites(anatomy, "resid"))))
    except KeyError:  # a model without a residual stream that was found
        return rule


def widths_of(job: CorpusPass, sites: Sequence[Site]) -> tuple[dict[Site, int], torch.device]:
    """Width of every site, and where values come, from a run of the shortest text."""
    shortest = min(range(len(job.texts)), key=lambda number: job.texts[number].length)
    values = next(replace(job, batches=((shortest,),)).chunks()).values
    return {site: values[site][0].numel() for site in sites}, values[sites[0]].device

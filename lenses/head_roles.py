"""Which role each attention head plays, from statistics of its rows in one pass per kind of text; no pattern is kept.

    found = head_roles(load_model("smollm2"), texts)
    found.table                       # a row per layer and head: roles, scores, intervals, controls
    found.strongest("induction")

Scores are defined in head_scores.py (natural texts) and head_texts.py (repeated random tokens, needles), their averages
and intervals in head_sums.py: over queries from position 8 on, intervals by a bootstrap over documents. Controls: the
same scores of a model with the same shape and fresh weights (`fresh_...`), and induction and retrieval on texts where
there is nothing to repeat (`..._control`). A role is a score above a threshold, nothing more: thresholds are
conventions (sheet section 15 tags them as such), and a head may have several roles.

Models: those whose attention goes through transformers' attention interface; others are refused with the reason.
Query head h reads key-value head h // (heads / key-value heads): column `kv_head`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import nn
from tqdm.auto import tqdm

from microtome.capture.anatomy import Anatomy
from microtome.capture.batches import MAX_TOKENS
from microtome.capture.dissect import dissect
from microtome.capture.fingerprint import new_fingerprint
from microtome.capture.limits import length_limit, vocabulary_size
from microtome.capture.models import LoadedModel
from microtome.capture.running_model import running_model
from microtome.capture.special_tokens import SpecialTokens
from microtome.capture.untrained import untrained
from microtome.lenses.corpus_pass import CorpusPass, corpus_pass
from microtome.lenses.documents import document_numbers
from microtome.lenses.head_pass import SeenCall, attention_sites, head_sums, see_calls
from microtome.lenses.head_scores import marked_scores, natural_scores
from microtome.lenses.head_sums import HeadSums
from microtome.lenses.head_texts import MarkedTexts, needle_texts, ordinary_ids, repeated_tokens, unrepeated_tokens
from microtome.lenses.pattern_variance import pattern_variance
from microtome.lenses.short_repr import short_repr

WINDOWS = (16, 64, 256)
FIRST_QUERY = 8
NEAR = f"local_{WINDOWS[0]}_no_sink"
# role to score and threshold, the most telling role first; `inactive` is below its threshold, the others above
ROLE_SCORES = {
    "induction": "induction",
    "previous": "previous",
    "duplicate": "duplicate",
    "retrieval": "retrieval_copied",
    "self": "self",
    "local": NEAR,
    "sink": "sink",
    "inactive": "output_norm",
}
THRESHOLDS: Mapping[str, float] = {
    "induction": 0.3,
    "previous": 0.3,
    "duplicate": 0.3,
    "retrieval": 0.3,
    "self": 0.3,
    "local": 0.9,
    "sink": 0.3,
    "inactive": 0.2,
}


@dataclass(frozen=True, eq=False)
class HeadRoles:
    """What `head_roles` found.

    Attributes:
        table: a row per layer and head (where blocks run several times, each run is a layer). Columns: layer, head,
            kv_head, role (the most telling one, "" without), roles (all, separated by spaces), each score with `_low`
            and `_high`, `fresh_` scores of the untrained model, `induction_control`, `retrieval_control`,
            `pattern_variance`, `content_share`.
        thresholds: by role.
        provenance: model, texts, settings, counts.
    """

    table: pd.DataFrame
    thresholds: Mapping[str, float]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    __repr__ = short_repr

    def to_frame(self) -> pd.DataFrame:
        """The table."""
        return self.table

    def strongest(self, role: str, count: int = 10) -> pd.DataFrame:
        """The heads with the highest score of a role (of inactive: the lowest), whether they pass its threshold or not.

        Raises KeyError for a role that there is not.
        """
        if role not in ROLE_SCORES:
            raise KeyError(f"no role {role!r}; there are {', '.join(ROLE_SCORES)}.")
        score = ROLE_SCORES[role]
        return self.table.sort_values(score, ascending=role == "inactive", kind="stable").head(count)


def head_roles(
    model: LoadedModel | nn.Module,
    texts: Any,
    *,
    documents: Iterable[Any] | None = None,
    anatomy: Anatomy | None = None,
    thresholds: Mapping[str, int | float] | None = None,
    first_query: int = FIRST_QUERY,
    copy_length: int = 64,
    made_texts: int = 16,
    needle_length: int = 256,
    variance_length: int = 64,
    with_fresh: bool = True,
    bootstraps: int = 1000,
    seed: int = 0,
    max_tokens: int = MAX_TOKENS,
    max_length: int | None = None,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> HeadRoles:
    """Scores and roles of all heads.

    Args:
        model: from `load_model`, or a transformers module in eval mode.
        texts: strings, message lists or token ids, as `capture` takes them; of natural language.
        documents: the document of each text, a number or a name, for the bootstrap; each text is its own if None.
        thresholds: of some roles, in place of `THRESHOLDS`.
        first_query: queries before this position do not count.
        copy_length: tokens of each half of the repeated random texts, less where the model takes fewer.
        made_texts: how many repeated random texts, and how many needles.
        needle_length: tokens of the texts with a needle, less where the model takes fewer.
        variance_length: tokens over which pattern variance is taken; 0 leaves it out.
        with_fresh: the control with fresh weights, for as long as the model itself.
        max_length: cut texts to this many tokens.
        checkpoint: folder in which passes are kept while they run, so that a stopped call goes on; never deleted here.

    Raises:
        ValueError: no text reaches `first_query`, an unknown role, documents of another number, settings that do not
            fit, and what `corpus_pass` refuses.
        KeyError: attention that does not go through transformers' interface (Bloom, Falcon, ...), with the reason.
    """
    if unknown := sorted(set(thresholds or {}) - set(THRESHOLDS)):
        raise ValueError(f"thresholds has no role {unknown[0]!r}; there are {', '.join(THRESHOLDS)}.")
    if made_texts < 1 or bootstraps < 1 or first_query < 0:
        raise ValueError("made_texts and bootstraps must be at least 1, first_query at least 0.")
    bounds = {role: float(value) for role, value in (THRESHOLDS | dict(thresholds or {})).items()}
    loaded = model if isinstance(model, LoadedModel) else LoadedModel.from_module(model, name=type(model).__name__)
    anatomy = dissect(loaded.module) if anatomy is None else anatomy
    cut = {} if max_length is None else {"truncate": "right", "max_length": max_length}
    plan = corpus_pass(loaded, texts, (), anatomy=anatomy, max_tokens=max_tokens, **cut)
    sites = attention_sites(plan)  # a model that cannot be seen is refused before anything runs
    of_text = document_numbers(documents, len(plan.texts))
    longest = max(text.length for text in plan.texts)
    if longest <= first_query:
        raise ValueError(
            f"no text reaches position {first_query}: the longest has {longest} tokens. Give longer texts, or a lower "
            "first_query."
        )
    made = _made_texts(loaded, plan, copy_length, made_texts, needle_length, seed)
    windowed = [
        tuple(map(int, text.token_ids[:variance_length])) for text in plan.texts if text.length >= variance_length
    ]

    models = {"": loaded} | ({"fresh_": untrained(loaded, seed=seed)} if with_fresh else {})
    parts = _parts(models, plan, made, anatomy, first_query, max_tokens)
    folder = None if checkpoint is None else Path(checkpoint)
    key = _key(loaded, plan, made, (first_query, seed, max_tokens))
    sums: dict[str, HeadSums] = {}
    total = sum(part.tokens for part, _ in parts.values())
    with tqdm(total=total, unit="tok", desc="heads", disable=not progress) as bar:
        for name, (part, score) in parts.items():
            file = None if folder is None else folder / f"{name}.safetensors"
            sums[name] = head_sums(part, score, checkpoint=file, key=f"{name} {key}", bar=bar)

    table = _heads(plan, sites, sums["natural"])
    for name, held in sums.items():
        means, columns = held.means(), {}
        if name.startswith("fresh_"):
            columns = {f"fresh_{score}": values.ravel() for score, values in means.items()}
        else:
            drawn_from = of_text if name == "natural" else np.arange(len(held.sums))
            ends = held.intervals(drawn_from, draws=bootstraps, seed=seed)
            for score, values in means.items():
                low, high = ends[score]
                columns |= {score: values.ravel(), f"{score}_low": low.ravel(), f"{score}_high": high.ravel()}
        table = pd.concat([table, pd.DataFrame(columns)], axis=1)
    if variance_length and windowed:
        found = pattern_variance(corpus_pass(loaded, windowed, (), anatomy=anatomy, max_tokens=max_tokens))
        table["pattern_variance"], table["content_share"] = found.variance.ravel(), found.content_share.ravel()
    else:
        table["pattern_variance"] = table["content_share"] = np.nan
    roles = [_roles(row, bounds) for _, row in table.iterrows()]
    table.insert(3, "role", [held[0] if held else "" for held in roles])
    table.insert(4, "roles", [" ".join(held) for held in roles])
    facts = {
        "first_query": first_query,
        "copy_length": len(made["induction"].queries),
        "made_texts": made_texts,
        "needle_length": len(made["retrieval"].texts[0]) if "retrieval" in made else 0,
        "variance_texts": len(windowed),
        "bootstraps": bootstraps,
        "seed": seed,
        "tokens": plan.tokens,
    }
    return HeadRoles(table, bounds, {**plan.provenance, "heads": facts, "thresholds": bounds})


def _made_texts(
    loaded: LoadedModel, plan: CorpusPass, copy_length: int, count: int, needle_length: int, seed: int
) -> dict[str, MarkedTexts]:
    """Repeated random tokens, needles, and the controls of both, as long as the model takes them."""
    special = SpecialTokens.of(loaded.tokenizer)
    unknown = {special.unknown_id} if special.unknown_id is not None else set()
    vocabulary = vocabulary_size(loaded.module) or 2
    if loaded.tokenizer is not None:  # rows behind the tokenizer's last id only fill the matrix up
        vocabulary = min(vocabulary, len(loaded.tokenizer))
    ids = ordinary_ids(vocabulary, list(special.ids | unknown))
    first = plan.texts[0]
    bos = int(first.token_ids[0]) if bool(first.is_special[0]) else None
    limit = length_limit(loaded.module, loaded.tokenizer) or 2**30
    copy = min(copy_length, (limit - (bos is not None)) // 2)
    made = {
        "induction": repeated_tokens(ids, copy=copy, count=count, seed=seed, bos=bos),
        "induction_control": unrepeated_tokens(ids, copy=copy, count=count, seed=seed, bos=bos),
    }
    natural = [text.token_ids[~text.is_special].tolist() for text in plan.texts]
    for name, with_needle in (("retrieval", True), ("retrieval_control", False)):
        made[name] = needle_texts(
            ids,
            natural,
            length=min(needle_length, limit),
            count=count,
            seed=seed,
            bos=bos,
            with_needle=with_needle,
        )
    return made


def _parts(
    models: Mapping[str, LoadedModel],
    plan: CorpusPass,
    made: Mapping[str, MarkedTexts],
    anatomy: Anatomy,
    first_query: int,
    max_tokens: int,
) -> dict[str, tuple[CorpusPass, Callable[[SeenCall], Any]]]:
    """What is run, in order: natural texts, then made ones; of the model, then of its untrained twin."""
    parts = {}
    for prefix, loaded in models.items():
        own = replace(plan, module=loaded.module)
        parts[f"{prefix}natural"] = own, natural_scores(own, windows=WINDOWS, first_query=first_query)
        for name, texts in made.items():
            # the twin needs no control of its own: nothing it does was learned
            if prefix and name.endswith("_control"):
                continue
            run = corpus_pass(loaded, [list(text) for text in texts.texts], (), anatomy=anatomy, max_tokens=max_tokens)
            parts[f"{prefix}{name}"] = run, marked_scores(texts, name)
    return parts


def _heads(plan: CorpusPass, sites: Sequence[Any], held: HeadSums) -> pd.DataFrame:
    """Layer, head and key-value head of each row."""
    groups: dict[int, int] = {}

    def see(seen: SeenCall) -> None:
        groups[seen.row] = seen.call.query.shape[1] // seen.call.key.shape[1]

    see_calls(plan, len(plan.batches) - 1, see)
    heads = range(held.sums.shape[3])
    layers = [site.layer for site in sites]
    if len(set(layers)) < len(layers):  # shared blocks
        layers = list(range(len(sites)))
    rows = [(layer, head, head // groups[row]) for row, layer in enumerate(layers) for head in heads]
    return pd.DataFrame(rows, columns=["layer", "head", "kv_head"])


def _roles(row: pd.Series, bounds: Mapping[str, float]) -> list[str]:
    return [
        role
        for role, score in ROLE_SCORES.items()
        if (row[score] < bounds[role] if role == "inactive" else row[score] > bounds[role])
    ]


def _key(loaded: LoadedModel, plan: CorpusPass, made: Mapping[str, MarkedTexts], settings: tuple) -> str:
    """Names all of the model's weights and settings, the texts and the settings that sums depend on."""
    digest = new_fingerprint()
    digest.update(repr(sorted(running_model(loaded.module).items())).encode())
    for text in plan.texts:
        digest.update(repr(text.token_ids.tolist()).encode())
    digest.update(repr([held.texts for held in made.values()]).encode())
    digest.update(repr(settings).encode())
    return digest.hexdigest()

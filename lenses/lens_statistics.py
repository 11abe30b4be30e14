"""What lenses say at every token and depth of texts, against the model's own last word: one pass, scalars kept.

Per depth and token, nats: KL(model || lens) and KL(lens || model), entropy, cross-entropy of the true next token, its
rank (0 is first), the top tokens, agreement of the first with the model's, and of named tokens the probability and
rank. All lenses share the pass and the model's own distribution (kernels/vocabulary_statistics.py).

Curves are means over tokens; intervals are from a bootstrap over documents (tokens of one are not independent), with
first tokens and BOS (`sinks`) left out unless said otherwise: their streams are near-constant and huge.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from microtome.capture.batches import MAX_TOKENS
from microtome.capture.models import LoadedModel
from microtome.kernels.vocabulary_statistics import vocabulary_kl, vocabulary_statistics
from microtome.lenses.corpus_pass import Chunk, corpus_pass
from microtome.lenses.documents import document_draws, document_numbers
from microtome.lenses.lens import Lens, depths_of
from microtome.lenses.unembedding import unembedding_of

TOKENS_AT_ONCE = 128
CURVES = ("kl", "kl_reverse", "entropy", "cross_entropy", "agrees", "max_prob", "target_in_top")
_ROW_FIELDS = ("text", "position", "document", "token", "target", "is_sink")
_FINAL_FIELDS = ("final_entropy", "final_cross_entropy", "final_top")


@dataclass(frozen=True, eq=False)
class LensStatistics:
    """One lens over texts. Rows are tokens, text after text; arrays `[depth, token]` unless said otherwise.

    Attributes:
        lens: its name. sites: names of the depths. depth: blocks that a site needs (0 for r_0, L for r_L).
        text, position, document, token, target (-1 at a text's end), is_sink: `[token]`.
        final_entropy, final_cross_entropy (NaN without a target), final_top: `[token]`, of the model.
        kl, kl_reverse, entropy, cross_entropy: nats. target_rank: 0 is first, -1 without a target.
        top_ids, top_probs: `[depth, token, top]`. gap: first less second probability.
        kl_previous: KL(lens at this depth || lens at the one before), NaN at the first; None unless asked for.
        final_rank: rank of the model's own first token; None unless asked for.
        named: names of tokens that are followed. named_prob, named_rank: `[depth, token, name]`.
        blocks: L.
        facts: model, texts, versions.
    """

    lens: str
    sites: tuple[str, ...]
    depth: np.ndarray
    text: np.ndarray
    position: np.ndarray
    document: np.ndarray
    token: np.ndarray
    target: np.ndarray
    is_sink: np.ndarray
    final_entropy: np.ndarray
    final_cross_entropy: np.ndarray
    final_top: np.ndarray
    kl: np.ndarray
    kl_reverse: np.ndarray
    entropy: np.ndarray
    cross_entropy: np.ndarray
    target_rank: np.ndarray
    top_ids: np.ndarray
    top_probs: np.ndarray
    gap: np.ndarray
    kl_previous: np.ndarray | None = None
    final_rank: np.ndarray | None = None
    named: tuple[str, ...] = ()
    named_prob: np.ndarray | None = None
    named_rank: np.ndarray | None = None
    blocks: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"LensStatistics({self.lens!r}: {len(self.sites)} sites, {len(self.text):,} tokens)"

    @property
    def agrees(self) -> np.ndarray:
        """Whether the lens's first token is the model's."""
        return self.top_ids[..., 0] == self.final_top

    @property
    def max_prob(self) -> np.ndarray:
        """Probability of the lens's first token."""
        return self.top_probs[..., 0]

    @property
    def target_in_top(self) -> np.ndarray:
        """Whether the true next token is among the lens's top tokens; NaN without one."""
        inside = (self.top_ids == self.target[None, :, None]).any(-1)
        return np.where(self.target < 0, np.nan, inside)

    def at(self, rows: np.ndarray) -> "LensStatistics":
        """Some tokens: a mask or numbers."""
        changed = {name: getattr(self, name)[rows] for name in _ROW_FIELDS + _FINAL_FIELDS}
        for name in _depth_fields(self):
            changed[name] = getattr(self, name)[:, rows]
        return replace(self, **changed)

    def to_frame(self) -> pd.DataFrame:
        """One row per text, position and site: every number above, top tokens in columns top_0, top_1, ..."""
        tokens, sites = len(self.text), len(self.sites)
        columns: dict[str, Any] = {"lens": self.lens}
        columns |= {name: np.tile(getattr(self, name), sites) for name in ("text", "position", "document", "token")}
        columns |= {
            "site": np.repeat(np.array(self.sites, dtype=object), tokens),
            "depth": np.repeat(self.depth, tokens),
            "target": np.tile(self.target, sites),
            "is_sink": np.tile(self.is_sink, sites),
        }
        names = [name for name in _depth_fields(self) if getattr(self, name).ndim == 2]
        columns |= {name: getattr(self, name).reshape(-1) for name in names}
        columns["target_prob"] = np.exp(-self.cross_entropy).reshape(-1)
        columns["agrees"] = self.agrees.reshape(-1)
        for place in range(self.top_ids.shape[2]):
            columns[f"top_{place}"] = self.top_ids[..., place].reshape(-1)
            columns[f"prob_{place}"] = self.top_probs[..., place].reshape(-1)
        for number, name in enumerate(self.named):
            columns[f"prob of {name}"] = self.named_prob[..., number].reshape(-1)
            columns[f"rank of {name}"] = self.named_rank[..., number].reshape(-1)
        frame = pd.DataFrame(columns)
        return frame.sort_values(["text", "position", "depth"], kind="stable", ignore_index=True)

    def curve(
        self, *, sinks: Literal["without", "with", "alone"] = "without", draws: int = 1000, seed: int = 0
    ) -> pd.DataFrame:
        """Means by depth with 95 % intervals from a bootstrap over documents.

        Columns lens, site, depth, tokens, documents, sinks, and for each of kl, kl_reverse, entropy, cross_entropy,
        agrees, max_prob, target_in_top: the mean, `_low`, `_high`; NaN intervals with fewer than two documents.

        Raises:
            ValueError: no token is left, or another word for sinks.
        """
        kinds = {"without": ~self.is_sink, "with": np.ones_like(self.is_sink), "alone": self.is_sink}
        if sinks not in kinds:
            raise ValueError(f"sinks is {sinks!r}. Give one of {', '.join(kinds)}.")
        rows = kinds[sinks]
        if not rows.any():
            raise ValueError(f"no token is left ({sinks} sinks, {len(rows)} tokens). Give longer texts.")
        kept = self.at(rows)
        documents, of_row = np.unique(kept.document, return_inverse=True)
        weights = document_draws(len(documents), draws, seed)
        frame: dict[str, Any] = {
            "lens": self.lens,
            "site": list(self.sites),
            "depth": self.depth,
            "tokens": int(rows.sum()),
            "documents": len(documents),
            "sinks": sinks,
        }
        for name in CURVES:
            values = np.asarray(getattr(kept, name), dtype=float)
            has = np.isfinite(values)
            sums = _by_document(np.where(has, values, 0.0), of_row, len(documents))
            counts = _by_document(has.astype(float), of_row, len(documents))
            with np.errstate(invalid="ignore", divide="ignore"):
                frame[name] = sums.sum(1) / counts.sum(1)
                drawn = (weights @ sums.T) / (weights @ counts.T)
            low, high = _quantiles(drawn) if len(documents) > 1 else (np.nan, np.nan)
            frame[f"{name}_low"], frame[f"{name}_high"] = low, high
        return pd.DataFrame(frame)

    @property
    def settled(self) -> pd.DataFrame:
        """Per token the first depth from which the lens's first token is the model's and stays: text, position, depth
        (-1 where even the last site differs)."""
        agrees = self.agrees
        stays = np.flip(np.logical_and.accumulate(np.flip(agrees, 0), 0), 0)
        first = np.where(stays.any(0), self.depth[stays.argmax(0)], -1)
        return pd.DataFrame({"text": self.text, "position": self.position, "depth": first})


def lens_statistics(
    model: LoadedModel | nn.Module,
    texts: Any,
    lenses: Sequence[Lens] | Lens,
    *,
    documents: Iterable[Any] | None = None,
    named: Mapping[str, int] | None = None,
    top: int = 5,
    previous: bool = False,
    final_rank: bool = False,
    max_tokens: int = MAX_TOKENS,
    tokens_at_once: int = TOKENS_AT_ONCE,
    progress: bool = False,
    **options: Any,
) -> dict[str, LensStatistics]:
    """Statistics of several lenses over the same texts, by the lens's name.

    Args:
        documents: name or number of the document of each text; each its own if None.
        named: tokens to follow everywhere, by a name. Each costs a sweep for its ranks.
        top: top tokens kept.
        previous: also the KL to the depth before (twice the work), which one rule of early exit asks.
        final_rank: also the rank of the model's own first token at each depth (twice the work).
        max_tokens: padded tokens per forward. tokens_at_once: per call of the vocabulary sweep.
        options: of the texts, as `corpus_pass` takes them.

    Raises:
        ValueError: two lenses of one name, none, documents of another number, a named token that is not in the
            vocabulary, `top` below 2, a stream that is not finite; and what `corpus_pass` raises.
    """
    chosen = [lenses] if isinstance(lenses, Lens) else list(lenses)
    names = [lens.name for lens in chosen]
    if not chosen or len(set(names)) < len(names):
        raise ValueError(f"lenses are called {names}. Give at least one, each with a name of its own.")
    if top < 2:
        raise ValueError(f"top is {top}. Give 2 or more: the gap between the first two is part of the statistics.")
    end = unembedding_of(model)
    named = dict(named or {})
    if bad := {name: number for name, number in named.items() if not 0 <= number < end.vocab}:
        raise ValueError(f"named tokens {bad} are not among the {end.vocab} of this model.")
    last = depths_of(model)[-1]
    blocks = len(depths_of(model)) - 1
    reads = list(dict.fromkeys([*(site for lens in chosen for site in lens.reads), last]))
    planned = corpus_pass(model, texts, reads, max_tokens=max_tokens, **options)
    of_text = document_numbers(documents, len(planned.texts))
    parts: dict[str, list[dict]] = {name: [] for name in names}
    with tqdm(total=planned.tokens, desc="lens statistics", unit="token", disable=not progress) as bar:
        for chunk in planned.chunks():
            for rows in torch.arange(len(chunk)).split(tokens_at_once):
                values = {site: value[rows.to(value.device)] for site, value in chunk.values.items()}
                _require_finite(values, chunk)
                final = end.normed(values[last])
                for group in _alike(chosen):
                    for lens, part in _group_part(
                        group, values, final, chunk.targets[rows], named, top, previous, final_rank
                    ):
                        parts[lens.name].append(part | _row_part(chunk, rows, of_text))
                bar.update(len(rows))
    facts = dict(planned.provenance)
    return {lens.name: _joined(lens, parts[lens.name], tuple(named), blocks, facts) for lens in chosen}


def _alike(lenses: Sequence[Lens]) -> list[list[Lens]]:
    """Lenses that share a readout go through the vocabulary together."""
    groups: dict[str, list[Lens]] = {}
    for lens in lenses:
        groups.setdefault(lens.norm, []).append(lens)
    return list(groups.values())


@torch.no_grad()
def _group_part(
    lenses: Sequence[Lens],
    values: Mapping[Any, Tensor],
    final: Tensor,
    targets: Tensor,
    named: Mapping[str, int],
    top: int,
    previous: bool,
    final_rank: bool,
) -> list[tuple[Lens, dict[str, np.ndarray]]]:
    """(lens, its arrays) for one piece of tokens."""
    states = [lens.states(values) for lens in lenses]
    hidden = torch.cat(states).contiguous()
    model_end = {**lenses[0].readout}
    if lenses[0].norm == "gain":  # the model's own distribution is not that of a bare write
        own = {"weight": lenses[0].unembedding.weight, "bias": lenses[0].unembedding.bias}
        own |= {"factor": lenses[0].unembedding.factor, "cap": lenses[0].unembedding.cap}
        teacher = vocabulary_statistics(final[None], final=None, targets=targets, top=top, **own)
        found = vocabulary_statistics(hidden, final=None, targets=targets, top=top, **model_end)
        nothing = torch.full_like(found.entropy, torch.nan)
        kl, kl_reverse = nothing, nothing
        finals = (teacher.entropy[0], -teacher.target_log_prob[0], teacher.top_ids[0, :, 0])
    else:
        found = vocabulary_statistics(hidden, final=final, targets=targets, top=top, **model_end)
        kl, kl_reverse = found.kl, found.kl_reverse
        finals = (found.final_entropy, -found.final_target_log_prob, found.final_top_ids[:, 0])
    probs = found.top_log_probs.exp()
    arrays: dict[str, Tensor] = {
        "kl": kl,
        "kl_reverse": kl_reverse,
        "entropy": found.entropy,
        "cross_entropy": -found.target_log_prob,
        "target_rank": found.target_rank,
        "top_ids": found.top_ids,
        "top_probs": probs,
        "gap": probs[..., 0] - probs[..., 1],
    }
    if named:
        ranks, log_probs = [], []
        for number in named.values():
            sweep = vocabulary_statistics(hidden, targets=torch.full_like(targets, number), top=top, **model_end)
            ranks.append(sweep.target_rank)
            log_probs.append(sweep.target_log_prob)
        arrays |= {"named_rank": torch.stack(ranks, -1), "named_prob": torch.stack(log_probs, -1).exp()}
    if final_rank:
        arrays["final_rank"] = vocabulary_statistics(hidden, targets=finals[2], top=top, **model_end).target_rank
    start, made = 0, []
    for lens, own_states in zip(lenses, states, strict=True):
        own = slice(start, start + len(own_states))
        part = {name: array[own].cpu().numpy() for name, array in arrays.items()}
        if previous:
            part["kl_previous"] = _kl_previous(own_states, lens)
        part |= {name: value.cpu().numpy() for name, value in zip(_FINAL_FIELDS, finals, strict=True)}
        start = own.stop
        made.append((lens, part))
    return made


def _kl_previous(states: Tensor, lens: Lens) -> np.ndarray:
    pairs = [vocabulary_kl(states[d - 1][None], states[d], **lens.readout)[0] for d in range(1, len(states))]
    first = torch.full(states.shape[1:2], torch.nan, device=states.device)
    return torch.stack([first, *(pair.float() for pair in pairs)]).cpu().numpy()


def _row_part(chunk: Chunk, rows: Tensor, of_text: np.ndarray) -> dict[str, np.ndarray]:
    rows = rows.to(chunk.text.device)
    text, position = chunk.text[rows].cpu().numpy(), chunk.position[rows].cpu().numpy()
    return {
        "text": text,
        "position": position,
        "document": of_text[text],
        "token": chunk.token_ids[rows].cpu().numpy(),
        "target": chunk.targets[rows].cpu().numpy(),
        "is_sink": (position == 0) | chunk.is_special[rows].cpu().numpy(),
    }


def _joined(
    lens: Lens, parts: list[dict], named: tuple[str, ...], blocks: int, facts: Mapping[str, Any]
) -> LensStatistics:
    held = set(parts[0])
    joined = {
        name: np.concatenate([part[name] for part in parts], axis=0 if name in _ROW_FIELDS + _FINAL_FIELDS else 1)
        for name in held
    }
    order = np.lexsort((joined["position"], joined["text"]))
    depth = np.array([0 if s.kind == "embed" else s.layer + (s.kind != "resid_pre") for s in lens.sites])
    found = LensStatistics(
        lens.name, tuple(map(str, lens.sites)), depth, **joined, named=named, blocks=blocks, facts=facts
    )
    return found.at(order)


def join_statistics(parts: Sequence[LensStatistics]) -> LensStatistics:
    """The same lens over several sets of texts, whose numbers of texts go on.

    Raises:
        ValueError: other lenses, sites, named tokens or optional statistics.
    """
    first = parts[0]
    if any(
        (p.lens, p.sites, p.named, _depth_fields(p)) != (first.lens, first.sites, first.named, _depth_fields(first))
        for p in parts
    ):
        raise ValueError("statistics of other lenses, sites or tokens do not join.")
    rows = {name: np.concatenate([getattr(p, name) for p in parts]) for name in _ROW_FIELDS + _FINAL_FIELDS}
    deep = {name: np.concatenate([getattr(p, name) for p in parts], axis=1) for name in _depth_fields(first)}
    starts = np.cumsum([0, *(int(p.text.max()) + 1 for p in parts[:-1])])
    rows["text"] = np.concatenate([p.text + start for p, start in zip(parts, starts, strict=True)])
    return replace(first, **rows, **deep)


def _depth_fields(found: LensStatistics) -> tuple[str, ...]:
    skipped = {"lens", "sites", "depth", "named", "blocks", "facts", *_ROW_FIELDS, *_FINAL_FIELDS}
    names = [f.name for f in fields(found) if f.name not in skipped]
    return tuple(name for name in names if getattr(found, name) is not None)


def _by_document(values: np.ndarray, of_row: np.ndarray, documents: int) -> np.ndarray:
    """Sums `[depth, document]`."""
    sums = np.zeros((values.shape[0], documents))
    np.add.at(sums.T, of_row, values.T)
    return sums


def _quantiles(drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    has = np.isfinite(drawn).any(0)
    low, high = np.full(drawn.shape[1], np.nan), np.full(drawn.shape[1], np.nan)
    if has.any():
        low[has], high[has] = np.nanquantile(drawn[:, has], [0.025, 0.975], axis=0)
    return low, high


def _require_finite(values: Mapping[Any, Tensor], chunk: Chunk) -> None:
    for site, value in values.items():
        if not bool(torch.isfinite(value).all()):
            raise ValueError(
                f"{site} holds NaN or infinity in batch {chunk.number} (texts {sorted(set(chunk.text.tolist()))[:3]}). "
                "Load the model in float32, or leave those texts out."
            )

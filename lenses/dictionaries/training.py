"""Training of a TopK autoencoder on one site of a model (Gao et al. 2024, arXiv 2406.04093), resumable to the bit.

    dictionary = train_dictionary(model, texts, "resid_post.14", features=4608, k=32, documents=documents,
                                  checkpoint="runs/dictionary")

Rows are scaled to a mean norm of sqrt(width) for training, and the factor is folded away at the end. b starts at their
geometric median, D at random unit rows, W at D. Adam (beta 0.9, 0.999, eps 6.25e-10 [from memory, the authors' code]);
rate 2e-4 sqrt(2^14 / features) x `rate_factor`, up over the first 5 % of the steps, down to zero over the last fifth.
The paper's rate (factor 1) is for billions of tokens; few steps want more: SmolLM2's resid_post.14, 2,304 features,
k = 32, 240 steps of 1,024 rows, held-out explained variance 0.650 at factor 1, 0.721 at 3, 0.749 at 8. A step took 80
ms there and 135 with 4,608 features (one busy thread; the product that chooses features 34 and 95 of them).
Rows of D are kept at unit norm and their gradients orthogonal to them. A feature off for `dead_after` tokens is dead,
and learns from what the others leave (AuxK). Loss and gradients: `topk_gradients`.

Sinks (first tokens, BOS, massive activations: `site_rows`) are left out unless `rule=NO_SINKS`. All rows are kept in
memory where the texts have at most `buffer` tokens; else blocks of batches are run again in each epoch, in another
order, and rows shuffled within a block. A share of the documents is held out and only measured.
Killed at any moment, the same call goes on from the last checkpoint and ends bit for bit where an undisturbed one ends
(same machine and threads; the activations are computed again).
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm.auto import tqdm

from microtome.capture.dissect import dissect
from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.lenses.dictionaries.dictionary import Dictionary
from microtome.lenses.dictionaries.site_rows import SiteRows, site_rows
from microtome.lenses.dictionaries.training_state import TrainingState
from microtome.lenses.document_shards import document_hash
from microtome.lenses.documents import document_numbers
from microtome.lenses.made_for import name_of, weights_of
from microtome.lenses.strata import TokenRule

CHECKPOINT = "training.safetensors"


@dataclass(frozen=True)
class DictionarySettings:
    """How a dictionary is trained.

    Attributes:
        steps: in all. batch: rows of a step.
        rate: of Adam, None for 2e-4 sqrt(2^14 / features) `rate_factor`.
        dead_after: tokens without a feature being on, until it counts as dead. k_aux: dead features that a token's rest
            is rebuilt from, None for half the width. aux_weight: of that term.
        buffer: tokens whose rows are in memory at once.
        held_out_share: of documents, 0 for none. held_out_rows: measured, at most.
        evaluate_every, checkpoint_every: steps.
        seed: of the split, the start and the order.
    """

    steps: int = 2000
    batch: int = 1024
    rate: float | None = None
    rate_factor: float = 4.0
    dead_after: int = 100_000
    k_aux: int | None = None
    aux_weight: float = 1 / 32
    buffer: int = 250_000
    held_out_share: float = 0.1
    held_out_rows: int = 4096
    evaluate_every: int = 100
    checkpoint_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "dead_after", "buffer", "held_out_rows", "evaluate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}. Give at least 1.")
        for name in ("rate", "rate_factor", "aux_weight"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < np.inf:
                raise ValueError(f"{name} is {value}. Give a finite number from 0 on.")
        if not 0 <= self.held_out_share < 1:
            raise ValueError(f"held_out_share is {self.held_out_share}. Give a share of documents from 0 to below 1.")

    def rate_at(self, step: int, features: int) -> float:
        """The rate of a step, counted from 0."""
        full = self.rate_factor * 2e-4 * (2**14 / features) ** 0.5 if self.rate is None else self.rate
        up = (step + 1) / max(1.0, 0.05 * self.steps)
        down = (self.steps - step) / max(1.0, 0.2 * self.steps)
        return full * min(1.0, up, down)


def train_dictionary(
    model: LoadedModel | nn.Module,
    texts: Any,
    site: str | tuple | Site,
    *,
    features: int,
    k: int,
    documents: Iterable[Any] | None = None,
    rule: TokenRule | None = None,
    settings: DictionarySettings | None = None,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    **options: Any,
) -> Dictionary:
    """Train a TopK dictionary; its `facts["history"]` has the columns of the curve (`pd.DataFrame(...)`).

    Args:
        texts: as for `capture`. documents: name or number of the document of each text, each its own if None; held-out
            ones are whole documents.
        features: how many. k: of them on at a token.
        rule: which tokens are sinks and left out; `TokenRule()` if None, `site_rows.NO_SINKS` for none.
        checkpoint: folder for the state; what is there of the same training is gone on with.
        options: of the texts, as `corpus_pass` takes them.

    Raises:
        ValueError: k or features that do not fit, fewer than two documents to hold one out of, no token but sinks, a
            checkpoint of another training, NaN, other weights.
        KeyError, IndexError: a site that this model does not offer.
        FloatingPointError: a loss that is not finite, with the step; the last checkpoint stays.
    """
    settings = settings or DictionarySettings()
    if not 1 <= k <= features:
        raise ValueError(f"k={k} of {features} features: give a k from 1 to the number of features.")
    loaded = model if isinstance(model, LoadedModel) else LoadedModel.from_module(model, name=name_of(model))
    texts = list(texts)
    training, held_out = split_documents(len(texts), documents, settings.held_out_share, settings.seed)
    options |= {"anatomy": dissect(loaded.module)}
    source = site_rows(loaded, [texts[row] for row in training], site, rule=rule, **options)
    facts = {
        "model": name_of(model),
        "weight_sha256": weights_of(loaded),
        "site": str(source.site),
        "features": features,
        "k": k,
        "settings": asdict(settings),
        "rule": source.rule.described(),
        "training_texts": len(training),
        "held_out_texts": len(held_out),
        "texts": source.job.provenance["texts"],
        "first_rows": source.digest,
    }
    held = None
    if held_out:
        other = site_rows(loaded, [texts[row] for row in held_out], site, rule=source.rule, **options)
        facts["held_out"] = other.job.provenance["texts"]
        held = _sample(replace(other, medians=source.medians), settings.held_out_rows, settings.seed)
    path = None if checkpoint is None else Path(checkpoint) / CHECKPOINT
    with torch.inference_mode(False), torch.no_grad():
        state = _trained(source, held, features, k, settings, facts, path, progress)
    return state.dictionary(facts, name_of(model))


def _trained(
    source: SiteRows,
    held: Tensor | None,
    features: int,
    k: int,
    settings: DictionarySettings,
    facts: dict[str, Any],
    path: Path | None,
    progress: bool,
) -> TrainingState:
    device = next(source.job.module.parameters()).device
    state = TrainingState.restored(path, facts, settings, k, device) if path is not None and path.is_file() else None
    kept: dict[tuple[int, ...], Tensor] = {}
    if state is None:
        block = source.blocks(settings.buffer, seed=settings.seed, epoch=0)[0]
        kept = {block: source.of_batches(block)}
        if not len(kept[block]):
            raise ValueError("the texts have no token but sinks. Give longer texts, or rule=site_rows.NO_SINKS.")
        state = TrainingState.begun(kept[block], features, k, settings, device)
    with tqdm(total=settings.steps, initial=state.step, desc=f"dictionary {source.site}", disable=not progress) as bar:
        while state.step < settings.steps:
            before = state.step
            blocks = source.blocks(settings.buffer, seed=settings.seed, epoch=state.epoch)
            for number in range(state.block, len(blocks)):
                if blocks[number] not in kept:
                    kept = {blocks[number]: source.of_batches(blocks[number])}
                rows = kept[blocks[number]]
                for batch in _batches(len(rows), settings, state)[state.place :]:
                    if state.step == settings.steps:
                        return state
                    state.learn(rows[batch].to(device))
                    bar.update()
                    if state.step % settings.evaluate_every == 0 or state.step == settings.steps:
                        bar.set_postfix(state.record(None if held is None else held.to(device)))
                    if path is not None and (
                        state.step % settings.checkpoint_every == 0 or state.step == settings.steps
                    ):
                        state.keep(path, facts)
                state.block, state.place = number + 1, 0
            state.epoch, state.block = state.epoch + 1, 0
            if state.step == before:
                raise ValueError("an epoch of these texts has no token but sinks. Give longer texts.")
    return state


def _batches(count: int, settings: DictionarySettings, state: TrainingState) -> Sequence[Tensor]:
    """Numbers of the rows of each step of a block; what is left of a batch waits for another epoch's order."""
    order = np.random.default_rng([settings.seed, 2, state.epoch, state.block]).permutation(count)
    whole = count - count % settings.batch if count > settings.batch else count
    return torch.from_numpy(order[:whole]).split(settings.batch) if count else []


def _sample(source: SiteRows, most: int, seed: int) -> Float[Tensor, "row width"]:
    """Some rows of the pass, the same for the same seed."""
    parts, held = [], 0
    for number in np.random.default_rng([seed, 3]).permutation(len(source.job.batches)).tolist():
        parts.append(source.of_batches((number,)))
        held += len(parts[-1])
        if held >= 2 * most:
            break
    rows = torch.cat(parts)
    if not len(rows):
        raise ValueError("the held-out texts have no token but sinks. Give longer texts, or held_out_share=0.")
    return rows[torch.from_numpy(np.random.default_rng([seed, 4]).permutation(len(rows))[:most])]


def split_documents(
    count: int, documents: Iterable[Any] | None, share: float, seed: int
) -> tuple[list[int], list[int]]:
    """Numbers of the texts for training, and of those held out: whole documents, the lowest hashes of their numbers.

    Raises:
        ValueError: texts of one document, with a share to hold out.
    """
    of_text = document_numbers(documents, count).tolist()
    names = sorted(set(of_text), key=lambda name: document_hash(name, seed))
    if not share:
        return list(range(count)), []
    if len(names) < 2:
        raise ValueError(
            f"the {count} texts are of {len(names)} document, so none is left to hold out. Give texts of several, or "
            "held_out_share=0."
        )
    kept = set(names[: min(max(1, round(share * len(names))), len(names) - 1)])
    return [r for r in range(count) if of_text[r] not in kept], [r for r in range(count) if of_text[r] in kept]

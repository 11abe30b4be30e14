"""One pass of texts in which every attention call is seen, summed at once, and no pattern is kept.

    for each batch, for each layer: q, k, mask and z pass the seam -> statistics of each row -> sums by text and head

A pass can be stopped: with a checkpoint file it goes on after the last batch that was saved. Only layers whose
attention goes through transformers' interface are seen; where no layer's does, the reason is the error.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor
from tqdm.auto import tqdm

from microtome.capture.attention_seam import SeamCall, seam_observed
from microtome.capture.batches import Batch, PaddingRecipe, make_batch
from microtome.capture.forward_arguments import input_device
from microtome.capture.padding import call_options
from microtome.capture.sites import Site
from microtome.capture.tap_plan import Read
from microtome.capture.taps import taps
from microtome.data.replaced_file import replaced_file
from microtome.lenses.corpus_pass import CorpusPass
from microtome.lenses.head_sums import HeadSums

SAVE_SECONDS = 15.0


@dataclass(frozen=True, eq=False)
class SeenCall:
    """One attention call of one batch.

    Attributes:
        row: of the layer among those that are seen.
        z: `[batch, query, head, d_head]`.
        texts: number of each row's text.
        input_ids, is_real, position: of the batch, padding included; positions count real tokens.
        first_key: place of each text's first token.
    """

    row: int
    call: SeamCall
    z: Tensor
    texts: tuple[int, ...]
    input_ids: Int[Tensor, "batch query"]
    is_real: Bool[Tensor, "batch query"]
    position: Int[Tensor, "batch query"]
    first_key: Int[Tensor, " batch"]


# name of each score to what is summed and its weight, both [batch, head or 1, query]
Scored = Mapping[str, tuple[Tensor, Tensor]]


def attention_sites(plan: CorpusPass) -> list[Site]:
    """The layers whose attention can be seen, in order. Raises KeyError with the reason if there are none."""
    return plan.anatomy.expand(["pattern"])


def see_calls(plan: CorpusPass, number: int, see: Callable[[SeenCall], None]) -> None:
    """Run one batch and show every attention call; the model stops behind the last."""
    sites = attention_sites(plan)
    rows = {(plan.anatomy.tap(s).point.module, plan.anatomy.tap(s).point.call or 0): i for i, s in enumerate(sites)}
    paths = {module: path for path, module in plan.module.named_modules()}
    batch: Batch = make_batch(
        plan.texts,
        plan.batches[number],
        pad_id=plan.pad,
        recipe=plan.anatomy.padding or PaddingRecipe(),
        device=input_device(plan.module),
    )
    is_real = batch.attention_mask.bool()
    calls: Counter[str] = Counter()

    def observe(call: SeamCall, z: Tensor) -> None:
        path = paths.get(call.module, "")
        row = rows.get((path, calls[path]))
        calls[path] += 1
        if row is not None:
            place = is_real.to(z.device)
            positions = place.cumsum(1) - 1
            see(
                SeenCall(
                    row,
                    call,
                    z.detach(),
                    batch.row_ids,
                    batch.input_ids.to(z.device),
                    place,
                    positions,
                    place.int().argmax(1),
                )
            )

    last = Site("z", sites[-1].layer, stack=sites[-1].stack, call=sites[-1].call)
    reads = [Read(last, select=lambda z: z[:, :1])] if last in plan.anatomy.taps else []
    with torch.no_grad(), seam_observed(plan.module, observe):
        if reads:
            with taps(plan.module, reads, anatomy=plan.anatomy, stop=True):
                plan.module(**batch.model_inputs(), **call_options(plan.module))
        else:
            plan.module(**batch.model_inputs(), **call_options(plan.module))
    for (path, call), row in rows.items():
        if calls[path] <= call:
            raise RuntimeError(f"{sites[row]}: its attention was not called through the seam in this forward pass.")


def head_sums(
    plan: CorpusPass,
    score: Callable[[SeenCall], Scored],
    *,
    checkpoint: Path | None = None,
    key: str = "",
    bar: "tqdm | None" = None,
) -> HeadSums:
    """Sums of every text, from all batches or from those that a checkpoint of the same key does not hold yet.

    score: what to sum over the queries of a call. key: names what is summed; another key's checkpoint is not used.
    """
    layers = len(attention_sites(plan))
    done, names, sums, weights = _loaded(checkpoint, key)
    if bar is not None:
        bar.update(sum(plan.tokens_of(number) for number in range(done)))
    saved = time.monotonic()

    def add(seen: SeenCall) -> None:
        nonlocal names, sums, weights
        scored = score(seen)
        if sums is None:
            names = tuple(scored)
            sums, weights = (np.zeros((len(plan.texts), len(names), layers, _heads(scored))) for _ in "ab")
        at = list(seen.texts)
        for i, (above, below) in enumerate(scored.values()):
            sums[at, i, seen.row] = above.sum(-1, dtype=torch.float64).cpu().numpy()
            weights[at, i, seen.row] = below.sum(-1, dtype=torch.float64).cpu().numpy()

    for number in range(done, len(plan.batches)):
        see_calls(plan, number, add)
        if bar is not None:
            bar.update(plan.tokens_of(number))
        is_last = number + 1 == len(plan.batches)
        if checkpoint is not None and (is_last or time.monotonic() - saved > SAVE_SECONDS):
            _save(checkpoint, key, number + 1, HeadSums(names, sums, weights))
            saved = time.monotonic()
    return HeadSums(names, sums, weights)


def _heads(scored: Scored) -> int:
    return max(above.shape[1] for above, _ in scored.values())


def _save(path: Path, key: str, done: int, held: HeadSums) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"key": key, "batches": str(done), "names": " ".join(held.names)}
    with replaced_file(path) as scratch:
        save_file({"sums": held.sums, "weights": held.weights}, scratch, metadata=facts)


def _loaded(path: Path | None, key: str) -> tuple[int, tuple[str, ...], Any, Any]:
    if path is None or not path.is_file():
        return 0, (), None, None
    try:
        opened = safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}). Delete it and run again.") from error
    with opened as held:
        facts = held.metadata() or {}
        if facts.get("key") != key:
            return 0, (), None, None
        return (
            int(facts["batches"]),
            tuple(facts["names"].split(" ")),
            held.get_tensor("sums"),
            held.get_tensor("weights"),
        )

"""A planned pass counted into moments, written every few minutes, so that the same call goes on after a kill.

What `moments_of` ends with, and the same of several models. Batches run in the order of the plan, which depends on the
texts alone; a folder that holds moments of another request is refused, and what differs is named.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import transformers
from tqdm.auto import tqdm

from microtome.capture.encoded_text import EncodedText
from microtome.capture.store_files import writing
from microtome.data.provenance import environment
from microtome.lenses.corpus_pass import Chunk
from microtome.lenses.moments import Moments
from microtome.lenses.moments_files import has_moments, load_moments, read_progress, save_moments


@runtime_checkable
class Pass(Protocol):
    """Batches of texts whose values are to be counted in: `CorpusPass`, or several models' passes side by side."""

    @property
    def texts(self) -> Sequence[EncodedText]:
        """As the models see them."""
        ...

    @property
    def batches(self) -> Sequence[Sequence[int]]:
        """Numbers of the texts that run together."""
        ...

    @property
    def tokens(self) -> int:
        """Real tokens of all texts."""
        ...

    def tokens_of(self, number: int) -> int:
        """Real tokens of one batch."""
        ...

    def chunks(self, start: int = 0) -> Iterator[Chunk]:
        """Values of the batches from number `start` on."""
        ...


def count_tokens(moments: Moments, chunk: Chunk, owners: list[int]) -> None:
    """Count in each token with itself. owners: the document of each."""
    moments.update(
        chunk.values,
        documents=owners,
        position=chunk.position.cpu(),
        is_special=chunk.is_special.cpu(),
        text=chunk.text.cpu(),
    )


CountIn = Callable[[Moments, Chunk, list[int]], None]


def accumulate(
    job: Pass,
    moments: Moments,
    documents: list[int],
    device: torch.device,
    save: str | Path | None,
    checkpoint_minutes: int | float,
    progress: bool,
    *,
    max_tokens: int,
    medians: Mapping[str, float] | None,
    count_in: CountIn = count_tokens,
    sink_share: int = 1,
) -> Moments:
    """Run a planned pass into moments of no rows, or go on from what the folder holds; what `moments_of` ends with.

    Args:
        moments: whose provenance says the running model ("model") and the texts.
        documents: number of the document of each text.
        device: where values come from.
        max_tokens, medians: of the call; with the settings of the moments they are what a folder has to agree with.
        count_in: adds the rows of a chunk, whose tokens are of the documents given.
        sink_share: rows that a token set apart makes a sink, about.

    Raises:
        ValueError: more bytes than memory is free, or a folder of another request.
        KeyError: a document without a shard.
        BlockingIOError: another process writes to the folder.
    """
    moments.split.numbers(documents)
    request = moments.settings() | {
        "model": moments.provenance["model"],
        "texts": moments.provenance["texts"]["token_ids_sha256"],
        "documents": hashlib.sha256(json.dumps(documents).encode()).hexdigest(),
        "max_tokens": max_tokens,
        "medians": dict(medians) if medians else None,
    }
    apart = sum(int(text.is_special.sum()) + 1 for text in job.texts)
    estimate = moments.estimate(sinks=sink_share * apart, device=device)
    start = 0
    with ExitStack() as lock:
        if save is not None:
            save = Path(save)
            save.mkdir(parents=True, exist_ok=True)
            lock.enter_context(writing(save))
            if has_moments(save):
                state = read_progress(save) or {}
                _require_same(save, state.get("request", {}), request)
                start = state["next_batch"]
        if start < len(job.batches):
            estimate.require_memory()
        if start:
            moments = load_moments(save, device=device)
        if start == len(job.batches):
            return moments
        if progress:
            print(f"moments: {estimate}; {job.tokens:,} tokens.", file=sys.stderr)
        _record_environment(moments, device)
        _run(job, count_in, moments, documents, start, request, save, 60 * checkpoint_minutes, progress)
    return moments


def _run(
    job: Pass,
    count_in: CountIn,
    moments: Moments,
    documents: list[int],
    start: int,
    request: dict[str, Any],
    save: Path | None,
    interval: int | float,
    progress: bool,
) -> None:
    def checkpoint(next_batch: int) -> None:
        if save is not None:
            save_moments(moments, save, {"request": request, "next_batch": next_batch, "batches": len(job.batches)})

    done = sum(job.tokens_of(number) for number in range(start))
    saved = time.monotonic()
    with tqdm(total=job.tokens, initial=done, unit="tokens", desc="moments", disable=not progress) as bar:
        for chunk in job.chunks(start):
            count_in(moments, chunk, [documents[t] for t in chunk.text.tolist()])
            bar.update(len(chunk))
            if chunk.number + 1 < len(job.batches) and time.monotonic() - saved >= interval:
                checkpoint(chunk.number + 1)
                saved = time.monotonic()
    moments.finish()
    checkpoint(len(job.batches))


def _require_same(folder: Path, held: dict[str, Any], wanted: dict[str, Any]) -> None:
    wanted = json.loads(json.dumps(wanted))
    differing = [name for name in wanted if held.get(name) != wanted[name]]
    if differing:
        said = "; ".join(f"{name}: {_brief(held.get(name))} there, {_brief(wanted[name])} now" for name in differing)
        raise ValueError(
            f"{folder} holds moments of another request ({said}). Nothing was changed. Give another folder, or remove "
            "that one."
        )


def _brief(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:90]}...{text[-20:]}"


def _record_environment(moments: Moments, device: torch.device) -> None:
    facts = environment()
    now = {name: facts[name] for name in ("processor", "accelerator", "threads", "commit", "python")}
    now |= {"device": str(device), "torch": torch.__version__, "transformers": transformers.__version__}
    if now not in moments.provenance["environments"]:
        moments.provenance["environments"].append(now)

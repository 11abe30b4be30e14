"""What a capture will run and keep, before it runs: rows and tokens of every text, their hashes, and where shards end.

All texts are encoded once for it, a chunk at a time, so that a text that is too long fails now and not at hour five,
and bytes are known exactly. Where shards end depends on nothing but the texts and the two limits: whoever captures the
same again gets the same shards.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from tqdm.auto import tqdm

from microtome.capture.encoded_text import EncodedTexts
from microtome.capture.fingerprint import tensor_bytes
from microtome.capture.forwards import READY_ROWS
from microtome.capture.job import CaptureJob
from microtome.capture.kept_positions import KeptPositions
from microtome.capture.positions import resolve_positions
from microtome.capture.precision import floating_dtype
from microtome.capture.ready_inputs import ReadyInputs
from microtome.capture.sites import Site
from microtome.capture.texts import TokenIdsHash, check_of, text_checks
from microtome.capture.token_labels import kind_of_values, token_label_columns

SHARD_BYTES = 2**30  # larger shards have batches of more equal lengths: docs/results.md
SHARD_TOKENS = 2**15
_PER_TOKEN = ("is_special", "tokens", "token_ids", "token_type_ids", "offsets")
_CHUNK = 1024  # texts encoded together
_LONG = 20_000  # texts from which the encoding gets a bar of its own

Layout = dict[Site, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class Shard:
    """Texts `first` up to, not including, `stop`; kept rows and tokens, at most, where texts go on; and a checksum of
    their token ids, by which texts that change between the plan and the run are noticed."""

    first: int
    stop: int
    rows: int
    tokens: int
    check: int | None = None


@dataclass(frozen=True)
class CapturePlan:
    """What a capture will run and keep.

    Attributes:
        shards: the parts it is made in; where texts go on, rows and tokens at most.
        layout: dtype and axes behind the rows of every site.
        longest: tokens of the longest text; None for images and sounds.
        texts: how the texts were encoded, and the hash of their token ids.
        kept_sha256: hash of the kept positions and of token labels.
        unit: what `tokens` counts, "tok" or "input".
    """

    shards: tuple[Shard, ...]
    layout: Layout
    longest: int | None
    texts: dict[str, Any]
    kept_sha256: str
    unit: str

    @property
    def rows(self) -> int:
        """Kept rows of all shards."""
        return sum(shard.rows for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens of all texts, or inputs where there are none."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all sites."""
        return _row_bytes(self.layout)

    @property
    def nbytes(self) -> int:
        """Bytes of all kept values."""
        return self.rows * self.row_bytes


def _row_bytes(layout: Layout) -> int:
    return sum(dtype.itemsize * int(np.prod(inner)) for dtype, inner in layout.values())


def plan_capture(
    job: CaptureJob, *, shard_bytes: int | None = SHARD_BYTES, shard_tokens: int | None = SHARD_TOKENS, progress: bool
) -> CapturePlan:
    """Encode every text once and divide them into shards; one shard of all without limits.

    Raises:
        ValueError: what `encode_texts` and `resolve_positions` raise, a limit below 1, nothing kept at all.
    """
    for name, limit in (("shard_bytes", shard_bytes), ("shard_tokens", shard_tokens)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name}={limit}: give at least 1.")
    if isinstance(job.source, ReadyInputs):
        return _plan_ready(job, shard_bytes)
    layout = _layout_of(job)
    counts: list[np.ndarray] = []
    kinds: dict[str, set[str | None]] = {}
    kept_hash, ids_hash, settings, longest = hashlib.sha256(), TokenIdsHash(), {}, 0
    for first, encoded, kept in _chunks(job, whole=shard_bytes is None and shard_tokens is None, progress=progress):
        n_kept = np.bincount(kept.text, minlength=len(encoded.rows))
        counts.append(np.stack([n_kept, kept.lengths, text_checks(encoded.rows)], axis=1))
        longest = max(longest, *encoded.lengths)
        ids_hash.add(encoded.rows)
        for array in (kept.text + first, kept.position, kept.size, kept.span, kept.tokens):
            kept_hash.update(np.ascontiguousarray(array, dtype=np.int64))
        kept_hash.update(json.dumps([row.text for row in encoded.rows]).encode())  # other strings may have the same ids
        for name, column in token_label_columns(job.token_labels, encoded.rows, kept, first_row=first).items():
            kept_hash.update((name + json.dumps(column.tolist(), default=repr)).encode())
            kinds.setdefault(name, set()).add(kind_of_values(None if pd.isna(v) else v for v in column.tolist()))
        n_truncated = settings.get("n_truncated", 0) + encoded.provenance["n_truncated"]
        settings = encoded.provenance | {"n_truncated": n_truncated}
    for name, found in kinds.items():
        if len(found - {None}) > 1:
            raise TypeError(f"token_labels[{name!r}] holds {' and '.join(sorted(found - {None}))}; give it one type.")
    texts = settings | {"n_texts": job.n_texts, "token_ids_sha256": ids_hash.hexdigest()}
    layout = {site: (dtype, _to_longest(site, inner, longest)) for site, (dtype, inner) in layout.items()}
    table = np.concatenate(counts)
    job.require_rows(int(table[:, 0].sum()))
    shards = _divide(table, None if shard_bytes is None else max(1, shard_bytes // _row_bytes(layout)), shard_tokens)
    return CapturePlan(shards, layout, longest, texts, kept_hash.hexdigest(), "tok")


def _chunks(job: CaptureJob, *, whole: bool, progress: bool) -> Iterator[tuple[int, EncodedTexts, KeptPositions]]:
    step = job.n_texts if whole else _CHUNK
    show = progress and job.n_texts > _LONG
    with tqdm(total=job.n_texts, unit="text", desc="encoding", disable=not show) as bar:
        for first in range(0, job.n_texts, step):
            encoded = job.source.encode(first, min(first + step, job.n_texts))
            yield first, encoded, job.kept_of(encoded, first)
            bar.update(len(encoded.rows))


def _divide(counts: np.ndarray, most_rows: int | None, most_tokens: int | None) -> tuple[Shard, ...]:
    """Consecutive texts to shards: a shard ends before either limit, and never without a row or within a text."""
    ends, rows, tokens = [], 0, 0
    for text, (n_kept, length, _) in enumerate(counts.tolist()):
        over = (most_rows is not None and rows + n_kept > most_rows) or (
            most_tokens is not None and tokens + length > most_tokens
        )
        if over and rows and counts[text:, 0].any():
            ends.append(text)
            rows = tokens = 0
        rows, tokens = rows + n_kept, tokens + length
    bounds = [0, *ends, len(counts)]
    return tuple(
        Shard(first, stop, *(int(n) for n in counts[first:stop, :2].sum(0)), check_of(counts[first:stop, 2]))
        for first, stop in pairwise(bounds)
    )


def _layout_of(job: CaptureJob) -> Layout:
    """Dtype and inner axes of every site, from the anatomy; pattern rows get the length of the longest text later."""
    forwards = job.forwards
    if forwards.dtype is None and not _is_of_one_dtype(forwards.module):
        return _layout_by_running(job)
    dtype = forwards.dtype or floating_dtype(forwards.module)
    layout = {}
    for site in forwards.sites:
        tap = forwards.anatomy.tap(site.whole)
        heads = () if tap.head_count is None or site.head is not None else (tap.head_count,)
        layout[site] = dtype, (*heads, tap.width)
    return layout


def _is_of_one_dtype(module: nn.Module) -> bool:
    """Whether it computes in float32 throughout: models of half precision keep some sites wider."""
    return {p.dtype for p in module.parameters() if p.is_floating_point()} <= {torch.float32}


def _layout_by_running(job: CaptureJob) -> Layout:
    """Dtype and inner axes from the first few tokens of the first text, without the caller's edits."""
    row = job.source.encode(0, 1).rows[0]
    cut = {name: value if (value := getattr(row, name)) is None else value[:4] for name in _PER_TOKEN}
    text = replace(row, length=min(row.length, 4), **cut)
    kept = resolve_positions("first", [text])
    plain = replace(job.forwards, edits={})
    values = plain.texts([text], kept, longest=text.length, name_row=lambda row: "the first text")
    return {site: (value.dtype, tuple(value.shape[1:])) for site, value in values.items()}


def _to_longest(site: Site, inner: tuple[int, ...], longest: int) -> tuple[int, ...]:
    return (*inner[:-1], longest) if site.kind == "pattern" else inner


def _plan_ready(job: CaptureJob, shard_bytes: int | None) -> CapturePlan:
    """Images and sounds: rows are known once the model ran, so their number is taken from the first input."""
    inputs = job.source
    first = [0] if inputs.is_splittable else range(inputs.n_rows)
    wanted = job.positions[: len(first)] if isinstance(job.positions, list) else job.positions
    plain = replace(job.forwards, edits={})
    kept, _, values = plain.ready(inputs, first, wanted, job.include_special)
    layout = {site: (value.dtype, tuple(value.shape[1:])) for site, value in values.items()}
    if shard_bytes is not None and any(site.kind == "pattern" for site in layout):
        raise ValueError("pattern rows of images and sounds differ in length; capture them without store=.")
    each = max(1, round(kept.n_kept / len(first)))
    step = inputs.n_rows
    if shard_bytes is not None and inputs.is_splittable:
        step = max(1, shard_bytes // (_row_bytes(layout) * each))
        step = max(READY_ROWS, step // READY_ROWS * READY_ROWS)
    bounds = [*range(0, inputs.n_rows, step), inputs.n_rows]
    shards = tuple(Shard(a, b, (b - a) * each, b - a) for a, b in pairwise(bounds))
    digest = hashlib.sha256()
    for name, tensor in sorted(inputs.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor_bytes(tensor))
    digest.update(json.dumps(job.positions, default=str).encode())
    return CapturePlan(shards, layout, None, inputs.provenance, digest.hexdigest(), "input")

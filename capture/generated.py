"""Activations of a text and of what the model writes after it: taps stay on during `generate`, steps join by position.

Position p counts real tokens of the prompt from 0 and goes on through the generated ones. A generated token's
activations are those of the step that read it, so one token more is generated than asked for, and dropped; the
end-of-text token and what a batch still writes after it are left out.
Proof: equal to one forward of the whole sequence (tests/capture/test_generated.py).
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from microtome.capture.anatomy import Anatomy
from microtome.capture.batches import Batch, PaddingRecipe, make_batch, plan_batches
from microtome.capture.encoded_text import EncodedText
from microtome.capture.forward_call import batch_rows
from microtome.capture.forwards import Forwards
from microtome.capture.kept_positions import KeptPositions
from microtome.capture.limits import length_limit
from microtome.capture.padding import limit_for
from microtome.capture.positions import resolve_positions
from microtome.capture.precision import precision
from microtome.capture.sites import Site
from microtome.capture.tap_plan import Read
from microtome.capture.taps import taps

STEP_LIMIT = 1e-3  # 65 families at hand stay below 8e-4, most below 1e-6; models whose cache misleads are over 1
ROUNDED_STEP_LIMIT = 0.1  # half precision: near ties of many steps
_CHECKED_BATCHES = 2  # the second meets what the first left behind
OnTokens = Callable[[Sequence[int], Int[Tensor, " batch"]], object]  # texts, ids
POLICIES = ("last", "first", "mean", "all", "prompt", "generated")


@dataclass(frozen=True)
class Generation:
    """How texts go on.

    Attributes:
        max_new_tokens: tokens per text at most; fewer where the model ends the text.
        do_sample: draw tokens; without it the likeliest one is taken.
        temperature, top_p, top_k: of the draw.
        seed: of the draw. Each batch draws from a hash of the seed and of its first text, so seeds are independent;
            what is drawn depends on the batches, and they on `max_tokens`.
    """

    max_new_tokens: int
    do_sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self):
        for name in ("max_new_tokens", "top_k", "seed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not (isinstance(value, int) or (name == "top_k" and value is None)):
                raise TypeError(f"{name}={value!r} ({type(value).__name__}): give a whole number.")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: give at least 1.")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}: give 0 or more.")
        if self.temperature <= 0 or not 0 < self.top_p <= 1 or (self.top_k is not None and self.top_k < 1):
            raise ValueError(
                f"temperature={self.temperature}, top_p={self.top_p}, top_k={self.top_k}: give a temperature above 0, "
                "a top_p above 0 and up to 1, a top_k of 1 or more. For the likeliest token: do_sample=False."
            )
        if not self.do_sample and (self.temperature, self.top_p, self.top_k) != (1.0, 1.0, None):
            raise ValueError("temperature, top_p and top_k need do_sample=True; else the likeliest token is taken.")


def resolve_generated(
    positions: Any, rows: Sequence[EncodedText], n_prompt: Sequence[int], *, include_special: bool, first_row: int
) -> KeptPositions:
    """As `resolve_positions` over prompt and continuation; "prompt" and "generated" are their tokens.

    Raises:
        ValueError: spans, which continuations do not have; what `resolve_positions` raises.
    """
    wanted = positions if isinstance(positions, list) else [positions] * len(rows)
    if any(isinstance(part, str) and part not in POLICIES for part in wanted):
        raise ValueError(f"positions={positions!r:.60}: with generate= expected {', '.join(POLICIES)}, or indices.")
    if any(not isinstance(part, str | int | list) for part in wanted):
        raise ValueError("With generate=, positions are names or indices; spans of characters have no place there.")
    parts = {"prompt": lambda row, n: list(range(n)), "generated": lambda row, n: list(range(n, row.length))}
    by_text = [
        parts[part](row, n) if isinstance(part, str) and part in parts else part
        for part, row, n in zip(wanted, rows, n_prompt, strict=True)
    ]
    return resolve_positions(by_text, rows, include_special=include_special, first_row=first_row, is_part=True)


def continued(row: EncodedText, ids: list[int], words: Sequence[str]) -> EncodedText:
    """A text with generated tokens behind it; they have no characters in the prompt."""
    n = len(ids)
    types = None if row.token_type_ids is None else torch.cat([row.token_type_ids, row.token_type_ids[-1:].expand(n)])
    return replace(
        row,
        length=row.length + n,
        is_special=torch.cat([row.is_special, torch.zeros(n, dtype=torch.bool)]),
        tokens=(*row.tokens, *words),
        token_ids=torch.cat([row.token_ids, torch.tensor(ids, dtype=row.token_ids.dtype)]),
        token_type_ids=types,
        offsets=None if row.offsets is None else torch.cat([row.offsets, row.offsets.new_zeros(n, 2)]),
    )


def generate_rows(
    forwards: Forwards,
    generation: Generation,
    rows: Sequence[EncodedText],
    keep: Callable[[Sequence[EncodedText], Sequence[int]], KeptPositions],
    decode: Callable[[list[int]], str],
    *,
    only_generated: bool,
    first_row: int,
    advance: Callable[[int], object],
    on_tokens: OnTokens | None = None,
) -> tuple[list[EncodedText], KeptPositions, dict[Site, Tensor]]:
    """Let every text go on and keep what `keep` says of the whole rows.

    Args:
        keep: positions of some rows with what was generated, given their numbers.
        decode: one token id as a string.
        only_generated: whether nothing of the prompts is kept, so that it need not be held.

    Returns:
        The rows with what was generated, what is kept of them, and every site's kept rows in that order.

    Raises:
        ValueError: a site that generation does not compute at these positions; values that are not finite.
    """
    whole: list[EncodedText] = list(rows)
    held: list[tuple[list[int], dict[Site, Tensor]]] = []
    ends = end_ids(forwards.module)
    lengths = [row.length for row in rows]
    require_room(forwards.module, generation, lengths, first_row)
    planned = generation_batches(forwards.module, forwards.anatomy, lengths, generation, forwards.max_tokens)
    for number, row_ids in enumerate(planned):
        batch = make_batch(rows, row_ids, pad_id=forwards.pad, recipe=PaddingRecipe("left"), device=forwards.home)
        texts = [first_row + row for row in row_ids]
        ids, values = _run(forwards, generation, batch, only_generated, texts, on_tokens)
        width = batch.attention_mask.shape[1]
        read = ids.shape[1] - 1  # tokens that a step has read
        real = torch.cat([batch.attention_mask, batch.attention_mask.new_zeros(len(row_ids), read - width)], 1)
        for place, row in enumerate(row_ids):
            fresh = before_end(ids[place, width:].tolist(), ends)[: read - width]
            whole[row] = continued(rows[row], fresh, [decode([token]) for token in fresh])
            real[place, width : width + len(fresh)] = 1
        if number < _CHECKED_BATCHES and not forwards.edits:
            place = int(real.sum(1).argmax())
            _require_same_as_forward(forwards, whole[row_ids[place]], real[place], values, place)
        kept = keep([whole[row] for row in row_ids], row_ids)
        places = kept.in_batch(range(len(row_ids)), real)
        if only_generated:
            places = replace(places, position_index=places.position_index - width, shape=(len(row_ids), read - width))

        def name_row(index: int, kept: KeptPositions = kept, row_ids: list[int] = row_ids) -> str:
            return f"text {first_row + row_ids[int(kept.text[index])]}, position {int(kept.position[index])}"

        chosen = {
            site: forwards.stored(site, places.select(value), places.kept_index, name_row)
            for site, value in values.items()
        }
        held.append((row_ids, chosen))
        advance(sum(whole[row].length for row in row_ids))
    kept = keep(whole, range(len(whole)))
    return whole, kept, _in_order(held, kept)


def require_room(module: nn.Module, generation: Generation, lengths: Sequence[int], first_row: int = 0) -> None:
    """Raise ValueError for a prompt that leaves no room for what is to be written."""
    limit = length_limit(module, None)
    for row, length in enumerate(lengths):
        if limit is not None and length + generation.max_new_tokens > limit:
            raise ValueError(
                f"row {first_row + row} has {length} tokens; with max_new_tokens={generation.max_new_tokens} that "
                f"is over the model's {limit}. Shorten it, or let fewer be written."
            )


def _require_same_as_forward(
    forwards: Forwards, row: EncodedText, real: Tensor, values: dict[Site, Tensor], place: int
) -> None:
    """Steps with a cache are those of one forward of the whole text, on one text of a batch, or the model is refused.

    Raises ValueError: the cache of another text acts on this one, or steps see otherwise than a forward does.
    """
    at = real.nonzero()[:, 0]
    n_missing = len(real) - next(iter(values.values())).shape[1]  # positions of the prompt that were not held
    at = at[at >= n_missing]
    if not len(at):
        return
    ids = row.token_ids[None].to(forwards.home)
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad(), taps(forwards.module, list(forwards.sites), anatomy=forwards.anatomy) as tape:
        forwards.module(**arguments, **forwards.options)
    limit = STEP_LIMIT if precision(forwards.module) == "full" else ROUNDED_STEP_LIMIT
    for site, value in values.items():
        stepped, at_once = value[place, at - n_missing].flatten(1).float(), tape[site][0, -len(at) :].flatten(1).float()
        error = float(((stepped - at_once).norm(dim=1) / at_once.norm(dim=1).clamp(min=1e-6)).max())
        if error > limit:
            raise ValueError(
                f"{site}: what {type(forwards.module).__name__} computes step by step differs from one forward of the "
                f"whole text by {error:.2g} of its size (limit {limit:g}), so it is not said which is meant. Let it "
                "write first, then capture the whole texts."
            )


def _run(
    forwards: Forwards,
    generation: Generation,
    batch: Batch,
    only_generated: bool,
    texts: Sequence[int],
    on_tokens: OnTokens | None,
) -> tuple[Int[Tensor, "batch token"], dict[Site, Tensor]]:
    """One batch through `generate`: prompt and new tokens, and every site's values at the positions that were read."""
    width = batch.attention_mask.shape[1]
    reads = [Read(site, select=_Step(site, 0 if only_generated else width)) for site in forwards.sites]
    with taps(forwards.module, reads, forwards.edits, anatomy=forwards.anatomy) as tape:
        ids = written(forwards.module, generation, batch, texts=texts, pad=forwards.pad, beyond=1, on_tokens=on_tokens)
    return ids, {site: torch.cat(tape.all(site), dim=1) for site in forwards.sites}


def written(
    module: nn.Module,
    generation: Generation,
    batch: Batch,
    *,
    texts: Sequence[int],
    pad: int,
    beyond: int = 0,
    use_cache: bool = True,
    on_tokens: OnTokens | None = None,
) -> Int[Tensor, "batch token"]:
    """One batch, padded on the left, through the model's own `generate`: ids of the prompts and of what was written.

    Args:
        texts: numbers of the batch's texts, of which the least seeds the draw.
        beyond: tokens written beyond those that were asked for, so that the last of them is read.
        use_cache: False computes every step anew.
        on_tokens: told the texts and their new ids at each step.
    """
    draw = {"temperature": generation.temperature, "top_p": generation.top_p, "top_k": generation.top_k or 0}
    settings = GenerationConfig(
        max_new_tokens=generation.max_new_tokens + beyond,
        do_sample=generation.do_sample,
        pad_token_id=pad,
        eos_token_id=end_ids(module) or None,
        use_cache=use_cache,
        **(draw if generation.do_sample else {}),
    )
    home = batch.input_ids.device
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[home] if home.type == "cuda" else []),
        batch_rows(texts, batch.attention_mask.sum(1).tolist()),
        _only_these(module, settings),
    ):
        torch.manual_seed(_seed(generation.seed, min(texts)))
        return module.generate(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            generation_config=settings,
            streamer=None if on_tokens is None else _Teller(on_tokens, list(texts), generation.max_new_tokens),
        )


class _Teller(BaseStreamer):
    """Hands on the ids of each step; those of the prompt, and those beyond what was asked for, are left out."""

    def __init__(self, on_tokens: OnTokens, texts: list[int], n: int):
        self.on_tokens, self.texts, self.left, self.is_prompt = on_tokens, texts, n, True

    def put(self, value: Tensor) -> None:
        if self.is_prompt:
            self.is_prompt = False
        elif self.left:
            self.left -= 1
            self.on_tokens(self.texts, value.reshape(len(self.texts)))

    def end(self) -> None:
        """Nothing is left to hand on."""


@contextmanager
def _only_these(module: nn.Module, settings: GenerationConfig) -> Iterator[None]:
    """Settings that the checkpoint ships (a penalty, beams, forbidden words) do not fill what ours leave open."""
    shipped = module.generation_config
    module.generation_config = settings
    try:
        yield
    finally:
        module.generation_config = shipped


def _seed(seed: int, row: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {row}".encode()).digest()[:8], "little") >> 1


class _Step:
    """The positions that a step adds: those of the prompt in the first, one in every other (the rest was cached)."""

    def __init__(self, site: Site, n_first: int):
        self.site, self.n, self.n_first = site, 0, n_first

    def __call__(self, value: Tensor) -> Tensor:
        n = self.n_first if self.n == 0 else 1
        self.n += 1
        if value.shape[1] < n:
            raise ValueError(
                f"{self.site}: generate computes it at {value.shape[1]} position(s) of the prompt, not at all {n}. "
                'Keep positions="generated", or capture the prompt without generate=.'
            )
        return value[:, value.shape[1] - n :]


def generation_batches(
    module: nn.Module, anatomy: Anatomy, lengths: Sequence[int], generation: Generation, max_tokens: int
) -> list[list[int]]:
    """Texts that run together: padded on the left where that was proved right, else only those of equal length."""
    errors = anatomy.padding_errors
    is_paddable = any(name.startswith("left") and error <= limit_for(module) for name, error in errors.items())
    classes = [list(range(len(lengths)))]
    if not is_paddable:
        classes = [[i for i, length in enumerate(lengths) if length == n] for n in sorted(set(lengths), reverse=True)]
    plans = []
    for members in classes:
        full = [lengths[i] + generation.max_new_tokens for i in members]
        plans += [[members[i] for i in some] for some in plan_batches(full, max_tokens=max_tokens)]
    return plans


def end_ids(module: nn.Module) -> list[int]:
    """Ids that end a text, by the model's generation settings or its configuration."""
    ends = getattr(getattr(module, "generation_config", None), "eos_token_id", None)
    ends = getattr(module.config, "eos_token_id", None) if ends is None else ends
    return [] if ends is None else list(ends) if isinstance(ends, list | tuple) else [int(ends)]


def before_end(ids: list[int], ends: list[int]) -> list[int]:
    at = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return ids[:at]


def _in_order(held: list[tuple[list[int], dict[Site, Tensor]]], kept: KeptPositions) -> dict[Site, Tensor]:
    """The batches' kept rows in the order of the texts."""
    starts = np.searchsorted(kept.text, np.arange(len(kept.lengths) + 1))
    filed: dict[Site, Tensor] = {}
    for row_ids, values in held:
        index = torch.from_numpy(np.concatenate([np.arange(starts[row], starts[row + 1]) for row in row_ids]))
        for site, value in values.items():
            if site not in filed:
                filed[site] = value.new_empty(kept.n_kept, *value.shape[1:])
            filed[site][index.to(value.device)] = value
    return filed

"""Let a steered model write: `generate(model, prompts, steering)`, all at once, or `stream(...)` piece by piece.

The model's own `generate` runs, with edits acting in every step; what is recorded beside the texts are the settings,
the ledger, and, with `sites`, activations of the same call.
"""

import contextvars
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd
from torch import Tensor, nn
from tqdm.auto import tqdm

from microtome.capture.activations import Activations
from microtome.capture.anatomy import Anatomy
from microtome.capture.batches import MAX_TOKENS, PaddingRecipe, make_batch
from microtome.capture.collect import capture
from microtome.capture.forward_arguments import input_device
from microtome.capture.generated import (
    Generation,
    OnTokens,
    before_end,
    end_ids,
    generation_batches,
    require_room,
    written,
)
from microtome.capture.limits import pad_id
from microtome.capture.models import LoadedModel
from microtome.capture.tap_plan import SiteName
from microtome.capture.taps import taps
from microtome.capture.text_source import TextSource, text_source
from microtome.interventions.ledger import Ledger
from microtome.interventions.steering import Steering, Strength, anatomy_of


@dataclass(frozen=True, eq=False)
class Generated:
    """What was written.

    Attributes:
        table: a row per prompt: text, prompt, completion, tokens, ended (by the model itself).
        token_ids: what was written after each prompt, the end token left out.
        prompt_ids: each prompt's tokens.
        ledger: what interventions did.
        settings: of the draw and the cache.
        seconds: of generation alone.
        activations: of `sites`, or None.
    """

    table: pd.DataFrame
    token_ids: list[list[int]]
    prompt_ids: list[list[int]]
    ledger: Ledger
    settings: dict[str, Any]
    seconds: float
    activations: Activations | None = None

    def __repr__(self) -> str:
        return f"Generated({len(self.table)} texts, {sum(map(len, self.token_ids))} tokens in {self.seconds:.1f} s)"

    @property
    def completions(self) -> list[str]:
        """What was written after each prompt."""
        return self.table["completion"].tolist()


def generate(
    model: LoadedModel | nn.Module,
    prompts: Iterable[Any],
    steering: Steering | None = None,
    generation: Generation | int = 32,
    *,
    strength: Strength = 1.0,
    sites: Iterable[SiteName] | SiteName = (),
    positions: Any = "generated",
    on_tokens: OnTokens | None = None,
    use_cache: bool = True,
    anatomy: Anatomy | None = None,
    add_generation_prompt: bool = False,
    add_special_tokens: bool = True,
    max_tokens: int = MAX_TOKENS,
    progress: bool = False,
) -> Generated:
    """Write after each prompt, steered or not.

    Args:
        model: from `load_model`, or a causal language model in eval mode (prompts are then token ids).
        prompts: strings, message lists or token ids.
        steering: what acts; None is the model as it is.
        generation: `Generation(...)`, or how many tokens.
        strength: multiplies every intervention's, by one number or one for each prompt. 0 is the unsteered model.
        sites, positions: activations to keep in the same call, as in `capture`.
        on_tokens: told `(texts, ids)` at each step.
        use_cache: False computes all of a text anew at each step: slow, and another method for positions "last".
        add_generation_prompt: whether message lists end with the opening of the assistant's turn.
        max_tokens: padded tokens of a batch.

    Raises:
        ValueError: no prompts, a model that does not write, no room for what is to be written; what `Steering.edits`
            refuses; sites without a cache.
        TapNeverFired, NeverActed: an edit that did nothing.
    """
    settings = generation if isinstance(generation, Generation) else Generation(max_new_tokens=generation)
    loaded = model if isinstance(model, LoadedModel) else LoadedModel.from_module(model, name=type(model).__name__)
    module = loaded.module
    if not (hasattr(module, "generate") and module.can_generate()):
        raise ValueError(f"{type(module).__name__} does not write. Load a causal language model.")
    anatomy = anatomy_of(module) if anatomy is None else anatomy
    prompts = list(prompts) if not isinstance(prompts, str) else [prompts]
    source = text_source(
        prompts, loaded, add_special_tokens=add_special_tokens, add_generation_prompt=add_generation_prompt
    )
    if not isinstance(source, TextSource) or not len(source):
        raise ValueError("No prompts. Give strings, message lists or token ids.")
    encoded = source.encode(0, len(source))
    steering = None if steering is None else steering.times(strength)
    _require_strengths(steering, len(source))
    ledger = Ledger.of(steering or ())
    edits = {} if steering is None else steering.edits(anatomy, ledger)
    said = {**asdict(settings), "use_cache": use_cache, "max_tokens": max_tokens}
    prompt_ids = [row.token_ids.tolist() for row in encoded.rows]
    begun = time.perf_counter()
    kept: Activations | None = None
    if sites:
        if not use_cache:
            raise ValueError("sites= with use_cache=False: capture the whole texts afterwards.")
        told = _Told(len(source), on_tokens)
        kept = capture(
            loaded,
            prompts,
            sites,
            positions,
            edits=edits,
            generate=settings,
            on_tokens=told,
            add_special_tokens=add_special_tokens,
            add_generation_prompt=add_generation_prompt,
            max_tokens=max_tokens,
            progress=progress,
        )
        ids = told.ids
    else:
        ids = _ids(module, anatomy, encoded.rows, settings, edits, on_tokens, use_cache, loaded, max_tokens, progress)
    seconds = time.perf_counter() - begun
    ends = end_ids(module)
    fresh = [before_end(row, ends) for row in ids]
    ended = [len(row) < settings.max_new_tokens for row in fresh]
    ledger.require_acted()
    tokenizer = loaded.tokenizer
    completions = [" ".join(map(str, row)) if tokenizer is None else tokenizer.decode(row) for row in fresh]
    table = pd.DataFrame(
        {
            "text": range(len(fresh)),
            "prompt": [row.text for row in encoded.rows],
            "completion": completions,
            "tokens": [len(row) for row in fresh],
            "ended": ended,
        }
    )
    return Generated(table, fresh, prompt_ids, ledger, said, seconds, kept)


def _require_strengths(steering: Steering | None, n: int) -> None:
    """Raise ValueError for strengths of another number of texts."""
    for one in steering or ():
        if isinstance(one.strength, tuple) and len(one.strength) != n:
            raise ValueError(f"{one.name} has strengths of {len(one.strength)} texts for {n} prompts: give one each.")


class _Told:
    """Collects ids by text while they are written, and tells them on."""

    def __init__(self, n: int, on_tokens: OnTokens | None):
        self.ids: list[list[int]] = [[] for _ in range(n)]
        self.on_tokens = on_tokens

    def __call__(self, texts: Sequence[int], ids: Tensor) -> None:
        for text, token in zip(texts, ids.tolist(), strict=True):
            self.ids[text].append(token)
        if self.on_tokens is not None:
            self.on_tokens(texts, ids)


def _ids(
    module: nn.Module,
    anatomy: Anatomy,
    rows: Sequence[Any],
    settings: Generation,
    edits: Any,
    on_tokens: OnTokens | None,
    use_cache: bool,
    loaded: LoadedModel,
    max_tokens: int,
    progress: bool,
) -> list[list[int]]:
    """What is written after each prompt, batch by batch."""
    lengths = [row.length for row in rows]
    require_room(module, settings, lengths)
    found: list[list[int]] = [[] for _ in rows]
    pad, home = pad_id(module, loaded.tokenizer), input_device(module)
    with tqdm(total=len(rows), unit="text", desc="generate", disable=not progress) as bar:
        for row_ids in generation_batches(module, anatomy, lengths, settings, max_tokens):
            batch = make_batch(rows, row_ids, pad_id=pad, recipe=PaddingRecipe("left"), device=home)
            with taps(module, (), edits, anatomy=anatomy) if edits else nullcontext():
                ids = written(module, settings, batch, texts=row_ids, pad=pad, use_cache=use_cache, on_tokens=on_tokens)
            width = batch.attention_mask.shape[1]
            for place, row in enumerate(row_ids):
                found[row] = ids[place, width:].tolist()
            bar.update(len(row_ids))
    return found


def stream(
    model: LoadedModel,
    prompt: Any,
    steering: Steering | None = None,
    generation: Generation | int = 128,
    **options: Any,
) -> Iterator[str]:
    """The text written after one prompt, in pieces as they come; options as `generate`.

    Characters of several tokens are held back until they are whole. Leaving the loop stops the writing.

    Raises what `generate` raises, at the piece where it happened.
    """
    pieces: queue.Queue[tuple[str, Any]] = queue.Queue()
    is_left = threading.Event()
    tokenizer, ends = model.require_tokenizer(), set(end_ids(model.module))

    def told(texts: Sequence[int], ids: Tensor) -> None:
        if is_left.is_set():
            raise _Left
        pieces.put(("id", int(ids[0])))

    def write() -> None:
        try:
            generate(model, [prompt], steering, generation, on_tokens=told, **options)
        except _Left:
            pass
        except BaseException as error:  # handed to whoever reads the pieces
            pieces.put(("error", error))
        pieces.put(("end", None))

    worker = threading.Thread(target=contextvars.Context().run, args=(write,), daemon=True)
    worker.start()
    held: list[int] = []
    shown = 0
    try:
        while True:
            kind, value = pieces.get()
            if kind == "error":
                raise value
            if kind == "end":
                break
            if value in ends:
                continue
            held.append(value)
            text = tokenizer.decode(held)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[shown:]
                shown = len(text)
        if (rest := tokenizer.decode(held)[shown:]) and held:
            yield rest
    finally:
        is_left.set()
        worker.join()


class _Left(BaseException):
    """The reader of a stream has gone."""

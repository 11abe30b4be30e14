"""Run texts through a model and keep chosen sites at chosen positions: `capture(model, texts, sites, positions)`.

Texts run in length-bucketed batches with explicit masks, under the padding recipe that the model's anatomy proved, so a
text gives the same activations alone and in any batch. What is kept stays in memory, or, with `store=`, goes to disk a
shard at a time: such a capture may be larger than memory and be killed at any moment, the same call goes on.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from torch import nn
from tqdm.auto import tqdm

from microtome.capture.activations import Activations
from microtome.capture.batches import MAX_TOKENS
from microtome.capture.capture_plan import SHARD_BYTES, SHARD_TOKENS, plan_capture
from microtome.capture.dissect import dissect
from microtome.capture.estimate import Estimate, estimate_job
from microtome.capture.forward_arguments import input_device
from microtome.capture.forwards import Forwards
from microtome.capture.generated import Generation, OnTokens
from microtome.capture.job import CaptureJob
from microtome.capture.label_table import label_table
from microtome.capture.limits import pad_id
from microtome.capture.models import LoadedModel
from microtome.capture.positions import require_one_each
from microtome.capture.ready_inputs import ReadyInputs
from microtome.capture.sites import Site
from microtome.capture.store_writer import write_store
from microtome.capture.tap_plan import Edit, EditFunction, SiteName
from microtome.capture.text_source import text_source
from microtome.capture.token_labels import TokenLabels, checked_token_labels


@torch.inference_mode(False)  # what is kept could otherwise never be part of a graph
def capture(
    model: LoadedModel | nn.Module,
    texts: Iterable | Mapping[str, Any],
    sites: Iterable[SiteName] | SiteName,
    positions: Any = "last",
    *,
    labels: Mapping[str, Sequence] | pd.DataFrame | None = None,
    token_labels: TokenLabels | None = None,
    edits: Mapping[SiteName, EditFunction | Edit] | None = None,
    generate: Generation | None = None,
    on_tokens: OnTokens | None = None,
    include_special: bool = False,
    truncate: Literal["left", "right"] | None = None,
    max_length: int | None = None,
    add_special_tokens: bool = True,
    add_generation_prompt: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    max_tokens: int = MAX_TOKENS,
    store: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    shard_tokens: int = SHARD_TOKENS,
    progress: bool = True,
) -> Activations:
    """Activations of texts at sites and positions.

    Args:
        model: from `load_model`, or a transformers module in eval mode (which then takes token ids or ready inputs).
        texts: strings, message lists, token ids, or a mapping of ready model inputs (images, audio). A `Sequence` that
            reads its texts when asked for them keeps memory small beside `store`.
        sites: names such as "z" (all layers), "resid_post.12", "z.5.3", ("z", 5); TransformerLens names too.
        positions: "last", "first", "mean", "all", an index, a (start, end) of characters, a `Span`, or a list with one
            entry per text. They count real tokens; "mean" leaves special tokens out unless `include_special`.
        labels: columns for the row table with one entry per text: labels, groups, ratings.
        token_labels: columns with a value for each token: see `token_labels`.
        edits: for sites, functions that return a delta to add, as in `taps`: the activations of an edited model.
        generate: let every text go on, `Generation(max_new_tokens=20)`, and keep activations of what the model writes
            too; positions may then be "prompt" or "generated", and count through both. The row table gets the columns
            `is_generated` and `completion`.
        on_tokens: told `(texts, ids)` at each step of `generate`, as soon as the tokens are known.
        truncate: which end of an over-long text goes; None makes an over-long text an error.
        max_length: tokens per text; by default the model's limit.
        add_special_tokens: whether the tokenizer adds BOS and the like to strings.
        add_generation_prompt: whether message lists end with the opening of the assistant's turn.
        device, dtype: where and as what the kept activations are stored; the model's own dtype by default.
        max_tokens: padded tokens per batch.
        store: a folder to write to, shard by shard, instead of memory (see `store`). The same call goes on with a store
            that was interrupted, and returns one that is finished at once.
        shard_bytes, shard_tokens: a shard ends before either; what an interruption costs, and memory, are one shard.
        progress: show a progress bar and, before a long capture, what it will take.

    Returns:
        `Activations` with a row per kept position: `[row, d_model]` for the stream, `[row, head, d_head]` for heads,
        `[row, head, key]` for pattern (keys by real position, zero beyond the text). With `store`, a `Store`, which is
        the same, read from disk when touched.

    Raises:
        KeyError, IndexError: a site that this model does not offer (with the reason), or out of range.
        ValueError: a module in training mode, a bad text or position (naming the row), NaN or infinity in what is
            kept, overflow of `dtype`, labels of another length; more bytes than memory or disk has free; a store of
            another model, other texts, labels, sites or settings.
        TypeError: texts, positions, sites or labels of no accepted kind.
        BlockingIOError: another process writes this store.
        OSError: the disk is full or cannot be written to; what was written stays.
    """
    job = _job(
        model,
        texts,
        sites,
        positions,
        include_special,
        labels=labels,
        token_labels=token_labels,
        edits=edits or {},
        generation=generate,
        on_tokens=on_tokens,
        device=torch.device(device),
        dtype=dtype,
        max_tokens=max_tokens,
        truncate=truncate,
        max_length=max_length,
        add_special_tokens=add_special_tokens,
        add_generation_prompt=add_generation_prompt,
    )
    if store is not None:
        plan = plan_capture(job, shard_bytes=shard_bytes, shard_tokens=shard_tokens, progress=progress)
        return write_store(_store_path(store), job, plan, progress=progress)
    return _in_memory(job, progress)


def estimate_capture(
    model: LoadedModel | nn.Module,
    texts: Iterable | Mapping[str, Any],
    sites: Iterable[SiteName] | SiteName,
    positions: Any = "last",
    *,
    include_special: bool = False,
    truncate: Literal["left", "right"] | None = None,
    max_length: int | None = None,
    add_special_tokens: bool = True,
    add_generation_prompt: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    max_tokens: int = MAX_TOKENS,
    generate: Generation | None = None,
) -> Estimate:
    """What `capture` of these arguments would take: rows and bytes exactly, seconds from a calibration batch.

    With `generate` rows, tokens and bytes are the most there can be. A generator of texts is used up by it.

    Raises what `capture` raises for its arguments.
    """
    job = _job(
        model,
        texts,
        sites,
        positions,
        include_special,
        generation=generate,
        device=torch.device(device),
        dtype=dtype,
        max_tokens=max_tokens,
        truncate=truncate,
        max_length=max_length,
        add_special_tokens=add_special_tokens,
        add_generation_prompt=add_generation_prompt,
    )
    return estimate_job(job, plan_capture(job, progress=False))


def _in_memory(job: CaptureJob, progress: bool) -> Activations:
    """All at once: one part, kept in memory."""
    plan = plan_capture(job, shard_bytes=None, shard_tokens=None, progress=False)
    estimate = estimate_job(job, plan, only_if_long=True)
    estimate.require_memory(job.forwards.device)
    if progress and estimate.is_long:
        print(f"capture: {estimate}.", file=sys.stderr)
    with tqdm(total=plan.tokens, unit=plan.unit, desc="capture", disable=not progress) as bar:
        table, tensors = job.run(0, job.n_texts, longest=plan.longest, advance=bar.update)
    job.require_rows(len(table))
    return Activations(table, tensors, job.provenance(plan.texts))


def _store_path(store: str | Path) -> Path:
    """The folder of a store; a leading ~ is the home folder. Raises ValueError for an empty name."""
    if not str(store).strip():
        raise ValueError("store is an empty name; give a folder, such as store='runs/activations'.")
    return Path(store).expanduser()


def _job(
    model: LoadedModel | nn.Module,
    texts: Iterable | Mapping[str, Any],
    sites: Iterable[SiteName] | SiteName,
    positions: Any,
    include_special: bool,
    *,
    labels: Mapping[str, Sequence] | pd.DataFrame | None = None,
    token_labels: TokenLabels | None = None,
    edits: Mapping[SiteName, EditFunction | Edit] | None = None,
    generation: Generation | None = None,
    on_tokens: OnTokens | None = None,
    device: torch.device,
    dtype: torch.dtype | None,
    max_tokens: int,
    **encoding: Any,
) -> CaptureJob:
    """All checks that need no forward of the texts, and the model's parts."""
    loaded = model if isinstance(model, LoadedModel) else LoadedModel.from_module(model, name=type(model).__name__)
    module = loaded.module
    _check_settings(module, sites, labels, dtype)
    source = text_source(texts, loaded, **encoding)
    is_ready = isinstance(source, ReadyInputs)
    if not is_ready and getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"{type(module).__name__} is an encoder-decoder, which texts alone do not run: hand capture() its "
            "model inputs as a mapping with input_ids, attention_mask and decoder_input_ids."
        )
    n_texts = source.n_rows if is_ready else len(source)
    labels = None if labels is None else label_table(labels, n_texts)
    token_labels = checked_token_labels(token_labels, n_texts=n_texts, taken=[] if labels is None else list(labels))
    if token_labels and is_ready:
        raise ValueError("token_labels are for texts; images and sounds have no tokens of words. Pass labels=.")
    positions = positions.tolist() if hasattr(positions, "tolist") else positions  # arrays, tensors, Series
    if isinstance(positions, Sequence) and not isinstance(positions, str | tuple):
        positions = list(positions)
        require_one_each(positions, n_texts)
    anatomy = dissect(module, inputs=_two_rows(source, module) if is_ready else None)
    wanted = anatomy.expand(sites)
    if not wanted:
        raise ValueError("sites is empty. Name at least one, such as 'resid_post' or 'z.5.3'.")
    if states := [str(site) for site in wanted if site.kind == "state"]:
        raise ValueError(
            f"{states[0]} has no positions: it is what a cache holds after a call. Read it with taps(model, "
            f"{states[0]!r}) around model(..., use_cache=True) or generate."
        )
    if on_tokens is not None and generation is None:
        raise ValueError("on_tokens is told what is written: give generate=Generation(max_new_tokens=20) with it.")
    if generation is not None and not isinstance(generation, Generation):
        raise TypeError(f"generate={generation!r:.60}: give Generation(max_new_tokens=20).")
    if generation is not None:
        _check_generation(module, source, wanted, token_labels, labels)
    forwards = Forwards(
        module, anatomy, tuple(wanted), edits or {}, device, dtype, pad_id(module, loaded.tokenizer), max_tokens
    )
    return CaptureJob(loaded, forwards, source, positions, include_special, labels, token_labels, generation, on_tokens)


def _check_generation(
    module: nn.Module, source: Any, sites: Sequence[Site], token_labels: TokenLabels | None, labels: pd.DataFrame | None
) -> None:
    """Raise ValueError for what cannot be had while a model writes."""
    if isinstance(source, ReadyInputs) or not (hasattr(module, "generate") and module.can_generate()):
        raise ValueError(
            f"generate= needs texts and a model that writes; {type(module).__name__} with {type(source).__name__} does "
            "not. Load the causal language model, and give strings or token ids."
        )
    if patterns := [str(site) for site in sites if site.kind == "pattern"]:
        raise ValueError(
            f"{patterns[0]}: rows of a pattern get longer with every step. Read them with taps(...) around generate."
        )
    if token_labels:
        raise ValueError("token_labels and generate= do not go together: what is written has no labels beforehand.")
    if taken := {"is_generated", "completion"} & set(labels if labels is not None else ()):
        raise ValueError(f"labels has a column {taken.pop()!r}, which generate= adds itself. Give it another name.")


def _check_settings(module: nn.Module, sites: Any, labels: Any, dtype: torch.dtype | None) -> None:
    """Raise for what would give random activations, or an error that says nothing."""
    if training := [path or type(module).__name__ for path, part in module.named_modules() if part.training]:
        raise ValueError(
            f"{training[0]} is in training mode, where dropout makes activations random. Call model.eval() first."
        )
    if not isinstance(sites, (str, Site, Iterable)):
        raise TypeError(f"sites={sites!r}: give a name such as 'z', or a list such as ['resid_post', 'z.5'].")
    if labels is not None and not isinstance(labels, (Mapping, pd.DataFrame)):
        raise TypeError(
            f"labels is a {type(labels).__name__}; give columns by name, with one entry per text: {{'label': [1, 0]}}."
        )
    if dtype is not None and dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"dtype={dtype} cannot hold activations. Store torch.float32, float64, bfloat16 or float16.")


def _two_rows(inputs: ReadyInputs, module: nn.Module) -> dict[str, Any] | None:
    """Two rows of ready inputs to find the parts on; None for models that read token ids."""
    if inputs.main == "input_ids":
        return None
    parameter = next(module.parameters())
    rows = [0, inputs.n_rows - 1] if inputs.is_splittable else None
    return inputs.model_inputs(rows, device=input_device(module), dtype=parameter.dtype)

"""Run texts through a model and keep chosen sites at chosen positions: `capture(model, texts, sites, positions)`.

Texts run in length-bucketed batches with explicit masks, under the padding recipe that the model's anatomy proved, so a
text gives the same activations alone and in any batch. Positions are picked inside the forward, so only what is kept
takes memory; the forward stops after the deepest site, and the language-model head runs only if logits are asked for.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from microtome.capture.activations import Activations
from microtome.capture.anatomy import Anatomy
from microtome.capture.batches import MAX_TOKENS, PaddingRecipe, make_batch, plan_batches
from microtome.capture.dissect import dissect
from microtome.capture.encoded_text import EncodedTexts
from microtome.capture.forward_arguments import input_device
from microtome.capture.kept_positions import BatchPositions
from microtome.capture.limits import pad_id
from microtome.capture.models import LoadedModel
from microtome.capture.padding import call_options
from microtome.capture.positions import resolve_positions
from microtome.capture.ready_inputs import ReadyInputs, describe_positions, position_mask
from microtome.capture.sites import Site
from microtome.capture.tap_plan import Edit, EditFunction, Read, SiteName
from microtome.capture.taps import taps
from microtome.capture.texts import encode_texts

READY_ROWS = 16  # images or sounds per batch


@torch.inference_mode(False)  # what is kept could otherwise never be part of a graph
def capture(
    model: LoadedModel | nn.Module,
    texts: Iterable | Mapping[str, Any],
    sites: Iterable[SiteName] | SiteName,
    positions: Any = "last",
    *,
    labels: Mapping[str, Sequence] | pd.DataFrame | None = None,
    edits: Mapping[SiteName, EditFunction | Edit] | None = None,
    include_special: bool = False,
    truncate: Literal["left", "right"] | None = None,
    max_length: int | None = None,
    add_special_tokens: bool = True,
    add_generation_prompt: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    max_tokens: int = MAX_TOKENS,
    progress: bool = True,
) -> Activations:
    """Activations of texts at sites and positions.

    Args:
        model: from `load_model`, or a transformers module in eval mode (which then takes token ids or ready inputs).
        texts: strings, message lists, token ids, or a mapping of ready model inputs (images, audio).
        sites: names such as "z" (all layers), "resid_post.12", "z.5.3", ("z", 5); TransformerLens names too.
        positions: "last", "first", "mean", "all", an index, a (start, end) of characters, a `Span`, or a list with one
            entry per text. They count real tokens; "mean" leaves special tokens out unless `include_special`.
        labels: columns for the row table with one entry per text: labels, groups, ratings.
        edits: for sites, functions that return a delta to add, as in `taps`: the activations of an edited model.
        truncate: which end of an over-long text goes; None makes an over-long text an error.
        max_length: tokens per text; by default the model's limit.
        add_special_tokens: whether the tokenizer adds BOS and the like to strings.
        add_generation_prompt: whether message lists end with the opening of the assistant's turn.
        device, dtype: where and as what the kept activations are stored; the model's own dtype by default.
        max_tokens: padded tokens per batch.
        progress: show a progress bar.

    Returns:
        `Activations` with a row per kept position: `[row, d_model]` for the stream, `[row, head, d_head]` for heads,
        `[row, head, key]` for pattern (keys by real position, zero beyond the text).

    Raises:
        KeyError, IndexError: a site that this model does not offer (with the reason), or out of range.
        ValueError: a module in training mode, a bad text or position (naming the row), NaN or infinity in what is
            kept, overflow of `dtype`, labels of another length.
        TypeError: texts, positions, sites or labels of no accepted kind.
    """
    loaded = model if isinstance(model, LoadedModel) else LoadedModel.from_module(model, name=type(model).__name__)
    module = loaded.module
    _check_settings(module, sites, labels, dtype)
    encoded = encode_texts(
        texts,
        loaded.tokenizer,
        module=module,
        truncate=truncate,
        max_length=max_length,
        add_special_tokens=add_special_tokens,
        add_generation_prompt=add_generation_prompt,
    )
    is_ready = isinstance(encoded, ReadyInputs)
    if not is_ready and getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"{type(module).__name__} is an encoder-decoder, which texts alone do not run: hand capture() its "
            "model inputs as a mapping with input_ids, attention_mask and decoder_input_ids."
        )
    anatomy = dissect(module, inputs=_two_rows(encoded, module) if is_ready else None)
    wanted = anatomy.expand(sites)
    if not wanted:
        raise ValueError("sites is empty. Name at least one, such as 'resid_post' or 'z.5.3'.")
    if states := [str(site) for site in wanted if site.kind == "state"]:
        raise ValueError(
            f"{states[0]} has no positions: it is what a cache holds after a call. Read it with taps(model, "
            f"{states[0]!r}) around model(..., use_cache=True) or generate."
        )
    run = _Run(module, anatomy, wanted, edits or {}, torch.device(device), dtype)
    if is_ready:
        table = run.ready(encoded, positions, include_special, progress)
        n_texts = encoded.n_rows
    else:
        table = run.texts(encoded, positions, include_special, max_tokens, pad_id(module, loaded.tokenizer), progress)
        n_texts = len(encoded.rows)
    provenance = {
        "model": loaded.provenance.to_dict(),
        "texts": encoded.provenance,
        "positions": positions if isinstance(positions, (str, int)) else type(positions).__name__,
        "include_special": include_special,
        "edits": sorted(str(Site.parse(name)) for name in edits or {}),
        "padding": None if anatomy.padding is None else vars(anatomy.padding),
        "max_tokens": max_tokens,
        "torch_threads": torch.get_num_threads(),
    }
    return Activations(_with_labels(table, labels, n_texts), run.tensors(), provenance)


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


class _Run:
    """One capture: runs batches and files what their taps keep."""

    def __init__(
        self,
        module: nn.Module,
        anatomy: Anatomy,
        sites: list[Site],
        edits: Mapping[SiteName, EditFunction | Edit],
        device: torch.device,
        dtype: torch.dtype | None,
    ):
        self.module, self.anatomy, self.sites, self.edits = module, anatomy, sites, edits
        self.device, self.dtype = device, dtype
        self.options = call_options(module)
        self.home = input_device(module)
        self.stops = all(site.kind != "logits" for site in sites)
        self.kept: dict[Site, list[tuple[Tensor, Tensor]]] = {site: [] for site in sites}
        self.filed: dict[Site, Tensor] = {}
        self.rows: int | None = None

    def texts(
        self, encoded: EncodedTexts, positions: Any, include_special: bool, max_tokens: int, pad: int, progress: bool
    ) -> pd.DataFrame:
        kept = resolve_positions(positions, encoded.rows, include_special=include_special)
        self.rows = kept.n_kept
        recipe = self.anatomy.padding or PaddingRecipe()
        max_rows = {} if self.anatomy.padding is not None else {"max_rows": 1}  # no proved recipe: nothing is padded
        plan = plan_batches(encoded.lengths, max_tokens=max_tokens, **max_rows)
        self.longest = max(encoded.lengths)
        with tqdm(total=sum(encoded.lengths), unit="tok", desc="capture", disable=not progress) as bar:
            for row_ids in plan:
                batch = make_batch(encoded.rows, row_ids, pad_id=pad, recipe=recipe, device=self.home)
                places = kept.in_batch(row_ids, batch.attention_mask)
                if len(places.kept_index):
                    self.batch(batch.model_inputs(), places, batch.attention_mask)
                bar.update(sum(encoded.lengths[row] for row in row_ids))
        table = kept.table(encoded.rows)
        if encoded.kind == "token_ids":  # what tells equal texts, as `string` does for strings
            ids = pd.Series([" ".join(map(str, row.token_ids.tolist())) for row in encoded.rows], dtype="str")
            return table.assign(token_ids=ids.iloc[table["text"]].to_numpy())
        strings = pd.Series([row.text for row in encoded.rows], dtype="str")
        return table.assign(string=strings.iloc[table["text"]].to_numpy())

    def ready(self, inputs: ReadyInputs, positions: Any, include_special: bool, progress: bool) -> pd.DataFrame:
        """Images and audio: which positions are real is known once the model ran, so positions are resolved then."""
        step = READY_ROWS if inputs.is_splittable else inputs.n_rows
        tables: list[pd.DataFrame] = []
        self.longest = 0
        for first in tqdm(range(0, inputs.n_rows, step), unit="batch", desc="capture", disable=not progress):
            row_ids = range(first, min(first + step, inputs.n_rows))
            arguments = inputs.model_inputs(row_ids, device=self.home, dtype=next(self.module.parameters()).dtype)
            wanted = positions[first : row_ids.stop] if isinstance(positions, list) else positions
            n_positions = self._positions_of(arguments)
            mask = position_mask(arguments, n_rows=len(row_ids), n_positions=n_positions, module=self.module)
            described = describe_positions(mask)
            kept = resolve_positions(wanted, described, include_special=include_special)
            places = kept.in_batch(range(len(row_ids)), mask.to(self.home))
            offset = sum(map(len, tables))
            self.longest = max(self.longest, n_positions)
            self.batch(arguments, replace(places, kept_index=places.kept_index + offset), mask.to(self.home))
            tables.append(kept.table(described).assign(text=lambda t, first=first: t["text"] + first))
        return pd.concat(tables, ignore_index=True)

    def _positions_of(self, arguments: dict[str, Any]) -> int:
        """Length of the sequence that the model makes of these inputs: read at the first block, then stopped."""
        site = Site("resid_pre", 0)
        with torch.no_grad(), taps(self.module, [site], anatomy=self.anatomy, stop=True) as tape:
            self.module(**arguments, **self.options)
        return tape[site].shape[1]

    def batch(self, arguments: dict[str, Any], places: BatchPositions, mask: Tensor) -> None:
        """One forward; what its taps keep is checked and filed under its rows."""
        reads = [self._read(site, places, mask) for site in self.sites]
        with torch.no_grad(), taps(self.module, reads, self.edits, anatomy=self.anatomy, stop=self.stops) as tape:
            self.module(**arguments, **self.options)
        for site in self.sites:
            self._file(site, tape[site], places.kept_index)

    def _read(self, site: Site, places: BatchPositions, mask: Tensor) -> Read:
        if site.kind != "pattern":
            return Read(site, select=places.select)
        queries, in_rows = _query_rows(places)

        def select(rows: Tensor) -> Tensor:
            by_query = rows.transpose(1, 2) if rows.ndim == 4 else rows
            return in_rows.select(_by_real_key(by_query, mask))

        return Read(site, select=select, queries=queries)

    def _file(self, site: Site, value: Tensor, index: Tensor) -> None:
        stored = value.to(self.device, self.dtype or value.dtype)
        if not bool(torch.isfinite(stored).all()):
            row = int(index[int((~torch.isfinite(stored)).flatten(1).any(1).nonzero()[0])])
            if bool(torch.isfinite(value).all()):
                raise ValueError(
                    f"{site}: kept row {row} overflows {stored.dtype} (largest value {float(value.abs().max()):.3g}, "
                    f"limit {torch.finfo(stored.dtype).max:.3g}). Store float32 or bfloat16."
                )
            raise ValueError(
                f"{site}: kept row {row} (counted over kept positions) holds NaN or infinity. The model computes them "
                f"in {value.dtype}; load it in float32, or look at that text."
            )
        if site.kind == "pattern":
            stored = nn.functional.pad(stored, (0, self.longest - stored.shape[-1]))
        if self.rows is None:
            self.kept[site].append((index.to(self.device), stored))
            return
        if site not in self.filed:
            self.filed[site] = torch.empty(self.rows, *stored.shape[1:], dtype=stored.dtype, device=self.device)
        self.filed[site][index.to(self.device)] = stored

    def tensors(self) -> dict[Site, Tensor]:
        """Every site's tensor, rows in the order of the table."""
        if self.rows is not None:
            return self.filed
        longest = self.longest
        done = {}
        for site, parts in self.kept.items():
            values = [
                nn.functional.pad(v, (0, longest - v.shape[-1])) if site.kind == "pattern" else v for _, v in parts
            ]
            done[site] = torch.cat(values)
        return done


def _query_rows(places: BatchPositions) -> tuple[Tensor, BatchPositions]:
    """The entries of each text as query rows `[batch, row]`, and the same positions counted in those rows."""
    counts = torch.bincount(places.row_index, minlength=places.shape[0])
    first = counts.cumsum(0) - counts
    slot = torch.arange(len(places.row_index), device=counts.device) - first[places.row_index]
    width = int(counts.max())
    spare = torch.arange(width, device=counts.device)  # texts with fewer entries get other rows, which nobody takes
    queries = spare.repeat(places.shape[0], 1)
    for text, n in enumerate(counts.tolist()):
        own = places.position_index[places.row_index == text]
        others = [p for p in range(places.shape[1]) if p not in set(own.tolist())][: width - n]
        queries[text] = torch.cat([own, torch.tensor(others, dtype=own.dtype, device=own.device)])
    return queries, replace(places, position_index=slot, shape=(places.shape[0], width))


def _by_real_key(rows: Tensor, mask: Tensor) -> Tensor:
    """Pattern rows `[batch, row, ..., key]` with keys counted by real position: padding on the left is rolled away."""
    starts = mask.long().argmax(1)
    if not bool(starts.any()):
        return rows
    keys = (torch.arange(rows.shape[-1], device=rows.device) + starts[:, None]) % rows.shape[-1]
    return rows.gather(-1, keys.view(len(rows), *[1] * (rows.ndim - 2), -1).expand(rows.shape))


def _two_rows(inputs: ReadyInputs, module: nn.Module) -> dict[str, Any] | None:
    """Two rows of ready inputs to find the parts on; None for models that read token ids."""
    if inputs.main == "input_ids":
        return None
    parameter = next(module.parameters())
    rows = [0, inputs.n_rows - 1] if inputs.is_splittable else None
    return inputs.model_inputs(rows, device=input_device(module), dtype=parameter.dtype)


def _with_labels(
    table: pd.DataFrame, labels: Mapping[str, Sequence] | pd.DataFrame | None, n_texts: int
) -> pd.DataFrame:
    if labels is None:
        return table
    for name in labels:
        if name in table.columns:
            raise ValueError(f"labels has a column {name!r}, which the row table has itself. Give it another name.")
        if len(labels[name]) != n_texts:
            raise ValueError(
                f"labels[{name!r}] has {len(labels[name])} entries for {n_texts} texts; one per text is expected."
            )
    chosen = table["text"].to_numpy()
    return table.assign(**{name: pd.Series(labels[name]).reset_index(drop=True).to_numpy()[chosen] for name in labels})

"""Batches through a model with taps on: what every site keeps, checked, cast, and filed under its rows.

Positions are picked inside the forward, so only what is kept takes memory; the forward stops after the deepest site,
and the language-model head runs only if logits are asked for.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from microtome.capture.anatomy import Anatomy
from microtome.capture.batches import MAX_TOKENS, PaddingRecipe, make_batch, plan_batches
from microtome.capture.encoded_text import EncodedText
from microtome.capture.forward_arguments import input_device
from microtome.capture.forward_call import batch_rows
from microtome.capture.kept_positions import BatchPositions, KeptPositions
from microtome.capture.padding import call_options
from microtome.capture.positions import resolve_positions
from microtome.capture.ready_inputs import ReadyInputs, describe_positions, position_mask
from microtome.capture.sites import Site
from microtome.capture.tap_plan import Edit, EditFunction, Read, SiteName
from microtome.capture.taps import taps

READY_ROWS = 16  # images or sounds per batch


@dataclass(frozen=True, eq=False)
class Forwards:
    """A model, the sites to keep, and what as.

    Attributes:
        edits: what is added to sites while they are read.
        device, dtype: where and as what values are kept; None leaves the model's own dtype.
        pad: id that fills padding.
        max_tokens: padded tokens per batch.
    """

    module: nn.Module
    anatomy: Anatomy
    sites: tuple[Site, ...]
    edits: Mapping[SiteName, EditFunction | Edit]
    device: torch.device
    dtype: torch.dtype | None
    pad: int
    max_tokens: int = MAX_TOKENS
    options: dict[str, Any] = field(init=False)
    home: torch.device = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "options", call_options(self.module))
        object.__setattr__(self, "home", input_device(self.module))

    @property
    def stops(self) -> bool:
        """Whether the forward may end after the deepest site."""
        return all(site.kind != "logits" for site in self.sites)

    def batch_plan(self, lengths: Sequence[int]) -> list[list[int]]:
        """Which texts run together; one by one where no way of padding was proved."""
        max_rows = {} if self.anatomy.padding is not None else {"max_rows": 1}
        return plan_batches(lengths, max_tokens=self.max_tokens, **max_rows)

    def texts(
        self,
        rows: Sequence[EncodedText],
        kept: KeptPositions,
        *,
        longest: int,
        name_row: Callable[[int], str],
        first_text: int = 0,
        advance: Callable[[int], object] = lambda tokens: None,
    ) -> dict[Site, Tensor]:
        """Every site's kept rows, in the order of `kept`.

        Args:
            longest: tokens of the longest text of the capture, for the keys of pattern rows.
            name_row: what a kept row is called in errors.
            first_text: number of the first text among all that were given, for edits that act by text.
            advance: told the number of tokens after each batch.
        """
        recipe = self.anatomy.padding or PaddingRecipe()
        filed: dict[Site, Tensor] = {}
        lengths = [row.length for row in rows]
        for row_ids in self.batch_plan(lengths):
            batch = make_batch(rows, row_ids, pad_id=self.pad, recipe=recipe, device=self.home)
            places = kept.in_batch(row_ids, batch.attention_mask)
            if len(places.kept_index):
                with batch_rows([first_text + row for row in row_ids]):
                    values = self.batch(batch.model_inputs(), places, batch.attention_mask, name_row)
                index = places.kept_index.to(self.device)
                for site, value in values.items():
                    value = _to_keys(site, value, longest)
                    if site not in filed:
                        filed[site] = torch.empty(kept.n_kept, *value.shape[1:], dtype=value.dtype, device=self.device)
                    filed[site][index] = value
            advance(sum(lengths[row] for row in row_ids))
        return filed

    def ready(
        self,
        inputs: ReadyInputs,
        row_ids: Iterable[int],
        positions: Any,
        include_special: bool,
        *,
        first_kept: int = 0,
    ) -> tuple[KeptPositions, list[EncodedText], dict[Site, Tensor]]:
        """One batch of images or sounds: which positions are real is known once the model ran.

        Returns what was kept, the described positions, and the values; texts are numbered from 0.
        """
        row_ids = list(row_ids)
        arguments = inputs.model_inputs(row_ids, device=self.home, dtype=next(self.module.parameters()).dtype)
        n_positions = self._positions_of(arguments)
        mask = position_mask(arguments, n_rows=len(row_ids), n_positions=n_positions, module=self.module)
        described = describe_positions(mask)
        kept = resolve_positions(positions, described, include_special=include_special, first_row=row_ids[0])
        places = kept.in_batch(range(len(row_ids)), mask.to(self.home))

        def name_row(row: int) -> str:
            return f"input {row_ids[0] + int(kept.text[row])}, position {int(kept.position[row])}"

        return kept, described, self.batch(arguments, places, mask.to(self.home), name_row)

    def _positions_of(self, arguments: dict[str, Any]) -> int:
        """Length of the sequence that the model makes of these inputs: read at the first block, then stopped."""
        site = Site("resid_pre", 0)
        with torch.no_grad(), taps(self.module, [site], anatomy=self.anatomy, stop=True) as tape:
            self.module(**arguments, **self.options)
        return tape[site].shape[1]

    def batch(
        self, arguments: dict[str, Any], places: BatchPositions, mask: Tensor, name_row: Callable[[int], str]
    ) -> dict[Site, Tensor]:
        """One forward: the kept rows of the batch in the order of `places`, checked and cast."""
        reads = [self._read(site, places, mask) for site in self.sites]
        with torch.no_grad(), taps(self.module, reads, self.edits, anatomy=self.anatomy, stop=self.stops) as tape:
            self.module(**arguments, **self.options)
        return {site: self.stored(site, tape[site], places.kept_index, name_row) for site in self.sites}

    def _read(self, site: Site, places: BatchPositions, mask: Tensor) -> Read:
        if site.kind != "pattern":
            return Read(site, select=places.select)
        queries, in_rows = _query_rows(places)

        def select(rows: Tensor) -> Tensor:
            by_query = rows.transpose(1, 2) if rows.ndim == 4 else rows
            return in_rows.select(_by_real_key(by_query, mask))

        return Read(site, select=select, queries=queries)

    def stored(self, site: Site, value: Tensor, index: Tensor, name_row: Callable[[int], str]) -> Tensor:
        """The value as it is kept: on its device, in its dtype, finite.

        Raises ValueError naming the first kept row that is not.
        """
        stored = value.to(self.device, self.dtype or value.dtype)
        if bool(torch.isfinite(stored).all()):
            return stored
        row = name_row(int(index[int((~torch.isfinite(stored)).flatten(1).any(1).nonzero()[0])]))
        if bool(torch.isfinite(value).all()):
            raise ValueError(
                f"{site}: {row} overflows {stored.dtype} (largest value {float(value.abs().max()):.3g}, limit "
                f"{torch.finfo(stored.dtype).max:.3g}). Store float32 or bfloat16."
            )
        raise ValueError(
            f"{site}: {row} holds NaN or infinity. The model computes them in {value.dtype}; load it in float32, or "
            "look at that text."
        )


def _to_keys(site: Site, value: Tensor, longest: int) -> Tensor:
    """Pattern rows with a key for each token of the longest text, zero beyond their own; other values as they are."""
    return nn.functional.pad(value, (0, longest - value.shape[-1])) if site.kind == "pattern" else value


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

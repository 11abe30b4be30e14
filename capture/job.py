"""One capture as it was asked for: what to run and what to keep. Any part of its texts becomes rows and tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from microtome.capture.encoded_text import EncodedTexts
from microtome.capture.forwards import READY_ROWS, Forwards
from microtome.capture.kept_positions import KeptPositions
from microtome.capture.models import LoadedModel
from microtome.capture.positions import KEEPS_NOTHING, resolve_positions
from microtome.capture.ready_inputs import ReadyInputs
from microtome.capture.sites import Site
from microtome.capture.text_source import TextSource
from microtome.capture.token_labels import TokenLabels, token_label_columns


@dataclass(frozen=True, eq=False)
class CaptureJob:
    """What to run: texts `first` to `stop` give a row table and a tensor per site.

    Attributes:
        loaded: the model.
        forwards: how its batches run and what they keep.
        source: texts, or inputs that are ready.
        positions, include_special: which of their positions are kept.
        labels: one row per text, or None.
        token_labels: as `token_labels` describes them, or None.
    """

    loaded: LoadedModel
    forwards: Forwards
    source: TextSource | ReadyInputs
    positions: Any
    include_special: bool
    labels: pd.DataFrame | None
    token_labels: TokenLabels | None

    @property
    def n_texts(self) -> int:
        """How many texts, images or sounds."""
        return self.source.n_rows if isinstance(self.source, ReadyInputs) else len(self.source)

    def kept_of(self, encoded: EncodedTexts, first: int) -> KeptPositions:
        """What is kept of some texts, the first of which has the number `first`."""
        wanted = self.positions
        if isinstance(wanted, list) or hasattr(wanted, "tolist"):
            wanted = wanted if isinstance(wanted, list) else wanted.tolist()
            wanted = wanted[first : first + len(encoded.rows)] if isinstance(wanted, list) else wanted
        return resolve_positions(
            wanted, encoded.rows, include_special=self.include_special, first_row=first, is_part=True
        )

    def row_table(self, encoded: EncodedTexts, kept: KeptPositions, first: int) -> pd.DataFrame:
        """The rows kept of some texts: number of the text, position, token, the text itself, labels."""
        table = kept.table(encoded.rows)
        whole = table["text"].to_numpy()
        if encoded.kind == "token_ids":  # what tells equal texts, as `string` does for strings
            name, strings = "token_ids", [" ".join(map(str, row.token_ids.tolist())) for row in encoded.rows]
        else:
            name, strings = "string", [row.text for row in encoded.rows]
        codes, known = pd.factorize(np.array(strings, dtype=object))
        table[name] = pd.Categorical.from_codes(codes[whole], categories=pd.Index(known, dtype="str"))
        table["text"] = whole + first
        table = self._with_labels(table)
        return table.assign(**token_label_columns(self.token_labels, encoded.rows, kept, first_row=first))

    def run(
        self, first: int, stop: int, *, longest: int | None, advance: Callable[[int], object]
    ) -> tuple[pd.DataFrame, dict[Site, Tensor]]:
        """Rows and tensors of texts `first` up to, not including, `stop`.

        Args:
            longest: tokens of the longest text of the whole capture; None takes the longest of these texts.
            advance: told the tokens (or inputs) of each batch.
        """
        if isinstance(self.source, ReadyInputs):
            return self._run_ready(first, stop, advance)
        encoded = self.source.encode(first, stop)
        kept = self.kept_of(encoded, first)

        def name_row(row: int) -> str:
            return f"text {first + int(kept.text[row])}, position {int(kept.position[row])}"

        longest = max(encoded.lengths) if longest is None else longest
        tensors = self.forwards.texts(encoded.rows, kept, longest=longest, name_row=name_row, advance=advance)
        return self.row_table(encoded, kept, first), tensors

    def _run_ready(
        self, first: int, stop: int, advance: Callable[[int], object]
    ) -> tuple[pd.DataFrame, dict[Site, Tensor]]:
        tables: list[pd.DataFrame] = []
        values: dict[Site, list[Tensor]] = {site: [] for site in self.forwards.sites}
        step = READY_ROWS if self.source.is_splittable else self.source.n_rows
        for start in range(first, stop, step):
            row_ids = range(start, min(start + step, stop))
            wanted = self.positions[start : row_ids.stop] if isinstance(self.positions, list) else self.positions
            kept, described, tensors = self.forwards.ready(self.source, row_ids, wanted, self.include_special)
            tables.append(kept.table(described).assign(text=lambda t, start=start: t["text"] + start))
            for site, value in tensors.items():
                values[site].append(value)
            advance(len(row_ids))
        table = self._with_labels(pd.concat(tables, ignore_index=True))
        return table, {site: _joined(site, parts) for site, parts in values.items()}

    def _with_labels(self, table: pd.DataFrame) -> pd.DataFrame:
        if self.labels is None:
            return table
        chosen = table["text"].to_numpy()
        return table.assign(**{name: self.labels[name].to_numpy()[chosen] for name in self.labels})

    def provenance(self, texts: dict[str, Any]) -> dict[str, Any]:
        """Where the rows come from, of JSON types only; `texts` says how they were encoded."""
        padding = self.forwards.anatomy.padding
        return {
            "model": self.loaded.provenance.to_dict(),
            "texts": texts,
            "positions": self.positions if isinstance(self.positions, str | int) else type(self.positions).__name__,
            "include_special": self.include_special,
            "token_labels": {name: _described(given) for name, given in (self.token_labels or {}).items()},
            "edits": sorted(str(Site.parse(name)) for name in self.forwards.edits),
            "padding": None if padding is None else vars(padding),
            "max_tokens": self.forwards.max_tokens,
            "torch_threads": torch.get_num_threads(),
        }

    def require_rows(self, n_kept: int) -> None:
        """Raise ValueError where nothing at all is kept."""
        if n_kept == 0:
            raise ValueError(KEEPS_NOTHING)


def _described(given: Any) -> str:
    return getattr(given, "__qualname__", repr(given)) if callable(given) else "one list per text"


def _joined(site: Site, parts: list[Tensor]) -> Tensor:
    """Batches one after the other; pattern rows get as many keys as the longest."""
    if site.kind == "pattern":
        longest = max(part.shape[-1] for part in parts)
        parts = [nn.functional.pad(part, (0, longest - part.shape[-1])) for part in parts]
    return torch.cat(parts)

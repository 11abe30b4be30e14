"""One capture as it was asked for: what to run and what to keep. Any part of its texts becomes rows and tensors."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from microtome.capture.encoded_text import EncodedText, EncodedTexts
from microtome.capture.forwards import READY_ROWS, Forwards
from microtome.capture.generated import Generation, OnTokens, continued, generate_rows, resolve_generated
from microtome.capture.kept_positions import KeptPositions
from microtome.capture.models import LoadedModel
from microtome.capture.positions import KEEPS_NOTHING, resolve_positions
from microtome.capture.ready_inputs import ReadyInputs
from microtome.capture.sites import Site
from microtome.capture.text_source import TextSource
from microtome.capture.texts import check_of, text_checks
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
        token_labels: as `token_labels` describes them; empty without any.
        generation: how texts go on, or None where they do not.
        on_tokens: told of every step of it.
    """

    loaded: LoadedModel
    forwards: Forwards
    source: TextSource | ReadyInputs
    positions: Any
    include_special: bool
    labels: pd.DataFrame | None
    token_labels: TokenLabels
    generation: Generation | None = None
    on_tokens: OnTokens | None = None

    @property
    def n_texts(self) -> int:
        """How many texts, images or sounds."""
        return self.source.n_rows if isinstance(self.source, ReadyInputs) else len(self.source)

    def kept_of(self, encoded: EncodedTexts, first: int) -> KeptPositions:
        """What is kept of some texts, the first having the number `first`, and of the most they can go on with."""
        wanted = self._wanted(first, first + len(encoded.rows))
        if self.generation is not None:
            n = self.generation.max_new_tokens
            rows = [continued(row, [0] * n, [""] * n) for row in encoded.rows]
            return self._kept_of_generated(wanted, rows, [row.length for row in encoded.rows], first)
        return resolve_positions(
            wanted, encoded.rows, include_special=self.include_special, first_row=first, is_part=True
        )

    def _wanted(self, first: int, stop: int) -> Any:
        """Positions of some of the texts."""
        return self.positions[first:stop] if isinstance(self.positions, list) else self.positions

    def _kept_of_generated(
        self, wanted: Any, rows: Sequence[EncodedText], n_prompt: Sequence[int], first: int
    ) -> KeptPositions:
        return resolve_generated(wanted, rows, n_prompt, include_special=self.include_special, first_row=first)

    def row_table(
        self, encoded: EncodedTexts, kept: KeptPositions, first: int, rows: Sequence[EncodedText] | None = None
    ) -> pd.DataFrame:
        """The rows kept of some texts, or of what they became (`rows`): text, position, token, string, labels."""
        table = kept.table(encoded.rows if rows is None else rows)
        whole = table["text"].to_numpy()
        if encoded.kind == "token_ids":  # what tells equal texts, as `string` does for strings
            name, strings = "token_ids", [" ".join(map(str, row.token_ids.tolist())) for row in encoded.rows]
        else:
            name, strings = "string", [row.text for row in encoded.rows]
        codes, known = pd.factorize(np.array(strings, dtype=object))
        table[name] = pd.Categorical.from_codes(codes[whole], categories=pd.Index(known, dtype="str"))
        table["text"] = whole + first
        self._add_labels(table)
        for name, column in token_label_columns(self.token_labels, encoded.rows, kept, first_row=first).items():
            table[name] = column
        return table

    def has_same_texts(self, shard: Any) -> bool:
        """Whether the texts of a planned shard still are those that were planned; inputs in memory always are."""
        if shard.check is None:
            return True
        return check_of(text_checks(self.source.encode(shard.first, shard.stop).rows)) == shard.check

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
        if self.generation is not None:
            return self._run_generated(encoded, first, advance)
        kept = self.kept_of(encoded, first)

        def name_row(row: int) -> str:
            return f"text {first + int(kept.text[row])}, position {int(kept.position[row])}"

        longest = max(encoded.lengths) if longest is None else longest
        tensors = self.forwards.texts(
            encoded.rows, kept, longest=longest, name_row=name_row, first_text=first, advance=advance
        )
        return self.row_table(encoded, kept, first), tensors

    def _run_generated(
        self, encoded: EncodedTexts, first: int, advance: Callable[[int], object]
    ) -> tuple[pd.DataFrame, dict[Site, Tensor]]:
        """Texts and what the model writes after them; the table says which tokens it wrote, and all it wrote."""
        wanted, n_prompt = self._wanted(first, first + len(encoded.rows)), [row.length for row in encoded.rows]

        def keep(rows: Sequence[EncodedText], row_ids: Sequence[int]) -> KeptPositions:
            of_rows = [wanted[row] for row in row_ids] if isinstance(wanted, list) else wanted
            return self._kept_of_generated(of_rows, rows, [n_prompt[row] for row in row_ids], first)

        whole, kept, tensors = generate_rows(
            self.forwards,
            self.generation,
            encoded.rows,
            keep,
            self._decode,
            only_generated=wanted == "generated",
            first_row=first,
            advance=advance,
            on_tokens=self.on_tokens,
        )
        table = self.row_table(encoded, kept, first, whole)
        of_row = table["text"].to_numpy() - first
        said = [self._decode(row.token_ids[n:].tolist()) for row, n in zip(whole, n_prompt, strict=True)]
        codes, known = pd.factorize(np.array(said, dtype=object))
        is_generated = table["position"].to_numpy() >= np.array(n_prompt)[of_row]
        completion = pd.Categorical.from_codes(codes[of_row], categories=pd.Index(known, dtype="str"))
        return table.assign(is_generated=is_generated, completion=completion), tensors

    def _decode(self, ids: list[int]) -> str:
        tokenizer = self.loaded.tokenizer
        return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)

    def _run_ready(
        self, first: int, stop: int, advance: Callable[[int], object]
    ) -> tuple[pd.DataFrame, dict[Site, Tensor]]:
        tables: list[pd.DataFrame] = []
        values: dict[Site, list[Tensor]] = {site: [] for site in self.forwards.sites}
        step = READY_ROWS if self.source.is_splittable else self.source.n_rows
        for start in range(first, stop, step):
            row_ids = range(start, min(start + step, stop))
            wanted = self._wanted(start, row_ids.stop)
            kept, described, tensors = self.forwards.ready(self.source, row_ids, wanted, self.include_special)
            tables.append(kept.table(described).assign(text=lambda t, start=start: t["text"] + start))
            for site, value in tensors.items():
                values[site].append(value)
            advance(len(row_ids))
        table = pd.concat(tables, ignore_index=True)
        self._add_labels(table)
        return table, {site: _joined(site, parts) for site, parts in values.items()}

    def _add_labels(self, table: pd.DataFrame) -> None:
        """Each row gets the labels of its text, in the types they came in."""
        chosen = table["text"].to_numpy()
        for name in self.labels if self.labels is not None else ():
            table[name] = self.labels[name].take(chosen).reset_index(drop=True)

    def provenance(self, texts: dict[str, Any]) -> dict[str, Any]:
        """Where the rows come from, of JSON types only; `texts` says how they were encoded."""
        padding = self.forwards.anatomy.padding
        return {
            "model": self.loaded.provenance.to_dict(),
            "texts": texts,
            "positions": self.positions if isinstance(self.positions, str | int) else type(self.positions).__name__,
            "include_special": self.include_special,
            "token_labels": {name: _described(given) for name, given in self.token_labels.items()},
            "generation": None if self.generation is None else asdict(self.generation),
            "edits": sorted(str(Site.parse(name)) for name in self.forwards.edits),
            "padding": None if padding is None else vars(padding),
            "max_tokens": self.forwards.max_tokens,
            "torch_threads": torch.get_num_threads(),
        }

    def require_rows(self, n_kept: int) -> None:
        """Raise ValueError where nothing at all is kept."""
        if n_kept == 0 and self.generation is not None:
            raise ValueError(
                "The model ended every text before it wrote a token at these positions, so nothing is kept. Keep the "
                "prompt as well."
            )
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

"""Activations: a table of rows (one per kept position) and one tensor per site, with where they came from.

    acts["resid_post", 3]            # [row, d_model]
    acts["z.5"], acts["z.5.3"]       # [row, head, d_head], [row, d_head]
    acts.sel(kind="z", layer=[4, 5]).select_rows("label == 1").save("runs/z")

They come from `capture(...)`, from `Activations.load(path)`, or from features of anywhere else through
`Activations.from_arrays({"backbone.3": array}, labels=...)`. Beware: selections share memory with what they came from
where they can; change a copy.
"""

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from pandas.api.types import union_categoricals
from torch import Tensor

from microtome.capture.activation_checks import as_tensors, check_axes, check_finite, check_rows
from microtome.capture.activation_files import load_activations, save_activations
from microtome.capture.activation_frames import wide_frame
from microtome.capture.activation_sites import choose_tensors, find_tensor, select_tensors, summarise
from microtome.capture.row_numbers import row_numbers
from microtome.capture.sites import Site
from microtome.capture.stored_tensor import StoredTensor, in_memory, joined

SiteName = str | tuple | Site


@dataclass(frozen=True, eq=False, repr=False)
class Activations:
    """Rows x sites.

    Attributes:
        rows: one row per kept position, index 0, 1, ...; columns `text` (number of the text), `position` (real-token
            index, -1 for a mean), `token`, and any label or group columns.
        tensors: by site, rows first: `[row, d_model]` for the stream and what is added to it, `[row, head, d_head]`
            for q, k, v, z (`[row, head, d_model]` for head_out). In the units of the model.
        provenance: JSON-able: model, texts, positions, settings.
    """

    rows: pd.DataFrame
    tensors: dict[Site, Tensor | StoredTensor]
    provenance: dict[str, Any]

    def __post_init__(self):
        check_rows(self.rows, self.tensors)
        for site, tensor in self.tensors.items():
            check_axes(site, tensor)

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping,
        *,
        rows: pd.DataFrame | None = None,
        labels: Sequence | np.ndarray | pd.Series | None = None,
        groups: Sequence | np.ndarray | pd.Series | None = None,
        provenance: Mapping[str, Any] | None = None,
        allow_nonfinite: bool = False,
    ) -> "Activations":
        """Features of any origin: images, sounds, recordings, another framework.

        Args:
            arrays: by name, rows first: `[row, d]`, or `[row, head, d]` to treat slices apart. Names may be ours or
                any other; trailing numbers are layer and head: "backbone.3" is layer 3 of "backbone".
            rows: one row per array row, in the same order; its index is dropped. Columns that it lacks are filled:
                text 0, 1, ... (each row a text of its own), position -1, token "".
            labels, groups: become the columns `label` and `group`.
            allow_nonfinite: keep NaN and infinities.

        Raises:
            ValueError: shapes or numbers of rows that do not agree, NaN or infinity (naming site and row), names that
                mean one site twice, a label column given twice.
            TypeError: values that are not floating point, a text column that does not hold numbers.
        """
        tensors = as_tensors(arrays)
        n_rows = len(next(iter(tensors.values())))
        table = pd.DataFrame(index=pd.RangeIndex(n_rows)) if rows is None else rows.reset_index(drop=True)
        for name, column in (("label", labels), ("group", groups)):
            if column is None:
                continue
            if name in table:
                raise ValueError(f"rows has a column {name!r} already; drop it, or do not pass {name}s.")
            if len(column) != len(table):
                raise ValueError(f"{name}s has {len(column)} entries, the table {len(table)} rows. They must agree.")
            table = table.assign(**{name: np.asarray(column)})
        filled = {"text": np.arange(len(table)), "position": -1, "token": pd.Series("", index=table.index, dtype="str")}
        table = table.assign(**{name: column for name, column in filled.items() if name not in table})
        made = cls(table, tensors, dict(provenance or {"source": "arrays"}))
        if not allow_nonfinite:
            for site, tensor in tensors.items():
                check_finite(site, tensor, table)
        return made

    @classmethod
    def concat(cls, parts: Iterable["Activations"], *, same_texts: bool | None = None) -> "Activations":
        """The rows of several, one after the other.

        Args:
            same_texts: only needed if parts share text numbers. True: equal numbers are the same text. False: they are
                different texts, and later parts are renumbered.

        Raises:
            ValueError: no parts, other sites, widths or dtypes, other columns, or shared text numbers and no word on
                what they mean.
        """
        parts = list(parts)
        if not parts:
            raise ValueError("concat needs at least one Activations.")
        layout = _layout(parts[0])
        for number, part in enumerate(parts):
            if _layout(part) != layout:
                raise ValueError(
                    f"part {number} has {part!r}, part 0 {parts[0]!r}. Sites, widths and dtypes must agree."
                )
            if set(part.rows.columns) != set(parts[0].rows.columns):
                raise ValueError(
                    f"part {number} has columns {list(part.rows)}, part 0 {list(parts[0].rows)}. They must agree."
                )
        tables = [part.rows for part in parts]
        seen: set[int] = set()
        shared: set[int] = set()
        for table in tables:
            shared |= seen & set(table["text"])
            seen |= set(table["text"])
        if shared and same_texts is None:
            raise ValueError(
                f"Several parts have text {min(shared)} ({len(shared)} such numbers). Pass same_texts=True if it is "
                "the same text, or same_texts=False to renumber the later parts."
            )
        if shared and not same_texts:
            starts = np.cumsum([0, *(int(table["text"].max()) + 1 for table in tables)])
            tables = [table.assign(text=table["text"] + start) for table, start in zip(tables, starts, strict=False)]
        tensors = {site: joined([part.tensors[site] for part in parts]) for site in parts[0].tensors}
        same = all(part.provenance == parts[0].provenance for part in parts)
        provenance = parts[0].provenance if same else {"parts": [part.provenance for part in parts]}
        return Activations(_stacked(tables), tensors, provenance)

    @classmethod
    def load(cls, path: str | Path, *, verify: bool = True) -> "Activations":
        """Open a saved folder; tensors are mapped from disk, and read when touched.

        Args:
            verify: compare the files with their SHA-256 first, which reads them once.

        Raises:
            FileNotFoundError: no such folder, or part of it is missing.
            ValueError: not a folder of activations, or damaged.
        """
        return cls(*load_activations(path, verify=verify))

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write a folder (see `activation_files`), whole or not at all, and return its path.

        Raises:
            FileExistsError: the folder exists and `overwrite` is False, or it holds something else.
            TypeError: provenance or a column that cannot be written.
        """
        return save_activations(path, self.rows, self.tensors, self.provenance, overwrite=overwrite)

    @property
    def sites(self) -> tuple[Site, ...]:
        """The captured sites, in order."""
        return tuple(self.tensors)

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def __getitem__(self, name: SiteName) -> Tensor:
        """The tensor of a site: "z.5", ("z", 5), a TransformerLens name, a Site; "z.5.3" is one head of it.

        Raises:
            KeyError: not captured (near matches are listed), or a name of several sites.
        """
        return in_memory(find_tensor(self.tensors, name))

    def __contains__(self, name: SiteName) -> bool:
        try:
            find_tensor(self.tensors, name)
        except KeyError:
            return False
        return True

    def __iter__(self) -> Iterator[Site]:
        return iter(self.tensors)

    def sel(
        self,
        *,
        kind: str | Iterable[str] | None = None,
        layer: int | Iterable[int] | None = None,
        head: int | Iterable[int] | None = None,
        stack: str | Iterable[str] | None = None,
    ) -> "Activations":
        """Only the sites that satisfy every condition: a value, or several of them.

        `head=` keeps sites that have heads, and gives each head asked for a `[row, d]` tensor of its own.

        Raises:
            KeyError: a value that no site has.
        """
        return self._with(tensors=select_tensors(self.tensors, kind=kind, layer=layer, head=head, stack=stack))

    def only(self, sites: Iterable[SiteName]) -> "Activations":
        """Only these sites: captured ones, single heads of them ("z.5.3"), or all of a kind ("z").

        Raises:
            KeyError: a site that was not captured.
            ValueError: a site that is named twice.
        """
        return self._with(tensors=choose_tensors(self.tensors, sites))

    def select_rows(self, which: str | slice | Sequence | np.ndarray | pd.Series | pd.Index | Tensor) -> "Activations":
        """Only some rows, renumbered from 0.

        Args:
            which: a condition over the row table ("label == 1 and position > 0", as in DataFrame.query), a Boolean per
                row, a slice, or row numbers in the order wanted. A missing Boolean counts as False, as in a query.

        Raises:
            ValueError: no row left, a query that cannot be understood or is no condition, or Booleans that are not one
                per row.
            IndexError: a row number out of range.
            TypeError: none of these.
        """
        index = row_numbers(self.rows, which)
        rows = self.rows.iloc[index].reset_index(drop=True)
        picked = torch.as_tensor(np.arange(self.n_rows)[index])
        return self._with(rows=rows, tensors={s: t[picked.to(t.device)] for s, t in self.tensors.items()})

    def _with(self, **changes: Any) -> "Activations":
        return replace(self, **changes)

    def to_frame(self, *, values: str = "components") -> pd.DataFrame:
        """The row table with one column per component, "z.5.3[0]", or per Euclidean norm, "z.5.3", to its right.

        Raises:
            ValueError: more than five million values; narrow it with `sel` or `select_rows`.
        """
        return wide_frame(self.rows, self.tensors, values=values)

    def __repr__(self) -> str:
        dtypes = ", ".join(sorted({str(tensor.dtype)[6:] for tensor in self.tensors.values()}))
        return (
            f"Activations({self.n_rows:,} rows of {self.rows['text'].nunique():,} texts, {len(self.tensors)} sites: "
            f"{summarise(self.tensors)}; {dtypes}, {self.nbytes / 1e6:,.1f} MB)"
        )

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>{self.rows.head().to_html(escape=True)}"


def _stacked(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """Row tables one after the other; a column of categories stays one."""
    rows = pd.concat(tables, ignore_index=True)
    shared = [name for name in rows if all(isinstance(table[name].dtype, pd.CategoricalDtype) for table in tables)]
    return rows.assign(**{name: union_categoricals([table[name] for table in tables]) for name in shared})


def _layout(activations: Activations) -> dict[Site, tuple]:
    return {site: (tensor.shape[1:], tensor.dtype) for site, tensor in activations.tensors.items()}

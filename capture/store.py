"""A capture on disk, maybe larger than memory: `capture(..., store=path)` writes it, `Store.open(path)` reads it.

    store = capture(model, texts, ["resid_post", "z"], "all", store="runs/activations")   # the same call resumes
    store["z.5.3"]                                                  # read now: [row, d_head]
    store.sel(kind="z", layer=5).select_rows("label == 1")["z.5"]   # selections read nothing
    for part in store.parts(): ...                                  # Activations of a shard's rows, one after the other

A store is `Activations` whose tensors and row table stay on disk until they are touched, and goes wherever those go.
Beware: `store[site]` holds that site's rows at once; of a site larger than memory take `parts()`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet

from microtome.capture.activation_checks import check_axes
from microtome.capture.activation_sites import summarise
from microtome.capture.activations import Activations
from microtome.capture.sites import Site
from microtome.capture.store_files import (
    ShardRecord,
    amiss,
    differing_environments,
    is_merged,
    read_log,
    read_manifest,
    shard_file,
    sites_of,
    table_file,
)
from microtome.capture.stored_tensor import StoredTensor, in_memory
from microtome.data.spoken import spoken_bytes


class Store(Activations):
    """Rows x sites on disk. Beside what Activations has:

    Attributes:
        path: the folder.
        is_whole: whether every shard is there; False for some that were opened with `partial=True`.
    """

    def __init__(
        self,
        path: Path,
        records: Sequence[ShardRecord],
        tensors: Mapping[Site, StoredTensor],
        provenance: dict[str, Any],
        *,
        is_whole: bool = True,
        rows: pd.DataFrame | None = None,
    ):
        held = {"path": path, "_records": tuple(records), "tensors": dict(tensors), "provenance": provenance}
        self.__dict__.update(held | {"is_whole": is_whole} | ({} if rows is None else {"rows": rows}))
        for site, tensor in self.tensors.items():
            check_axes(site, tensor)

    @cached_property
    def rows(self) -> pd.DataFrame:  # pyright: ignore[reportIncompatibleVariableOverride]
        """One row per kept position, as in Activations; read at the first use.

        Raises ValueError if a table is damaged.
        """
        return _row_table(self.path, self._records)

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        tensor = next(iter(self.tensors.values()), None)
        return len(self.rows) if tensor is None else len(tensor)

    def _with(self, **changes: Any) -> "Store":
        """The same with other tensors, or other tensors and rows; tables are not read for it."""
        rows = changes.get("rows", self.__dict__.get("rows"))
        tensors = changes.get("tensors", self.tensors)
        return Store(self.path, self._records, tensors, self.provenance, is_whole=self.is_whole, rows=rows)

    @classmethod
    def open(cls, path: str | Path, *, partial: bool = False) -> "Store":
        """Open a store; row tables are read, tensors are not.

        Args:
            partial: accept one that is not finished, or lacks shards: the rows that are there.

        Raises:
            FileNotFoundError: no such folder, or a shard is missing.
            ValueError: no store, a damaged one, or one that is not finished.
        """
        path = Path(path).resolve()
        manifest, records = read_manifest(path), read_log(path)
        n_shards = len(manifest["shards"])
        wrong = {number: said for number, record in records.items() if (said := amiss(path, record)) is not None}
        mend = "Run the same capture again: it makes what is amiss anew and keeps the others"
        if is_merged(manifest):
            mend = "It was merged from other stores, so no capture mends it: remove it and merge its parts again"
        if wrong and not partial:
            number, said = next(iter(wrong.items()))
            kind = FileNotFoundError if said.endswith("missing") else ValueError
            raise kind(
                f"{path}, shard {number}: {said} ({len(wrong)} of {n_shards} shards are amiss). {mend}. Or read the "
                "others: Store.open(path, partial=True)."
            )
        whole = [records[number] for number in sorted(records) if number not in wrong and number < n_shards]
        if len(whole) < n_shards and not partial:
            raise ValueError(
                f"{path} has {len(whole)} of {n_shards} shards. {mend}. Or read what is there: "
                "Store.open(path, partial=True)."
            )
        if not whole:
            raise ValueError(f"{path} has no finished shard. {mend}.")
        starts = (0, *np.cumsum([record.rows for record in whole]).tolist())
        files = tuple(shard_file(path, record.shard) for record in whole)
        tensors = {
            site: StoredTensor(str(site), files, starts, inner, dtype)
            for site, (dtype, inner) in sites_of(manifest).items()
        }
        provenance = manifest["provenance"] | {"store": _facts(manifest, whole)}
        return cls(path, whole, tensors, provenance, is_whole=len(whole) == n_shards)

    def to_memory(self) -> Activations:
        """All of it (or of what was selected) read into memory."""
        tensors = {site: in_memory(tensor) for site, tensor in self.tensors.items()}
        return Activations(self.rows, tensors, self.provenance)

    def parts(self) -> Iterator[Activations]:
        """The rows in consecutive pieces of at most a shard's rows, each as Activations; a piece is read when used."""
        if not self.tensors:
            return
        first_of = next(iter(self.tensors.values()))
        bounds = first_of.starts
        if first_of.picked is not None:
            bounds = (*range(0, self.n_rows, max(1, int(np.diff(bounds).max()))), self.n_rows)
        for number, (first, stop) in enumerate(pairwise(bounds)):
            if first == stop:  # a shard whose texts the model ended at once
                continue
            if first_of.picked is None and "rows" not in self.__dict__:  # that shard's own table, not all of them
                rows = _row_table(self.path, self._records[number : number + 1])
            else:
                rows = self.rows.iloc[first:stop].reset_index(drop=True)
            if first_of.picked is None:
                tensors = {site: tensor.shard_rows(first, stop) for site, tensor in self.tensors.items()}
            else:
                tensors = {site: tensor[first:stop].load() for site, tensor in self.tensors.items()}
            yield Activations(rows, tensors, self.provenance)

    def __repr__(self) -> str:
        dtypes = ", ".join(sorted({str(tensor.dtype)[6:] for tensor in self.tensors.values()}))
        return (
            f"Store({self.n_rows:,} rows, {len(self.tensors)} sites: {summarise(self.tensors)}; {dtypes}, "
            f"{spoken_bytes(self.nbytes)} in {self.path}{'' if self.is_whole else ', not all shards'})"
        )


def _row_table(path: Path, records: Sequence[ShardRecord]) -> pd.DataFrame:
    """The shards' row tables, one after the other."""
    tables = []
    for record in records:
        file = table_file(path, record.shard)
        try:
            tables.append(_wide_codes(pyarrow.parquet.read_table(file)))
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{file} is damaged: {error}. Run `microtome store verify {path}`.") from error
        if len(tables[-1]) != record.rows:
            raise ValueError(
                f"{file} has {len(tables[-1])} rows, the log {record.rows}. Run `microtome store verify {path}`."
            )
    joined = pyarrow.concat_tables(tables, promote_options="permissive").unify_dictionaries()
    rows = joined.combine_chunks().to_pandas()
    if "span" in rows:  # a shard may hold rows without any
        rows["span"] = rows["span"].fillna(-1).astype(np.int64)
    return rows


def _wide_codes(table: pyarrow.Table) -> pyarrow.Table:
    """Columns of categories with codes of 32 bits, so that those of several shards can be joined."""
    for number, column in enumerate(table.schema):
        if pyarrow.types.is_dictionary(column.type):
            wide = pyarrow.dictionary(pyarrow.int32(), column.type.value_type)
            table = table.set_column(number, column.name, table.column(number).cast(wide))
    return table


def _facts(manifest: dict[str, Any], records: Sequence[ShardRecord]) -> dict[str, Any]:
    return {
        "shards": len(records),
        "environments": manifest["environments"],
        "differences": differing_environments(manifest, records),
        "tensors_digest": [record.tensors_digest for record in records],
    }

"""A capture on disk, maybe larger than memory: `capture(..., store=path)` writes it, `Store.open(path)` reads it.

    store = capture(model, texts, ["resid_post", "z"], "all", store="runs/activations")   # the same call resumes
    store["z.5.3"]                                                  # read now: [row, d_head]
    store.sel(kind="z", layer=5).select_rows("label == 1")["z.5"]   # selections read nothing
    for part in store.parts(): ...                                  # Activations of a shard's rows, one after the other

A store is `Activations` whose tensors stay on disk until they are touched, and goes wherever those go. The row table is
in memory. Beware: `store[site]` holds that site's rows at once; of a site larger than memory take `parts()`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
from torch import Tensor

from microtome.capture.activations import Activations, SiteName
from microtome.capture.store_files import (
    ShardRecord,
    amiss,
    differing_environments,
    read_log,
    read_manifest,
    shard_file,
    sites_of,
    table_file,
)
from microtome.capture.stored_tensor import StoredTensor, in_memory


@dataclass(frozen=True, eq=False, repr=False)
class Store(Activations):
    """Rows x sites on disk.

    Attributes:
        path: the folder.
        is_whole: whether every shard is there; False for one that was opened with `partial=True`.
    """

    path: Path
    is_whole: bool = True

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
        if wrong and not partial:
            number, said = next(iter(wrong.items()))
            kind = FileNotFoundError if said.endswith("missing") else ValueError
            raise kind(
                f"{path}, shard {number}: {said} ({len(wrong)} of {n_shards} shards are amiss). Run the same capture "
                "again: it makes them anew and keeps the others. Or read the others: Store.open(path, partial=True)."
            )
        whole = [records[number] for number in sorted(records) if number not in wrong and number < n_shards]
        if len(whole) < n_shards and not partial:
            raise ValueError(
                f"{path} has {len(whole)} of {n_shards} shards. Run the same capture again to finish it, or read what "
                "is there: Store.open(path, partial=True)."
            )
        if not whole:
            raise ValueError(f"{path} has no finished shard yet. Run the same capture again.")
        rows = _row_table(path, whole)
        starts = (0, *np.cumsum([record.rows for record in whole]).tolist())
        files = tuple(shard_file(path, record.shard) for record in whole)
        tensors: dict[Any, Tensor | StoredTensor] = {
            site: StoredTensor(str(site), files, starts, inner, dtype)
            for site, (dtype, inner) in sites_of(manifest).items()
        }
        provenance = manifest["provenance"] | {"store": _facts(manifest, whole)}
        return cls(rows, tensors, provenance, path, len(whole) == n_shards)

    def __getitem__(self, name: SiteName) -> Tensor:
        """The values of a site or head, read from disk now. Raises what `Activations` raises, and for lost shards."""
        return in_memory(super().__getitem__(name))

    def to_memory(self) -> Activations:
        """All of it (or of what was selected) read into memory."""
        tensors = {site: in_memory(tensor) for site, tensor in self.tensors.items()}
        return Activations(self.rows, tensors, self.provenance)

    def parts(self) -> Iterator[Activations]:
        """The rows in consecutive pieces of at most a shard's rows, each as Activations; a piece is read when used."""
        if not self.tensors:
            return
        first_of = next(iter(self.tensors.values()))
        if isinstance(first_of, StoredTensor) and first_of.picked is None:
            bounds = first_of.starts
        else:
            largest = max(1, int(np.diff(first_of.starts).max()))
            bounds = (*range(0, self.n_rows, largest), self.n_rows)
        for first, stop in pairwise(bounds):
            rows = self.rows.iloc[first:stop].reset_index(drop=True)
            tensors = {site: tensor[first:stop].load() for site, tensor in self.tensors.items()}
            yield Activations(rows, tensors, self.provenance)

    def __repr__(self) -> str:
        said = super().__repr__().removeprefix("Activations(").removesuffix(")")
        return f"Store({said}; {self.path}{'' if self.is_whole else ', not all shards'})"


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
        "tensors_sha256": [record.tensors_sha256 for record in records],
    }

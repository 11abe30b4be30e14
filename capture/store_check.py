"""What a store holds, and whether its bytes are still those that were written.

`store_info` reads no shard, `verify_store` reads all of them once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from safetensors import SafetensorError, safe_open

from microtome.capture.activation_sites import summarise
from microtome.capture.fingerprint import file_fingerprint
from microtome.capture.safetensors_file import DTYPE_NAMES
from microtome.capture.store_files import (
    ShardRecord,
    amiss,
    differing_environments,
    is_merged,
    read_log,
    read_manifest,
    rewrite_log,
    shard_file,
    sites_of,
    table_file,
    writing,
)
from microtome.capture.stored_tensor import StoredTensor


@dataclass(frozen=True)
class StoreInfo:
    """What a store holds.

    Attributes:
        path: its folder.
        model, positions: as they were given to `capture`.
        sites: a line that names them with their axes.
        dtype: of the stored values.
        shards, finished: how many there are to be, and are.
        texts, rows, tokens: of the finished shards.
        nbytes: of their files.
        seconds: that they took.
        differences: by name, values of environments that differ between shards; where there are none, the same call on
            the same machine makes the same bytes.
        columns: of the row table.
        coarsest: the coarsest dtype that model and values have: where environments differ, shards are equal to its
            rounding.
        is_generated: whether it holds what the model wrote, which may differ where environments do.
        is_merged: whether it was joined from others, so that no capture makes its shards anew.
    """

    path: Path
    model: str
    positions: str
    sites: str
    dtype: str
    shards: int
    finished: int
    texts: int
    rows: int
    tokens: int
    nbytes: int
    seconds: float
    differences: dict[str, list]
    columns: tuple[str, ...]
    coarsest: str
    is_generated: bool
    is_merged: bool

    @property
    def is_whole(self) -> bool:
        """Whether every shard is there."""
        return self.finished == self.shards


@dataclass(frozen=True)
class ShardFault:
    """A shard that is not what was written: its number, and what is wrong."""

    shard: int
    what: str


def store_info(path: str | Path) -> StoreInfo:
    """What a store holds, from its manifest, its log and the sizes of its files.

    Raises:
        FileNotFoundError, ValueError: no store there, or a damaged manifest.
    """
    path = Path(path).resolve()
    manifest, records = read_manifest(path), read_log(path)
    shards = manifest["shards"]
    numbered = [records[number] for number in sorted(records) if number in range(len(shards))]
    whole = [record for record in numbered if amiss(path, record) is None]
    shown = {site: _shape_only(dtype, inner) for site, (dtype, inner) in sites_of(manifest).items()}
    columns: tuple[str, ...] = ()
    if whole:
        columns = tuple(pyarrow.parquet.read_schema(table_file(path, whole[0].shard)).names)
    provenance = manifest["provenance"]
    return StoreInfo(
        path=path,
        model=provenance["model"]["name"] if "model" in provenance else "several",
        positions=str(provenance.get("positions", "several")),
        sites=summarise(shown),
        dtype=", ".join(sorted({entry["dtype"] for entry in manifest["sites"]})),
        shards=len(shards),
        finished=len(whole),
        texts=sum(shards[record.shard]["stop"] - shards[record.shard]["first"] for record in whole),
        rows=sum(record.rows for record in whole),
        tokens=sum(record.tokens for record in whole),
        nbytes=sum(record.tensors_bytes + record.table_bytes for record in whole),
        seconds=round(sum((record.seconds for record in whole), 0.0), 1),
        differences=differing_environments(manifest, whole),
        columns=columns,
        coarsest=_coarsest(manifest),
        is_generated=manifest["request"].get("generation") is not None,
        is_merged=is_merged(manifest),
    )


def _coarsest(manifest: dict[str, Any]) -> str:
    """Of the dtypes of model (several are joined by "+") and values, the one of the coarsest steps."""
    names = [
        str(manifest["provenance"].get("model", {}).get("dtype")),
        *(entry["dtype"] for entry in manifest["sites"]),
    ]
    return max((str(dtype)[6:] for dtype in DTYPE_NAMES if str(dtype)[6:] in "+".join(names).split("+")), key=_step)


def _step(name: str) -> float:
    return torch.finfo(getattr(torch, name)).eps


def said_of_differences(info: StoreInfo) -> list[str]:
    """A line for every setting that differed between shards, and one that says what that means; none if none did."""
    if not info.differences:
        return []
    lines = [f"{name} differed between shards: {', '.join(map(str, v))}" for name, v in info.differences.items()]
    rounding = f"rounding of {info.coarsest}" if info.coarsest in ("bfloat16", "float16") else "rounding (1e-5)"
    if info.is_generated:
        said = f"What the model wrote may differ between them; where it does not, values are equal to {rounding}."
    else:
        said = f"Equal to {rounding}, not byte for byte."
    return [*lines, said]


def verify_store(path: str | Path, *, discard_damaged: bool = False) -> list[ShardFault]:
    """Read every finished shard, compare it with its hash and its header with the manifest; the faults found.

    Args:
        discard_damaged: count damaged shards as not finished, so that the same capture makes them anew. Their files
            stay until then.

    Raises:
        FileNotFoundError, ValueError: no store there, or a damaged manifest; damaged shards of a merged store are to be
            discarded, which no capture makes anew.
        BlockingIOError: damaged shards are to be discarded while another process writes the store.
    """
    path = Path(path).resolve()
    manifest = read_manifest(path)
    faults = [
        ShardFault(number, said)
        for number, record in sorted(read_log(path).items())
        if (said := _fault(path, manifest, record)) is not None
    ]
    if faults and discard_damaged:
        if is_merged(manifest):
            raise ValueError(
                f"{path}, shard {faults[0].shard}: {faults[0].what} ({len(faults)} of {len(manifest['shards'])} shards "
                "are damaged). It was merged from other stores, so no capture makes them anew, and nothing was "
                "discarded. Remove it and merge its parts again."
            )
        with writing(path):
            damaged = {fault.shard for fault in faults}
            rewrite_log(path, [record for number, record in read_log(path).items() if number not in damaged])
    return faults


def _fault(path: Path, manifest: dict[str, Any], record: ShardRecord) -> str | None:
    if record.shard not in range(len(manifest["shards"])):
        return f"the manifest has {len(manifest['shards'])} shards, no shard {record.shard}"
    if (said := amiss(path, record)) is not None:
        return said
    tensors, table = shard_file(path, record.shard), table_file(path, record.shard)
    for file, digest in ((tensors, record.tensors_digest), (table, record.table_digest)):
        if file_fingerprint(file) != digest:
            return f"{file.name} is not the file that was written: its hash differs"
    return _other_content(manifest, record, tensors, table)


def _other_content(manifest: dict[str, Any], record: ShardRecord, tensors: Path, table: Path) -> str | None:
    """Whole files that hold something else than the manifest says: those of another store."""
    try:
        with safe_open(tensors, framework="pt") as opened:
            found = {name: _held(opened.get_slice(name)) for name in opened.keys()}  # noqa: SIM118
        n_rows = pyarrow.parquet.read_metadata(table).num_rows
    except (SafetensorError, pyarrow.ArrowException) as error:
        return f"cannot be read: {error}"
    expected = {
        str(site): (DTYPE_NAMES[dtype], [record.rows, *inner]) for site, (dtype, inner) in sites_of(manifest).items()
    }
    if found != expected:
        wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        return f"{tensors.name} holds {found.get(wrong[0])} for {wrong[0]}, not {expected.get(wrong[0])}"
    return None if n_rows == record.rows else f"{table.name} has {n_rows} rows, not {record.rows}"


def _held(values: Any) -> tuple[str, list[int]]:
    return values.get_dtype(), values.get_shape()


def _shape_only(dtype: Any, inner: tuple[int, ...]) -> StoredTensor:
    return StoredTensor("", (), (0,), inner, dtype)

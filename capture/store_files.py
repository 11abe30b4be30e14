"""The files of a store, and the only place that knows their layout.

    <path>/manifest.json             what is captured (the request), how it is divided, who wrote it (environments)
           shards.jsonl              one line per finished shard: rows, sizes and hash (XXH3-128) of its two files
           shard-00003.safetensors   one tensor per site, rows in order
           rows-00003.parquet        the row table of that shard
           writer.lock, writer.json  held while a process writes, and who it is

A shard counts once its line is in shards.jsonl, which is written last, so a kill at any moment leaves whole shards and
perhaps one file that no line names; a last line that was cut off counts for nothing. Equal requests have equal shards,
byte for byte where the environments are equal too, else to rounding of their dtype; the manifest says which differed.
"""

import json
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow
import torch
from filelock import FileLock, Timeout

from microtome.capture.fingerprint import file_fingerprint
from microtome.capture.hashes import write_atomically
from microtome.capture.safetensors_file import DTYPE_NAMES, FileFacts
from microtome.capture.sites import Site
from microtome.data.replaced_file import replaced_file

FORMAT = "microtome store 1"
MANIFEST, LOG, LOCK, WRITER = "manifest.json", "shards.jsonl", "writer.lock", "writer.json"


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard. shard: its number. rows, tokens: how many. tensors_*, table_*: size in bytes and XXH3-128 of
    its two files. environment: its number in the manifest. seconds: what it took. date: when it was done."""

    shard: int
    rows: int
    tokens: int
    tensors_bytes: int
    tensors_digest: str
    table_bytes: int
    table_digest: str
    environment: int
    seconds: float
    date: str


def shard_file(path: Path, number: int) -> Path:
    """Where a shard's tensors are."""
    return path / f"shard-{number:05d}.safetensors"


def table_file(path: Path, number: int) -> Path:
    """Where a shard's row table is."""
    return path / f"rows-{number:05d}.parquet"


def is_store(path: Path) -> bool:
    """Whether a folder holds a store, whole or begun."""
    try:
        return json.loads((path / MANIFEST).read_text(encoding="utf-8")).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        return False


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: no store, or a damaged manifest.
    """
    if path.is_file():
        raise ValueError(f"{path} is a file; a store is a folder. Give the folder that capture(store=) wrote.")
    if not path.is_dir():
        raise FileNotFoundError(f"There is no store {path}. Make one: capture(..., store={str(path)!r}).")
    file = path / MANIFEST
    if not file.is_file():
        raise ValueError(f"{path} holds no store: it has no {MANIFEST}. Give the folder that capture(store=) wrote.")
    records = read_log(path)  # before the manifest, which gets an environment before a shard of it is counted
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(file, str(error)) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(
            f"{file} is not in the format {FORMAT!r}. Is it a folder of Activations? Use Activations.load."
        )
    if (said := _wrong_in(manifest, records)) is not None:
        raise _damaged(file, said)
    return manifest


def _damaged(file: Path, said: str) -> ValueError:
    return ValueError(f"{file} is damaged: {said}. The shards are whole without it; restore it, or capture anew.")


def _wrong_in(manifest: dict[str, Any], records: dict[int, ShardRecord]) -> str | None:
    """What makes a manifest one that no capture wrote; None if nothing does."""
    for name, kind in {
        "request": dict,
        "sites": list,
        "shards": list,
        "environments": list,
        "provenance": dict,
    }.items():
        if not isinstance(value := manifest.get(name), kind):
            return f"{name} is {value!r:.60}, not a {'mapping' if kind is dict else 'list'}"
    for name in ("sites", "shards"):
        if not manifest[name]:
            return f"{name} is empty"
    for number, entry in enumerate(manifest["sites"]):
        if (said := _wrong_in_site(entry)) is not None:
            return f"sites[{number}]: {said}"
    if len(sites_of(manifest)) < len(manifest["sites"]):
        return "sites names one twice"
    stop = 0
    for number, shard in enumerate(manifest["shards"]):
        bounds = (shard.get("first"), shard.get("stop")) if isinstance(shard, dict) else (None, None)
        if not all(type(bound) is int for bound in bounds) or bounds[0] != stop or bounds[1] < stop:
            return f"shards[{number}] is {shard!r:.60}, which does not go on at text {stop}"
        stop = bounds[1]
    for number, facts in enumerate(manifest["environments"]):
        if not isinstance(facts, dict):
            return f"environments[{number}] is {facts!r:.60}, not a mapping"
    n_environments = len(manifest["environments"])
    for number, record in records.items():
        if record.environment not in range(n_environments):
            return f"shard {number} was made in environment {record.environment}, of which it has {n_environments}"
    model = manifest["provenance"].get("model", {"name": ""})
    if not isinstance(model, dict) or "name" not in model:
        return f"provenance says of the model {model!r:.60}, not a mapping with its name"
    return None


def _wrong_in_site(entry: Any) -> str | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("site"), dict):
        return f"{entry!r:.60} is no site"
    if entry.get("dtype") not in (known := [str(dtype)[6:] for dtype in DTYPE_NAMES]):
        return f"dtype is {entry.get('dtype')!r}, not one of {', '.join(known)}"
    inner = entry.get("inner")
    if not isinstance(inner, list) or not inner or any(type(size) is not int or size < 1 for size in inner):
        return f"inner is {inner!r:.60}, not the sizes of the axes behind the rows"
    try:
        hash(Site(**entry["site"]))
    except TypeError:
        return f"{entry['site']!r:.60} is no site"
    return None


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Replace the manifest, whole or not at all, and only once it is on the disk."""
    write_atomically(path / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False))


def read_log(path: Path) -> dict[int, ShardRecord]:
    """Finished shards by number. Lines that are cut off or damaged are left out: their shards are not finished."""
    file = path / LOG
    records = {}
    for line in file.read_bytes().split(b"\n") if file.exists() else ():
        try:
            record = ShardRecord(**json.loads(line))
        except (ValueError, TypeError):
            continue
        if any(type(getattr(record, field.name)) is not field.type for field in fields(ShardRecord)):
            continue
        records[record.shard] = record
    return records


def append_log(path: Path, record: ShardRecord) -> None:
    """Count a shard as finished: one line, on the disk before this returns."""
    with open(path / LOG, "ab") as file:
        file.write(json.dumps(asdict(record)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def rewrite_log(path: Path, records: Iterable[ShardRecord]) -> None:
    """Replace the log by these records, whole or not at all."""
    lines = [json.dumps(asdict(record)) + "\n" for record in sorted(records, key=lambda record: record.shard)]
    write_atomically(path / LOG, "".join(lines))


def amiss(path: Path, record: ShardRecord) -> str | None:
    """What is wrong with a shard's files by name and size, without reading them; None if nothing is."""
    files = (
        (shard_file(path, record.shard), record.tensors_bytes),
        (table_file(path, record.shard), record.table_bytes),
    )
    for file, size in files:
        try:
            found = file.stat().st_size
        except FileNotFoundError:
            return f"{file.name} is missing"
        if found != size:
            return f"{file.name} has {found:,} bytes, not {size:,}"
    return None


def sites_of(manifest: dict[str, Any]) -> dict[Site, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and axes behind the rows of every site."""
    return {
        Site(**entry["site"]): (getattr(torch, entry["dtype"]), tuple(entry["inner"])) for entry in manifest["sites"]
    }


def is_merged(manifest: dict[str, Any]) -> bool:
    """Whether a store was joined from others, so that no capture makes its shards anew."""
    return bool(manifest.get("merged")) or "parts" in manifest["provenance"]


def differing_environments(manifest: dict[str, Any], records: Iterable[ShardRecord]) -> dict[str, list]:
    """By name, the values that the shards were made with, where they were made with several.

    Environments that the manifest does not have count for nothing.
    """
    used = {record.environment for record in records}
    facts = [facts for number, facts in enumerate(manifest["environments"]) if number in used]
    names = dict.fromkeys(name for fact in facts for name in fact)
    values = {name: list(dict.fromkeys(json.dumps(fact.get(name)) for fact in facts)) for name in names}
    return {name: [json.loads(value) for value in several] for name, several in values.items() if len(several) > 1}


def write_rows(file: Path, table: pd.DataFrame) -> FileFacts:
    """Write a row table, whole or not at all.

    Raises TypeError for a column that Parquet cannot hold.
    """
    try:
        with replaced_file(file) as scratch:
            table.to_parquet(scratch, index=False)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError) as error:
        raise TypeError(f"rows cannot be written as Parquet: {error}. Give every label column one type.") from error
    return FileFacts(file.stat().st_size, file_fingerprint(file))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """The right to write a store, for one process at a time; scratch files of killed ones go.

    Raises BlockingIOError if another process has it.
    """
    lock = FileLock(path / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise BlockingIOError(
            f"{path} is being written by {_writer(path)}. Wait for it, or capture to another folder."
        ) from error
    try:
        (path / WRITER).write_text(
            json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now()}), encoding="utf-8"
        )
        for scratch in path.glob(".*.part"):
            scratch.unlink()
        yield
    finally:
        (path / WRITER).unlink(missing_ok=True)
        lock.release()


def _writer(path: Path) -> str:
    try:
        who = json.loads((path / WRITER).read_text(encoding="utf-8"))
        return f"process {who['pid']} on {who['host']} since {who['since']}"
    except (OSError, ValueError, KeyError):
        return "another process"


def now() -> str:
    """Date and time, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")

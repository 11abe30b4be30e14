"""Join stores of one model and one list of sites into a new one, such as those that several machines made.

Shards are copied, byte for byte, so that damage to one store does none to the other; texts are numbered on from store
to store. The result, whose manifest says `"merged": true`, cannot be gone on with, only read.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from microtome.capture.activation_files import scratch_beside
from microtome.capture.fingerprint import file_fingerprint
from microtome.capture.store import Store
from microtome.capture.store_alike import FREE, Part, require_alike, require_columns_alike, require_new_texts
from microtome.capture.store_files import (
    amiss,
    differing_environments,
    is_merged,
    now,
    read_log,
    read_manifest,
    rewrite_log,
    shard_file,
    table_file,
    write_manifest,
    write_rows,
)
from microtome.data.spoken import spoken_bytes

_ROOM = 2**20  # bytes beside the shards: manifest, log


def merge_stores(out: str | Path, paths: Sequence[str | Path], *, allow_repeated: bool = False) -> Store:
    """A new store with the rows of all, in the order given, whole or not at all.

    Args:
        allow_repeated: take a text that is in several stores several times; its rows count as often.

    Raises:
        FileNotFoundError: a store or a shard is missing.
        FileExistsError: `out` is there already.
        ValueError: fewer than two stores, one that is not finished or was captured with edits, texts that are in
            several of them, stores of other models, sites, dtypes, positions or columns, too little room on the disk.
        TypeError: one path instead of a list.
    """
    if isinstance(paths, str | Path):
        raise TypeError(f"paths={str(paths)!r} is one path. Pass a list of stores: merge_stores(out, [path, other]).")
    out, paths = Path(out).resolve(), [Path(path).resolve() for path in paths]
    if len(paths) < 2:
        raise ValueError(f"{len(paths)} store(s) given. Name at least two to merge.")
    if out.exists():
        raise FileExistsError(f"{out} exists. Give another folder to merge into.")
    parts = [_whole(path) for path in paths]
    require_alike(parts)
    require_columns_alike(parts)
    if not allow_repeated:
        require_new_texts(parts)
    out.parent.mkdir(parents=True, exist_ok=True)
    _require_room(out.parent, parts)
    scratch = scratch_beside(out)
    try:
        _write(scratch, parts)
        os.rename(scratch, out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Store.open(out)


def _whole(path: Path) -> Part:
    """A store that has every shard. Row tables are read anew, so they must be those that were written."""
    manifest, log = read_manifest(path), read_log(path)
    again = "Merge its parts again" if is_merged(manifest) else "Run its capture again"
    shards = manifest["shards"]
    records = tuple(log[number] for number in range(len(shards)) if number in log)
    if len(records) < len(shards):
        raise ValueError(f"{path} has {len(records)} of {len(shards)} shards. {again} first.")
    for record in records:
        if (said := amiss(path, record)) is not None:
            raise FileNotFoundError(f"{path}: {said}. {again}, then merge.")
        table = table_file(path, record.shard)
        if file_fingerprint(table) != record.table_digest:
            raise ValueError(f"{table} is not the file that was written. Run `microtome store verify {path}`.")
    return Part(path, manifest, records)


def _copy(source: Path, target: Path, digest: str) -> None:
    """Copy a shard to the disk; raises ValueError if it is not the file that was written."""
    shutil.copyfile(source, target)
    with open(target, "rb+") as file:
        os.fsync(file.fileno())
    if file_fingerprint(target) != digest:
        raise ValueError(
            f"{source} is not the file that was written. Run `microtome store verify {source.parent}`, mend it, then "
            "merge."
        )


def _require_room(folder: Path, parts: Sequence[Part]) -> None:
    needed = _ROOM + sum(r.tensors_bytes + r.table_bytes for part in parts for r in part.records)
    if needed > (free := shutil.disk_usage(folder).free):
        raise ValueError(
            f"The merged store takes {spoken_bytes(needed)}; the disk of {folder} has {spoken_bytes(free)} free. Make "
            "room, or merge into a folder on another disk."
        )


def _write(folder: Path, parts: Sequence[Part]) -> None:
    records, shards, environments, first_text = [], [], [], 0
    for part in parts:
        for record, shard in zip(part.records, part.manifest["shards"], strict=True):
            new = len(records)
            _copy(shard_file(part.path, record.shard), shard_file(folder, new), record.tensors_digest)
            rows = pd.read_parquet(table_file(part.path, record.shard))
            table = write_rows(table_file(folder, new), rows.assign(text=rows["text"] + first_text))
            made = replace(record, shard=new, environment=record.environment + len(environments))
            records.append(replace(made, table_bytes=table.bytes, table_digest=table.digest))
            shards.append(shard | {"first": shard["first"] + first_text, "stop": shard["stop"] + first_text})
        first_text = shards[-1]["stop"]
        environments += part.manifest["environments"]
    first = parts[0].manifest
    request = first["request"] | {name: [part.manifest["request"][name] for part in parts] for name in sorted(FREE)}
    told = ("model", "positions", "include_special", "generation", "edits")  # of all alike
    provenance = {name: parts[0].captures[0][name] for name in told if name in parts[0].captures[0]}
    provenance["parts"] = [part.manifest["provenance"] for part in parts]
    merged = first | {"merged": True, "date": now(), "request": request, "shards": shards, "environments": environments}
    differences = differing_environments(merged, records)
    write_manifest(folder, merged | {"differences": differences, "provenance": provenance})
    rewrite_log(folder, records)

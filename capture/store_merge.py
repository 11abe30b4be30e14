"""Join stores of one model and one list of sites into a new one, such as those that several machines made.

Shards are linked where the file system can, else copied, and stay byte for byte what they were; texts are numbered on
from store to store. The result cannot be gone on with, only read.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from microtome.capture.activation_files import scratch_beside
from microtome.capture.store import Store
from microtome.capture.store_files import (
    amiss,
    read_log,
    read_manifest,
    rewrite_log,
    shard_file,
    table_file,
    write_manifest,
    write_rows,
)

# What may differ between parts: which texts they are, their labels, and how they are divided.
_FREE = {"texts", "positions and token labels", "labels", "shards"}


def merge_stores(out: str | Path, paths: Sequence[str | Path]) -> Store:
    """A new store with the rows of all, in the order given, whole or not at all.

    Raises:
        FileNotFoundError: a store or a shard is missing.
        FileExistsError: `out` is there already.
        ValueError: fewer than two stores, one that is not finished, the same texts twice, or stores of other models,
            sites, dtypes or columns.
    """
    out, paths = Path(out).resolve(), [Path(path).resolve() for path in paths]
    if len(paths) < 2:
        raise ValueError(f"{len(paths)} store(s) given. Name at least two to merge.")
    if out.exists():
        raise FileExistsError(f"{out} exists. Give another folder to merge into.")
    manifests = [_whole(path) for path in paths]
    _require_alike(paths, manifests)
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = scratch_beside(out)
    try:
        _write(scratch, paths, manifests)
        os.rename(scratch, out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Store.open(out)


def _whole(path: Path) -> dict[str, Any]:
    manifest, records = read_manifest(path), read_log(path)
    if len(records) < len(manifest["shards"]):
        raise ValueError(
            f"{path} has {len(records)} of {len(manifest['shards'])} shards. Finish it first: run its capture again."
        )
    for record in records.values():
        if (said := amiss(path, record)) is not None:
            raise FileNotFoundError(f"{path}: {said}. Run its capture again, then merge.")
    return manifest


def _require_alike(paths: list[Path], manifests: list[dict[str, Any]]) -> None:
    first = manifests[0]
    for path, manifest in zip(paths[1:], manifests[1:], strict=True):
        names = [name for name in first["request"] if name not in _FREE]
        differing = [name for name in names if manifest["request"].get(name) != first["request"][name]]
        if differing or manifest["sites"] != first["sites"]:
            what = ", ".join(differing) or "widths of sites"
            raise ValueError(f"{path} and {paths[0]} differ in: {what}. Only stores of one kind can be merged.")
    seen: dict[str, Path] = {}
    for path, manifest in zip(paths, manifests, strict=True):
        texts = str(manifest["request"]["texts"])
        if texts in seen:
            raise ValueError(f"{path} and {seen[texts]} hold the same texts. Name each once: rows would count twice.")
        seen[texts] = path


def _write(folder: Path, paths: list[Path], manifests: list[dict[str, Any]]) -> None:
    records, shards, environments, first_text = [], [], [], 0
    for path, manifest in zip(paths, manifests, strict=True):
        for number, record in sorted(read_log(path).items()):
            new = len(records)
            _link(shard_file(path, number), shard_file(folder, new))
            rows = pd.read_parquet(table_file(path, number))
            table = write_rows(table_file(folder, new), rows.assign(text=rows["text"] + first_text))
            made = replace(record, shard=new, environment=record.environment + len(environments))
            records.append(replace(made, table_bytes=table.bytes, table_sha256=table.sha256))
            part = manifest["shards"][number]
            shards.append(part | {"first": part["first"] + first_text, "stop": part["stop"] + first_text})
        first_text += max(part["stop"] for part in manifest["shards"])
        environments += manifest["environments"]
    request = manifests[0]["request"] | {
        name: [manifest["request"][name] for manifest in manifests] for name in sorted(_FREE)
    }
    merged = manifests[0] | {"request": request, "shards": shards, "environments": environments}
    merged["provenance"] = {
        "model": manifests[0]["provenance"]["model"],
        "positions": manifests[0]["provenance"]["positions"],
        "parts": [manifest["provenance"] for manifest in manifests],
    }
    write_manifest(folder, merged)
    rewrite_log(folder, records)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)

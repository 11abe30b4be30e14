"""`microtome store verify | info | merge | export`: look at stores of activations, check, join and export them."""

import json
from dataclasses import asdict
from pathlib import Path

from microtome.capture.store import Store
from microtome.capture.store_check import said_of_differences, store_info
from microtome.capture.store_check import verify_store as faults_of
from microtome.capture.store_export import ExportFormat, export
from microtome.capture.store_merge import merge_stores as merged
from microtome.data.spoken import spoken_bytes, spoken_seconds


def show_store(path: Path, as_json: bool = False) -> None:
    """Print what a store holds. Raises what `store_info` raises."""
    info = store_info(path)
    if as_json:
        print(json.dumps(asdict(info) | {"path": str(info.path), "is_whole": info.is_whole}))
        return
    again = "merge its parts again" if info.is_merged else "run the same capture again"
    state = "whole" if info.is_whole else f"{'not whole' if info.is_merged else 'not finished'}: {again}"
    lines = {
        "store": str(info.path),
        "model": info.model,
        "sites": f"{info.sites}; {info.dtype}",
        "positions": info.positions,
        "shards": f"{info.finished} of {info.shards} ({state})",
        "rows": f"{info.rows:,} of {info.texts:,} texts, {info.tokens:,} tokens",
        "size": f"{spoken_bytes(info.nbytes)}, captured in {spoken_seconds(info.seconds)}",
        "columns": ", ".join(info.columns),
    }
    for name, said in lines.items():
        print(f"{name:10}{said}")
    for said in said_of_differences(info):
        print(said)


def verify_store(path: Path, discard_damaged: bool = False, as_json: bool = False) -> bool:
    """Check every byte; True if all is well. Raises what `verify_store` of `capture` raises."""
    faults = faults_of(path, discard_damaged=discard_damaged)
    info = store_info(path)
    if as_json:
        said = {"path": str(info.path), "checked": info.finished, "shards": info.shards}
        print(json.dumps(said | {"faults": [asdict(fault) for fault in faults], "discarded": discard_damaged}))
        return not faults
    for fault in faults:
        print(f"shard {fault.shard}: {fault.what}")
    if faults and discard_damaged:
        print(f"{len(faults)} shard(s) discarded: run the same capture again, it makes them anew.")
    elif faults and info.is_merged:
        print(f"{len(faults)} shard(s) damaged. It was merged from other stores: remove it and merge its parts again.")
    elif faults:
        print(
            f"{len(faults)} shard(s) damaged. `microtome store verify {path} --discard-damaged`, then the same capture."
        )
    else:
        missing = "missing: merge its parts again" if info.is_merged else "not finished"
        rest = "" if info.is_whole else f" of {info.shards}; the others are {missing}"
        print(f"{info.path}: {info.finished} shards{rest}, {spoken_bytes(info.nbytes)}, every byte as it was written.")
    return not faults


def merge_stores(out: Path, paths: list[Path], allow_repeated: bool = False, as_json: bool = False) -> None:
    """Join stores into a new one. Raises what `merge_stores` of `capture` raises."""
    store = merged(out, paths, allow_repeated=allow_repeated)
    print(json.dumps({"path": str(store.path), "rows": store.n_rows, "parts": len(paths)}) if as_json else store)


def export_store(
    path: Path,
    out: Path,
    format: ExportFormat = "npy",
    sites: list[str] | None = None,
    rows: str | None = None,
    as_json: bool = False,
) -> None:
    """Write some sites and rows of a store for other tools.

    Args:
        sites: names of sites or kinds; all of them if None.
        rows: a query over the row table, "label == 1 and position > 0".

    Raises:
        KeyError: a site that the store does not have.
        ValueError: a query that names no column, or matches no row.
    """
    store = Store.open(path)
    if sites:
        store = store.only(sites)
    if rows is not None:
        store = store.select_rows(rows)
    written = export(store, out, format)
    said = {"path": str(written), "format": format, "rows": store.n_rows, "sites": len(store.sites)}
    print(json.dumps(said) if as_json else f"{written}: {store.n_rows:,} rows, {len(store.sites)} sites, {format}")

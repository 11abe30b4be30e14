"""Activations on disk: a folder with the tensors, the row table and a manifest that says what they are.

    <path>/activations.safetensors   one tensor per site, named as the site
           rows.parquet              the row table
           manifest.json             sites, shapes, dtypes, provenance, size and SHA-256 of both files

The folder is written beside its place and renamed into it: an interrupted save leaves no half-written folder there, and
an old one intact. (A kill between the two renames of a replacement leaves the old one as `.<name>.previous`; loading
says so.) Reading maps the tensors into memory, so that only what is touched is read; the check of the hashes, on by
default, touches all of it once.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow
from safetensors import SafetensorError, safe_open
from torch import Tensor

from microtome.capture.safetensors_file import write_safetensors
from microtome.capture.sites import Site
from microtome.capture.stored_tensor import StoredTensor, pieces
from microtome.data.registry import file_sha256

FORMAT = "microtome activations 1"
_TENSORS, _ROWS, _MANIFEST = "activations.safetensors", "rows.parquet", "manifest.json"


def save_activations(
    path: str | Path,
    rows: pd.DataFrame,
    tensors: Mapping[Site, Tensor | StoredTensor],
    provenance: Mapping[str, Any],
    *,
    overwrite: bool = False,
) -> Path:
    """Write the folder and return its path.

    Raises:
        FileExistsError: the folder exists and `overwrite` is False, or it holds something else than activations.
        TypeError: provenance that JSON cannot hold, or a column that Parquet cannot.
    """
    path = Path(path).resolve()
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists. Give another path, or pass overwrite=True to replace it.")
    if path.exists():
        _require_replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = scratch_beside(path)
    try:
        _write(scratch, rows, tensors, provenance)
        _put_in_place(scratch, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def _require_replaceable(path: Path) -> None:
    """Raise FileExistsError unless the folder holds activations and nothing else."""
    try:
        _read_manifest(path)
    except (ValueError, NotADirectoryError) as error:
        raise FileExistsError(
            f"{path} exists and holds no activations, so it is left alone. Give another path."
        ) from error
    refuse_other_files(path, (_TENSORS, _ROWS, _MANIFEST), "activations")


def refuse_other_files(folder: Path, own: tuple[str, ...], what: str) -> None:
    """Raise FileExistsError if a folder that is to be replaced holds more than its own files."""
    if other := sorted(file.name for file in folder.iterdir() if file.name not in own):
        raise FileExistsError(f"{folder} holds {', '.join(other)} beside {what}. Move that away, or save elsewhere.")


def scratch_beside(path: Path) -> Path:
    """A new folder beside `path` to write in, `.<name>.<pid>.<hex>.part`; those of processes that were killed go."""
    for scratch in path.parent.glob(f".{path.name}.*.*.part"):
        pid = scratch.name.removeprefix(f".{path.name}.").split(".")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(scratch, ignore_errors=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:12]}.part")
    fresh.mkdir()
    return fresh


def load_activations(
    path: str | Path, *, verify: bool = True
) -> tuple[pd.DataFrame, dict[Site, Tensor], dict[str, Any]]:
    """Row table, tensors (memory-mapped, on the CPU) and provenance of a saved folder.

    Args:
        verify: compare both files with their SHA-256, which reads them once.

    Raises:
        FileNotFoundError: no such folder, or a file of it is missing.
        ValueError: not a folder of activations, or a file is damaged.
    """
    path = Path(path).resolve()
    if not path.is_dir():
        previous = _previous(path)
        hint = f" An interrupted overwrite left the old one as {previous}: rename it." if previous.exists() else ""
        raise FileNotFoundError(f"There is no folder {path}.{hint}")
    manifest = _read_manifest(path)
    for name, facts in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing, though the manifest lists it. Save the activations again.")
        if file.stat().st_size != facts["bytes"] or (verify and file_sha256(file) != facts["sha256"]):
            raise ValueError(f"{file} is damaged: it is not the file the manifest was written for. Capture again.")
    try:
        rows = pd.read_parquet(path / _ROWS)
        with safe_open(path / _TENSORS, framework="pt") as stored:
            tensors = {Site(**entry["site"]): stored.get_tensor(entry["name"]) for entry in manifest["sites"]}
    except (SafetensorError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} is damaged: {error}. Capture again.") from error
    return rows, tensors, manifest["provenance"]


def _write(
    folder: Path, rows: pd.DataFrame, tensors: Mapping[Site, Tensor | StoredTensor], provenance: Mapping[str, Any]
) -> None:
    sites = [
        {"name": str(site), "site": asdict(site), "shape": list(tensor.shape), "dtype": str(tensor.dtype)[6:]}
        for site, tensor in tensors.items()
    ]
    manifest: dict[str, Any] = {"format": FORMAT, "n_rows": len(rows), "sites": sites, "provenance": dict(provenance)}
    try:
        json.dumps(manifest, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"provenance must hold plain JSON values: {error}. Convert arrays to lists.") from error
    try:
        rows.to_parquet(folder / _ROWS, index=False)
    except (pyarrow.ArrowException, ValueError) as error:
        raise TypeError(f"rows cannot be written as Parquet: {error}. Give every column one type.") from error
    layout = {str(site): (tensor.dtype, tuple(tensor.shape)) for site, tensor in tensors.items()}
    parts = (part.detach().cpu() for tensor in tensors.values() for part in pieces(tensor))
    values = write_safetensors(folder / _TENSORS, layout, parts, hashlib.sha256())
    manifest["files"] = {
        _TENSORS: {"bytes": values.bytes, "sha256": values.digest},
        _ROWS: {"bytes": (folder / _ROWS).stat().st_size, "sha256": file_sha256(folder / _ROWS)},
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False), encoding="utf-8")
    for name in (_TENSORS, _ROWS, _MANIFEST):  # a rename must not reach the disk before the bytes it names
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())


def _put_in_place(scratch: Path, path: Path) -> None:
    if not path.exists():
        os.rename(scratch, path)
        return
    previous = _previous(path)
    if previous.exists():
        shutil.rmtree(previous)
    os.rename(path, previous)
    try:
        os.rename(scratch, path)
    except OSError:
        os.rename(previous, path)
        raise
    shutil.rmtree(previous)


def _previous(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} holds no activations: it has no {_MANIFEST}.") from error
    except ValueError as error:
        raise ValueError(f"{path / _MANIFEST} is damaged: {error}.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path / _MANIFEST} is not in the format {FORMAT!r}. If it is a store: Store.open(path).")
    files, sites = manifest.get("files"), manifest.get("sites")
    is_whole = isinstance(files, dict) and {_TENSORS, _ROWS} <= set(files) and isinstance(sites, list) and sites
    if not is_whole or not all(isinstance(entry, dict) and {"site", "name"} <= set(entry) for entry in sites):
        raise ValueError(f"{path / _MANIFEST} is damaged: it does not list the files and sites. Capture again.")
    return manifest

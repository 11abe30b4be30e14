"""Moments on disk: `moments.json` says what they are and names the file of their tensors, so both change at once.

    <folder>/moments.json                 settings, model, texts, split, counts, versions; how far the pass came
             moments-<hex>.safetensors    sums, products and waiting rows of every cell
             writer.lock                  held while a pass writes

The tensors are written first, beside the old ones; replacing the json takes them into use; then the old ones go. A kill
at any moment leaves one whole state. Waiting rows are saved too: what goes on from a file is, bit for bit, what would
have gone on without it.
"""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from microtome.capture.fingerprint import file_fingerprint
from microtome.capture.hashes import write_atomically
from microtome.capture.safetensors_file import read_rows, write_safetensors
from microtome.capture.store_files import now
from microtome.lenses.cross_products import CrossProducts
from microtome.lenses.document_shards import DocumentShards
from microtome.lenses.moment_cells import MomentCell
from microtome.lenses.moments import Moments
from microtome.lenses.site_pairs import SitePairs
from microtome.lenses.strata import TokenRule

FORMAT = "microtome moments 1"
_FACTS = "moments.json"


def save_moments(moments: Moments, folder: str | Path, progress: dict[str, Any] | None = None) -> None:
    """Save, replacing what the folder holds. progress: of the pass, JSON-able.

    Raises:
        OSError: the folder cannot be written to; what it held stays.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    name = f"moments-{uuid.uuid4().hex[:12]}.safetensors"
    named = dict(_tensors(moments))
    layout = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in named.items()}
    written = write_safetensors(folder / name, layout, (tensor.cpu() for tensor in named.values()))
    facts = {
        "format": FORMAT,
        "date": now(),
        "tensors": name,
        "digest": written.digest,
        "settings": moments.settings(),
        "provenance": moments.provenance,
        "dtype": None if moments.dtype is None else str(moments.dtype)[6:],
        "documents": sorted(moments.documents),
        "medians": moments.medians,
        "margins": list(moments.margins),
        "reason_counts": moments.reason_counts.tolist(),
        "left_out": {reason: counts.tolist() for reason, counts in moments.left_out.items()},
        "cells": [_cell_facts(shard, stratum, cell) for (shard, stratum), cell in moments.cells.items()],
        "progress": progress,
    }
    write_atomically(folder / _FACTS, json.dumps(facts))
    for other in folder.glob("moments-*.safetensors"):
        if other.name != name:
            other.unlink(missing_ok=True)


def has_moments(folder: str | Path) -> bool:
    """Whether the folder holds moments."""
    return (Path(folder) / _FACTS).is_file()


def read_progress(folder: str | Path) -> dict[str, Any] | None:
    """How far the pass came that saved these moments, as it said."""
    return _facts(Path(folder))["progress"]


def load_moments(folder: str | Path, *, device: torch.device | str = "cpu", verify: bool = False) -> Moments:
    """Load moments, those of an unfinished pass as far as it came. verify: compare the hash of all bytes first.

    Raises:
        FileNotFoundError: the folder holds no moments.
        ValueError: they are damaged or of another format.
    """
    folder = Path(folder)
    facts = _facts(folder)
    file = folder / facts["tensors"]
    if not file.is_file():
        raise ValueError(f"{folder} is damaged: {file.name} is missing. Run the pass again, to another folder.")
    if verify and file_fingerprint(file) != facts["digest"]:
        raise ValueError(f"{file} is damaged: its bytes are not those that were written. Run the pass again.")
    settings = facts["settings"]
    described = settings["pairs"]
    names, widths = tuple(described["sites"]), tuple(described["widths"])
    looked_at = settings["rule"]["looked_at"]
    moments = Moments(
        dict(zip(names, widths, strict=True)),
        shards=_split(settings["split"]),
        rule=TokenRule(**settings["rule"] | {"looked_at": None if looked_at is None else tuple(looked_at)}),
        shuffled=settings["shuffled"],
        chunk=settings["chunk"],
        provenance=facts["provenance"],
    )
    moments.pairs = SitePairs(names, widths, tuple(map(tuple, described["targets"])), described["rule"])
    moments.dtype = None if facts["dtype"] is None else getattr(torch, facts["dtype"])
    moments.documents = set(facts["documents"])
    moments.medians = facts["medians"]
    moments.margins = tuple(facts.get("margins", (0.0, float("inf"))))
    moments.reason_counts = torch.tensor(facts["reason_counts"], dtype=torch.int64)
    moments.left_out = {reason: torch.tensor(counts) for reason, counts in facts.get("left_out", {}).items()}
    for cell in facts["cells"]:
        moments.cells[cell["shard"], cell["stratum"]] = _read_cell(file, moments, cell, torch.device(device))
    return moments


def _facts(folder: Path) -> dict[str, Any]:
    file = folder / _FACTS
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no moments. Make them: moments_of(..., save={str(folder)!r}).")
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}. Run the pass again, to another folder.") from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise ValueError(f"{file} is not in the format {FORMAT!r}. Give a folder that moments_of(save=) wrote.")
    return facts


def _split(described: dict[str, Any]) -> DocumentShards:
    listed = None if described["listed"] is None else dict(map(tuple, described["listed"]))
    return DocumentShards(tuple(described["names"]), tuple(described["shares"]), listed, described["seed"])


def _cell_facts(shard: str, stratum: str, cell: MomentCell) -> dict[str, Any]:
    return {
        "shard": shard,
        "stratum": stratum,
        "most": cell.most,
        "waiting": cell.waiting,
        "documents": cell.documents,
        "positions": cell.positions,
        "unmatched": cell.unmatched,
        "products": None if cell.products is None else cell.products.count,
        "shuffled": None if cell.shuffled is None else cell.shuffled.count,
    }


def _tensors(moments: Moments) -> Iterator[tuple[str, Tensor]]:
    for (shard, stratum), cell in moments.cells.items():
        at = f"{shard}/{stratum}"
        if cell.waiting:
            yield f"{at}/rows", cell.rows[: cell.waiting]
        for kind, products in (("products", cell.products), ("shuffled", cell.shuffled)):
            if products is not None:
                yield from ((f"{at}/{kind}/{name}", tensor) for name, tensor in _parts(products))


def _parts(products: CrossProducts) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an accumulator, themselves."""
    yield "pilot", products.pilot
    yield "sums", products.sums
    for name, block in zip(products.pairs.names, products.blocks, strict=True):
        yield f"block/{name}", block
    for name, own in zip(products.pairs.names, products.own, strict=False):
        yield f"own/{name}", own


def _read_cell(file: Path, moments: Moments, facts: dict[str, Any], device: torch.device) -> MomentCell:
    at = f"{facts['shard']}/{facts['stratum']}"
    cell = MomentCell(moments.pairs, moments.chunk, facts["most"], moments.dtype, moments.is_shuffled)
    cell.waiting, cell.unmatched = facts["waiting"], facts["unmatched"]
    cell.documents, cell.positions = facts["documents"], facts["positions"]
    if cell.waiting:
        rows = torch.empty(cell.waiting, moments.pairs.columns, dtype=moments.dtype)
        read_rows(file, f"{at}/rows", rows)
        cell.rows = rows.to(device)
    for kind in ("products", "shuffled"):
        if facts[kind] is not None:
            pilot = torch.zeros(moments.pairs.columns, dtype=torch.float64)
            held = CrossProducts.empty(moments.pairs, pilot, is_shuffled=kind == "shuffled")
            held.count = facts[kind]
            for name, tensor in _parts(held):
                read_rows(file, f"{at}/{kind}/{name}", tensor)
            setattr(cell, kind, held if device.type == "cpu" else held.to(device))
    return cell

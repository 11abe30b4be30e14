"""Whether stores hold rows of one kind, so that one table of all of them means something.

Compared are the requests (weights, sites, dtypes), how texts were encoded and positions chosen, the columns of the row
tables and their types, and the texts themselves. Beware: positions given one by one, as spans or as functions compare
by their kind alone, token labels by their names.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow
import pyarrow.parquet

from microtome.capture.store_files import ShardRecord, table_file

# What may differ between parts: which texts they are, their labels, and how they are divided.
FREE = {"texts", "strings, positions and token labels", "labels", "shards"}
# Of how texts were encoded, what belongs to the texts and not to the way.
_OF_THE_TEXTS = {"kind", "n_texts", "n_truncated", "token_ids_sha256", "shapes"}
_ONE_EACH = {"ndarray": "list", "Tensor": "list", "Series": "list"}  # positions given one by one, as any of these


@dataclass(frozen=True)
class Part:
    """A whole store: its folder, manifest, and finished shards in order."""

    path: Path
    manifest: dict[str, Any]
    records: tuple[ShardRecord, ...]

    @property
    def captures(self) -> list[dict[str, Any]]:
        """Provenance of every capture in it: several where it was merged itself."""
        return list(_captures(self.manifest["provenance"]))


def require_alike(parts: Sequence[Part]) -> None:
    """Raise ValueError unless all come from one model in one way; edits, which cannot be compared, are refused."""
    first = parts[0]
    for part in parts:
        edited = part.manifest["request"].get("edited sites") or [
            site for capture in part.captures for site in capture.get("edits") or ()
        ]
        if edited:
            raise ValueError(
                f"{part.path} was captured with edits at {', '.join(map(str, edited))}. Edits are functions, which "
                "cannot be compared, so it is not merged. Capture all texts in one call."
            )
        asked, wanted = part.manifest["request"], first.manifest["request"]
        names = [name for name in wanted | asked if name not in FREE]
        differing = [name for name in names if asked.get(name) != wanted.get(name)]
        differing += [said for capture in part.captures for said in _differing(first.captures[0], capture)]
        for name, said in (("sites", "widths of sites"), ("unit", "unit")):
            if not differing and part.manifest.get(name) != first.manifest.get(name):
                differing = [said]
        if differing:
            of = f"{part.path} and {first.path}" if part is not first else f"The parts of {part.path}"
            what = ", ".join(dict.fromkeys(differing))
            raise ValueError(f"{of} differ in: {what}. Only stores of one kind can be merged.")


def _captures(provenance: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "parts" not in provenance:
        yield provenance
        return
    for part in provenance["parts"]:
        yield from _captures(part)


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Settings of two captures that differ, with both values."""
    settings, others = _settings(one), _settings(other)
    if not any((capture.get("texts") or {}).get("n_truncated") for capture in (one, other)):
        for name in ("truncate", "max_length"):  # of no effect
            settings.pop(name, None)
            others.pop(name, None)
    return [
        f"{name} ({others.get(name)!r:.40} and {settings.get(name)!r:.40})"
        for name in settings | others
        if settings.get(name) != others.get(name)
    ]


def _settings(capture: dict[str, Any]) -> dict[str, Any]:
    positions = capture.get("positions")
    encoding = capture.get("texts") or {}
    return {name: value for name, value in encoding.items() if name not in _OF_THE_TEXTS} | {
        "kind of texts": encoding.get("kind"),
        "positions": _ONE_EACH.get(positions, positions) if isinstance(positions, str) else positions,
        "include_special": capture.get("include_special", False),
        "token_labels": sorted(capture.get("token_labels") or ()),
        "generation": capture.get("generation"),
    }


def require_columns_alike(parts: Sequence[Part]) -> None:
    """Raise ValueError where a column of the row tables has types that no one column can hold.

    Numbers of all widths go together, and a column without values with any.
    """
    known: dict[str, tuple[pyarrow.DataType, Path]] = {}
    for part in parts:
        schemas = [pyarrow.parquet.read_schema(table_file(part.path, record.shard)) for record in part.records]
        for field in (field for schema in schemas for field in schema):
            held, path = known.get(field.name, (field.type, part.path))
            together = _together(held, field.type)
            if together is None:
                raise ValueError(
                    f"Column {field.name!r} holds {_called(held)} in {path} and {_called(field.type)} in {part.path}. "
                    "No one column holds both: capture one of them again with labels of the other's type."
                )
            known[field.name] = together, part.path if pyarrow.types.is_null(held) else path


def _together(one: pyarrow.DataType, other: pyarrow.DataType) -> pyarrow.DataType | None:
    """The type that holds values of both, as they are joined when a store is read; None if there is none."""
    schemas = [pyarrow.schema([("column", _wide(kind))]) for kind in (one, other)]
    try:
        return pyarrow.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pyarrow.ArrowTypeError, pyarrow.ArrowInvalid):
        return None


def _wide(kind: pyarrow.DataType) -> pyarrow.DataType:
    return pyarrow.dictionary(pyarrow.int32(), kind.value_type) if pyarrow.types.is_dictionary(kind) else kind


def _called(kind: pyarrow.DataType) -> str:
    return f"categories of {kind.value_type}" if pyarrow.types.is_dictionary(kind) else str(kind)


def require_new_texts(parts: Sequence[Part]) -> None:
    """Raise ValueError where a text of one part is in another too; twice within one part is that part's own matter.

    Texts are told by their strings or token ids; images and sounds, which have neither, by the hash of a capture.
    """
    seen: dict[bytes, Path] = {}
    for part in parts:
        texts = list(_texts(part))
        digests = [hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest() for name in texts]
        repeated = [(seen[digest], name) for digest, name in zip(digests, texts, strict=True) if digest in seen]
        if repeated:
            other, name = repeated[0]
            count = sum(path == other for path, _ in repeated)
            raise ValueError(
                f"{count} of {len(texts)} texts of {part.path} are in {other} too, such as {name!r:.80}: their rows "
                "would count twice. Name every store once, capture every text once, or, if that is meant, pass "
                "allow_repeated=True (--allow-repeated)."
            )
        for digest in digests:
            seen.setdefault(digest, part.path)


def _texts(part: Part) -> Iterator[str]:
    """What tells each text of which rows are kept from others, text by text."""
    files = [table_file(part.path, record.shard) for record in part.records]
    columns = set(pyarrow.parquet.read_schema(files[0]).names)
    if (name := next((name for name in ("string", "token_ids") if name in columns), None)) is None:
        yield from _leaves(part.manifest["request"]["strings, positions and token labels"])
        return
    for file in files:
        yield from pd.read_parquet(file, columns=["text", name]).drop_duplicates("text")[name].astype(str)


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for part in value:
            yield from _leaves(part)
    else:
        yield json.dumps(value)

"""Tensors as safetensors beside what is said of them as JSON: two files that know whether they belong together.

The JSON holds the format, the hash of the other file and whatever is said. It is written last and each file is replaced
whole or not at all, so that a kill leaves the old pair, or one that is refused.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from microtome.capture.fingerprint import file_fingerprint
from microtome.capture.safetensors_file import write_safetensors
from microtome.data.replaced_file import replaced_file


def write_described(
    file: Path,
    description: Path,
    tensors: Mapping[str, Tensor],
    said: Mapping[str, Any],
    *,
    number: int,
    allow_nan: bool = True,
) -> None:
    """Write both files; their folders are made.

    Args:
        file, description: the safetensors and the JSON file.
        number: of the format.
        allow_nan: whether what is said may hold NaN, which strict readers of JSON refuse.

    Raises:
        TypeError: something that JSON cannot hold, ValueError: NaN that may not be; before anything is written.
    """
    whole = {"format": number, **said}
    json.dumps(whole, allow_nan=allow_nan)
    for path in (file, description):
        path.parent.mkdir(parents=True, exist_ok=True)
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in held.items()}
    written = write_safetensors(file, layout, held.values())
    with replaced_file(description) as scratch:
        scratch.write_text(json.dumps(whole | {"digest": written.digest}, indent=1), encoding="utf-8")


def read_described(
    file: Path, description: Path, *, number: int, needs: Sequence[str] = (), again: str = "Write it again."
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors on the CPU, and what is said of them.

    Args:
        number: of the format that is read.
        needs: names of what has to be said.
        again: what to do where files are damaged.

    Raises:
        FileNotFoundError: one of the two is missing.
        ValueError: they are damaged, of another format, or do not belong together.
    """
    try:
        said = json.loads(description.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{description} is damaged: {error}. {again}") from error
    found = said.pop("format", None) if isinstance(said, dict) else None
    if found != number:
        raise ValueError(f"{description} has format {found!r}; this version reads {number}.")
    if missing := [name for name in (*needs, "digest") if name not in said]:
        raise ValueError(f"{description} is damaged: it lacks {', '.join(missing)}. {again}")
    if file_fingerprint(file) != said.pop("digest"):
        raise ValueError(f"{file} is damaged, or of another save than {description.name}. {again}")
    try:
        return load_file(file), said
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}). {again}") from error

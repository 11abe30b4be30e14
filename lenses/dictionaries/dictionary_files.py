"""Files of our own dictionaries: tensors as safetensors, the rest as JSON.

    <folder>/dictionary.safetensors   encoder, encoder_bias, decoder, decoder_bias, and threshold where there is one
    <folder>/dictionary.json          kind, site, k, ..., facts, and the hash of the first file; written last

Each is replaced whole or not at all; a pair that does not belong together is refused.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from microtome.capture.fingerprint import file_fingerprint
from microtome.capture.safetensors_file import write_safetensors
from microtome.data.replaced_file import replaced_file

TENSORS, FACTS = "dictionary.safetensors", "dictionary.json"
_FORMAT = 1


def write_folder(folder: Path, tensors: Mapping[str, Tensor], said: Mapping[str, Any]) -> Path:
    """Write both files; the folder is made. TypeError for a fact that JSON cannot hold, before any is written."""
    whole = {"format": _FORMAT, **said}
    json.dumps(whole, allow_nan=False)
    folder.mkdir(parents=True, exist_ok=True)
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in held.items()}
    written = write_safetensors(folder / TENSORS, layout, held.values())
    with replaced_file(folder / FACTS) as scratch:
        scratch.write_text(json.dumps(whole | {"digest": written.digest}, indent=1), encoding="utf-8")
    return folder


def read_folder(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of what `write_folder` wrote."""
    for name in (TENSORS, FACTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"there is no {folder / name}. Give a folder that Dictionary.save wrote.")
    try:
        said = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder / FACTS} is damaged ({error}). Write it again.") from error
    found = said.pop("format", None) if isinstance(said, dict) else None
    if found != _FORMAT:
        raise ValueError(f"{folder / FACTS} has format {found!r}; this version reads {_FORMAT}.")
    if file_fingerprint(folder / TENSORS) != said.pop("digest", None):
        raise ValueError(f"{folder / TENSORS} is damaged, or of another save than {FACTS}. Write it again.")
    try:
        return load_file(folder / TENSORS), said
    except SafetensorError as error:
        raise ValueError(f"{folder / TENSORS} is damaged ({error}). Write it again.") from error

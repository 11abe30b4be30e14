"""Files of our own dictionaries: tensors as safetensors, the rest as JSON.

    <folder>/dictionary.safetensors   encoder, encoder_bias, decoder, decoder_bias, and threshold where there is one
    <folder>/dictionary.json          kind, site, k, ..., facts, and the hash of the first file; written last

Each is replaced whole or not at all; a pair that does not belong together is refused.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from microtome.lenses.described_tensors import read_described, write_described

TENSORS, FACTS = "dictionary.safetensors", "dictionary.json"
_FORMAT = 1


def write_folder(folder: Path, tensors: Mapping[str, Tensor], said: Mapping[str, Any]) -> Path:
    """Write both files; the folder is made. TypeError for a fact that JSON cannot hold, before any is written."""
    write_described(folder / TENSORS, folder / FACTS, tensors, said, number=_FORMAT, allow_nan=False)
    return folder


def read_folder(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of what `write_folder` wrote."""
    for name in (TENSORS, FACTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"there is no {folder / name}. Give a folder that Dictionary.save wrote.")
    return read_described(folder / TENSORS, folder / FACTS, number=_FORMAT)

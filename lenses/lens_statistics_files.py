"""Statistics of lenses as one safetensors file each, for runs that go on where they stopped."""

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from microtome.data.replaced_file import replaced_file
from microtome.lenses.lens_statistics import LensStatistics


def write_statistics(path: Path, found: LensStatistics) -> None:
    """Write whole or not at all; the folder exists."""
    held = {field.name: getattr(found, field.name) for field in fields(found)}
    arrays = {name: np.ascontiguousarray(value) for name, value in held.items() if isinstance(value, np.ndarray)}
    plain = {name: value for name, value in held.items() if not isinstance(value, np.ndarray)}
    with replaced_file(path) as scratch:
        save_file(arrays, scratch, metadata={"plain": json.dumps(plain, default=str)})


def read_statistics(path: Path) -> LensStatistics:
    """Read what `write_statistics` wrote. ValueError for a damaged file."""
    try:
        with safe_open(path, framework="np") as file:
            plain = json.loads(file.metadata()["plain"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}). Remove it; it is made again.") from error
    plain |= {"sites": tuple(plain["sites"]), "named": tuple(plain["named"])}
    return LensStatistics(**(plain | arrays))

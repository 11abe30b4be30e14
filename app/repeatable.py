"""Settings of a run as they are kept and compared: places that mean the same wherever they are read, and contents."""

import os
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from microtome.capture.fingerprint import file_fingerprint
from microtome.data.catalogue import DATA_SETS

Settings = TypeVar("Settings", bound=BaseModel)


def repeatable(config: Settings, *places: str) -> Settings:
    """The settings with absolute paths. places: fields that hold a path, or none; `data`, if there is such a field,
    is a path where it names no data set."""
    absolute: dict[str, Any] = {}
    for name in places:
        path = getattr(config, name)
        if path is not None:
            absolute[name] = Path(os.path.abspath(path.expanduser()))
    data = getattr(config, "data", None)
    if data is not None and data not in DATA_SETS:
        absolute["data"] = str(Path(data).expanduser().absolute())
    return config.model_copy(update=absolute)


def contents_of(path: Path | None) -> str | list[str] | None:
    """Fingerprint of a file; of a folder, of each file in it with its name; None where there is no path."""
    if path is None:
        return None
    path = path.expanduser()
    if path.is_file():
        return file_fingerprint(path)
    return [f"{file.name} {file_fingerprint(file)}" for file in sorted(path.iterdir()) if file.is_file()]

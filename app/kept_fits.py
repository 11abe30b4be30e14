"""A run that takes long: made once, by one process, and gone on with after it was stopped.

What is kept of a stopped run (`RunFolder.kept`) goes on with the same settings and weights, and is refused to others.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from microtome.app.run_folder import RunFolder
from microtome.capture.models import LoadedModel
from microtome.data.replaced_file import replaced_file

Made = TypeVar("Made")


def made_once(
    folder: RunFolder,
    settings: dict,
    load: Callable[[], LoadedModel],
    make: Callable[[LoadedModel], Made],
    read: Callable[[LoadedModel], Made],
    say: Callable[[str], Any],
) -> Made:
    """The run that is there, or the one that is made now.

    Args:
        settings: what makes two runs the same but the model's weights.
        load: gives the model, once it is known that the name is free or the run there.
        make, read: make the run, and read the one that is finished.
        say: is told if it was finished already.

    Raises FileExistsError for another run of that name, BlockingIOError for one that another process makes.
    """
    if not folder.is_finished:
        folder.require_free()
    model = load()
    if folder.is_finished:
        found = read(model)
        say(f"{folder.path.name} is finished already.")
        return found
    with folder.alone():
        if folder.is_finished:  # by a process that was at it a moment ago
            return read(model)
        _require_same_fits(folder.kept, settings | {"weights": model.provenance.weight_sha256})
        try:
            return make(model)
        finally:
            _remove_unused(folder.kept)


def kept_table(folder: Path, name: str, make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    """A table that is made once, and read from the folder after that."""
    file = folder / f"{name}.parquet"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        table = make()
        with replaced_file(file) as scratch:
            table.to_parquet(scratch)
    return pd.read_parquet(file)


def _require_same_fits(kept: Path, settings: dict) -> None:
    """Fits of an interrupted run are gone on with, those of other settings refused."""
    kept.mkdir(parents=True, exist_ok=True)
    file = kept / "settings.json"
    if file.is_file():
        held = json.loads(file.read_text(encoding="utf-8"))
        if held != settings:
            raise FileExistsError(
                f"{kept} holds a stopped run of that name with other settings, texts or weights. Give this run another "
                "name (--name), or remove that folder."
            )
        return
    with replaced_file(file) as scratch:
        scratch.write_text(json.dumps(settings), encoding="utf-8")


def _remove_unused(kept: Path) -> None:
    """A folder of fits that holds nothing but its settings, as a mistake in them leaves it."""
    if not any(file.name != "settings.json" for file in kept.rglob("*") if file.is_file()):
        shutil.rmtree(kept, ignore_errors=True)

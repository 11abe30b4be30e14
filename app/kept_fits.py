"""What is kept of a stopped run (`RunFolder.kept`): of the same settings gone on with, of others refused."""

import json
import shutil
from pathlib import Path

from microtome.data.replaced_file import replaced_file


def require_same_fits(kept: Path, settings: dict) -> None:
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


def remove_unused(kept: Path) -> None:
    """A folder of fits that holds nothing but its settings, as a mistake in them leaves it."""
    if not any(file.name != "settings.json" for file in kept.rglob("*") if file.is_file()):
        shutil.rmtree(kept, ignore_errors=True)

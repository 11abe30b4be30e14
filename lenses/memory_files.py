"""The state of a pass for trigger examples on disk: one safetensors file, replaced whole, with its settings inside.

Settings, texts and model are part of the file, so that a pass goes on only where it stopped.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from microtome.data.replaced_file import replaced_file

FILE = "triggers.safetensors"


def write_triggers(
    folder: Path, state: dict[str, Tensor], settings: dict[str, Any], next_batch: int, tokens: int
) -> None:
    """Write the state after a batch."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"settings": settings, "next_batch": next_batch, "tokens": tokens}
    with replaced_file(folder / FILE) as scratch:
        save_file({name: value.contiguous() for name, value in state.items()}, scratch, {"facts": _json(facts)})


def read_triggers(folder: Path, settings: dict[str, Any]) -> tuple[dict[str, Tensor], int, int] | None:
    """State, number of the next batch, tokens so far; None where there is no file.

    Raises:
        ValueError: the file is of other texts, another model or other settings.
    """
    if not (path := folder / FILE).exists():
        return None
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["facts"])
        if other := [
            name for name, value in json.loads(_json(settings)).items() if facts["settings"].get(name) != value
        ]:
            raise ValueError(
                f"{path} is of a pass with other {', '.join(other)}. Give another folder, or delete it to begin anew."
            )
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    return state, facts["next_batch"], facts["tokens"]


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)

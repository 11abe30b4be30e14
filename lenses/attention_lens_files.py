"""Attention lenses and the state of their training on disk: one safetensors file each, its facts in the header.

A file is written beside its place, brought to the disk and renamed, so after a kill the last whole one is there. One
file holds tensors and facts together: there is no pair that could come apart.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from microtome.data.replaced_file import replaced_file
from microtome.lenses.attention_lens import AttentionLens

_FORMAT = 1
_LENS, _STATE = "attention lens", "attention lens training"


def save_attention_lens(lens: AttentionLens, path: str | Path) -> Path:
    """Write a lens to `path` (a .safetensors file; its folder is made).

    Raises:
        ValueError: another ending.
        TypeError: a fact that JSON cannot hold.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"{path.name} does not end in .safetensors.")
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"layer": lens.layer, "mode": lens.mode, "facts": dict(lens.facts)}
    tensors = {name: getattr(lens, name) for name in ("weight", "bias", "mean", "peer_r2", "log_mean_p")}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    write_facts_file(path, _LENS, tensors, facts)
    return path


def load_attention_lens(path: str | Path) -> AttentionLens:
    """Read what `save_attention_lens` wrote, on the CPU.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a damaged file, or another kind of file.
    """
    tensors, facts = read_facts_file(Path(path), _LENS)
    return AttentionLens(facts["layer"], facts["mode"], **tensors, facts=facts["facts"])


def save_training_state(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write what training goes on from."""
    write_facts_file(path, _STATE, tensors, facts)


def load_training_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """What training goes on from; None where there is nothing yet.

    Raises:
        ValueError: a damaged file, or another kind of file.
    """
    return read_facts_file(path, _STATE) if path.exists() else None


def write_facts_file(path: Path, kind: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Tensors and JSON facts as one file, whole or not at all."""
    # one entry: the library writes several in an order that changes from process to process
    header = {"microtome": json.dumps({"format": _FORMAT, "kind": kind, "facts": facts})}
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replaced_file(path) as scratch:
        save_file(kept, scratch, metadata=header)


def read_facts_file(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_facts_file` wrote."""
    if not path.exists():
        raise FileNotFoundError(f"no file {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("microtome", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}). Delete it and run again.") from error
    if header.get("kind") != kind or header.get("format") != _FORMAT:
        found = f"kind {header.get('kind')!r}, format {header.get('format')!r}"
        raise ValueError(f"{path} has {found}; expected {kind!r}, format {_FORMAT}.")
    return tensors, header["facts"]

"""Control vectors of other tools: the GGUF layout that llama.cpp and repeng share.

    general.architecture          "controlvector"
    controlvector.model_hint      the model's architecture
    controlvector.layer_count     number of vectors
    direction.N                   float32 [d]: added to the output of block N, counted from 0; block 0 has none

There is no place for operation, sign, norm or model in it, so that those are asked for when a file is read.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, GGUFWriter

from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.data.replaced_file import replaced_file
from microtome.interventions.artefact import Artefact, made_on
from microtome.interventions.positions import Positions
from microtome.interventions.steering import anatomy_of

ARCHITECTURE = "controlvector"


def write_control_vector(artefact: Artefact, path: str | Path, *, model_hint: str, strength: float = 1.0) -> None:
    """Write an additive artefact of resid_post sites; vectors are multiplied by strength.

    Raises:
        ValueError: another operation or site, heads, block 0 (which the layout has no place for).
    """
    sites = [Site.parse(site) for site in artefact.sites]
    if artefact.operation != "add" or any(site.kind != "resid_post" for site in sites) or artefact.options:
        raise ValueError(f"{artefact}: the layout is of vectors added to resid_post.")
    if any(site.layer == 0 for site in sites):
        raise ValueError("The layout has no vector of block 0. Leave resid_post.0 out: artefact.only([...]).")
    with replaced_file(Path(path).expanduser()) as scratch:
        writer = GGUFWriter(str(scratch), ARCHITECTURE)
        writer.add_string(f"{ARCHITECTURE}.model_hint", model_hint)
        writer.add_uint32(f"{ARCHITECTURE}.layer_count", len(sites))
        for site, vector in zip(sites, artefact.tensors["vector"], strict=True):
            writer.add_tensor(f"direction.{site.layer}", (strength * vector).numpy().astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def read_control_vector(
    path: str | Path,
    model: LoadedModel,
    *,
    method: str = "control vector",
    names: tuple[str, str] = ("positive", "negative"),
    positions: Positions = "all",
    facts: Mapping[str, Any] | None = None,
) -> Artefact:
    """An additive artefact at resid_post of every layer the file has.

    Args:
        model: that it is for; the file names an architecture at most.
        names, positions: which the file does not say.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no control vector, a damaged file, layers or widths of another model.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        reader = GGUFReader(str(path))
        architecture = _text(reader, "general.architecture")
        hint = _text(reader, f"{ARCHITECTURE}.model_hint")
        tensors = {tensor.name: np.array(tensor.data, dtype=np.float32).reshape(-1) for tensor in reader.tensors}
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise ValueError(f"{path} is damaged, or no GGUF file: {error}.") from error
    if architecture != ARCHITECTURE:
        raise ValueError(f"{path} is a GGUF file of {architecture!r}, not of {ARCHITECTURE!r}.")
    layers = _layers(path, list(tensors))
    if broken := [layer for layer in layers if not np.isfinite(tensors[f"direction.{layer}"]).all()]:
        raise ValueError(f"{path}: direction.{broken[0]} holds NaN or infinity.")
    anatomy = anatomy_of(model)
    if layers[-1] >= anatomy.layers:
        raise ValueError(f"{path} has a vector of block {layers[-1]}; this model has blocks 0 to {anatomy.layers - 1}.")
    widths = {len(tensors[f"direction.{layer}"]) for layer in layers}
    if widths != {anatomy.d_model}:
        raise ValueError(f"{path} has vectors of {sorted(widths)} channels; this model has {anatomy.d_model}.")
    return Artefact(
        "add",
        tuple(f"resid_post.{layer}" for layer in layers),
        {"vector": torch.from_numpy(np.stack([tensors[f"direction.{layer}"] for layer in layers]))},
        method=method,
        positive=names[0],
        negative=names[1],
        extraction="unknown",
        positions=positions,
        facts=made_on(model, model_hint=hint, file=path.name, **dict(facts or {})),
    )


def _layers(path: Path, names: Sequence[str]) -> list[int]:
    """Numbers of the blocks. Raises ValueError for no direction, or a name that is none of `direction.1` and on."""
    held = [name for name in names if name.startswith("direction.")]
    if not held:
        raise ValueError(f"{path} holds no direction.")
    numbers = [name.removeprefix("direction.") for name in held]
    if wrong := [
        name for name, number in zip(held, numbers, strict=True) if not number.isdecimal() or number[0] == "0"
    ]:
        raise ValueError(f"{path} has a tensor {wrong[0]!r}; expected direction.N, N from 1 on.")
    return sorted(map(int, numbers))


def _text(reader: GGUFReader, name: str) -> str | None:
    field = reader.fields.get(name)
    return None if field is None else bytes(field.parts[-1]).decode("utf-8")

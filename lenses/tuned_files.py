"""Files of tuned lenses: ours (safetensors and JSON), and those that the authors' package publishes.

    <folder>/translators.safetensors   weight [depth, d_model, d_model] (row vectors: r A), bias [depth, d_model]
    <folder>/tuned_lens.json           sites, history, facts, and the hash of the first file; written last

A published artefact (tuned-lens 0.2, `TunedLens.save`): `config.json` with base_model_name_or_path, d_model,
num_hidden_layers, bias, lens_type, and `params.pt`, the state of a list of linear layers, "0.weight" `[out, in]`,
"0.bias", ...; layer l turns r_l into r_l + r_l W_l^T + b_l, so that A_l is the transpose. Format read in
AlignmentResearch/tuned-lens, tuned_lens/nn/lenses.py.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from microtome.lenses.described_tensors import read_described, write_described

TENSORS, FACTS = "translators.safetensors", "tuned_lens.json"
_FORMAT = 1


def write_folder(
    folder: Path,
    sites: tuple[str, ...],
    weight: Float[Tensor, "depth d_model d_model"],
    bias: Float[Tensor, "depth d_model"],
    history: dict[str, list],
    facts: dict[str, Any],
) -> Path:
    """Write both files; the folder is made. TypeError for a fact that JSON cannot hold, before any is written."""
    said = {"sites": list(sites), "history": history, "facts": facts}
    tensors = {"weight": weight, "bias": bias}
    write_described(folder / TENSORS, folder / FACTS, tensors, said, number=_FORMAT, allow_nan=False)
    return folder


def read_folder(folder: Path) -> tuple[tuple[str, ...], Tensor, Tensor, dict, dict]:
    """sites, weight, bias, history, facts of what `write_folder` wrote."""
    for name in (TENSORS, FACTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"there is no {folder / name}. Give a folder that TunedLens.save wrote.")
    tensors, said = read_described(folder / TENSORS, folder / FACTS, number=_FORMAT, again="Train the lens again.")
    return tuple(said["sites"]), tensors["weight"], tensors["bias"], said["history"], said["facts"]


def read_published_folder(folder: Path) -> tuple[tuple[str, ...], Tensor, Tensor, dict]:
    """sites, weight, bias, facts of a published artefact; nothing of the file is executed."""
    for name in ("config.json", "params.pt"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"there is no {folder / name}. Give a folder of the tuned-lens package.")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = config.get("lens_type", "linear_tuned_lens")
    if kind != "linear_tuned_lens":
        raise ValueError(f"{folder} holds a lens of type {kind!r}; this reads 'linear_tuned_lens'.")
    try:
        state = torch.load(folder / "params.pt", map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{folder / 'params.pt'} cannot be read as tensors: {error}") from error
    layers, width = int(config["num_hidden_layers"]), int(config["d_model"])
    expected = {f"{n}.weight": (width, width) for n in range(layers)}
    if config.get("bias", True):
        expected |= {f"{n}.bias": (width,) for n in range(layers)}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if found != expected:
        strange = sorted(set(found.items()) ^ set(expected.items()))[:2]
        raise ValueError(f"{folder / 'params.pt'} does not fit its config of {layers} layers: {strange}.")
    weight = torch.stack([state[f"{n}.weight"].float().T for n in range(layers)])
    bias = torch.stack([state.get(f"{n}.bias", torch.zeros(width)).float() for n in range(layers)])
    sites = ("resid_pre.0", *(f"resid_post.{n}" for n in range(layers - 1)))
    facts = {"model": config.get("base_model_name_or_path"), "layers": layers, "published": config}
    return sites, weight, bias, facts

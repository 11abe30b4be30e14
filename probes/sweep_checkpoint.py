"""Finished blocks of a sweep, kept in a folder, so that a sweep that was killed goes on instead of starting anew.

    <folder>/fits-<key>.safetensors   fits of some sites      null-<key>.safetensors   ridge AUROC of a block

The key is a SHA-256 over everything that the numbers follow from: labels, shuffles, folds, strengths, the names and the
values of the sites, and the versions of what computes them. What was kept for anything else is never read, and a sweep
that went on is, in every bit, the sweep that was not interrupted. Delete the folder when the sweep is done.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float64
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from microtome.data.provenance import environment
from microtome.data.replaced_file import replaced_file
from microtome.probes.nested_fit import NestedFit

_VERSIONED = ("torch", "numpy", "microtome")


@dataclass(frozen=True)
class SweepCheckpoint:
    """Where finished blocks are kept; nowhere if `folder` is None. key: hash of all but the sites."""

    folder: Path | None
    key: str

    @classmethod
    def of(cls, folder: str | Path | None, arrays: Sequence[np.ndarray], settings: dict) -> "SweepCheckpoint":
        """A checkpoint for a sweep with these labels, shuffles and masks. Makes the folder."""
        if folder is None:
            return cls(None, "")
        facts = environment()
        versions = {name: facts["packages"].get(name) for name in _VERSIONED}
        digest = hashlib.sha256(json.dumps([settings, versions, facts["commit"]], sort_keys=True).encode())
        for array in arrays:
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, digest.hexdigest())

    def fits(
        self, names: Sequence[str], chunks: Iterable[Float[Tensor, "site some feature"]], fit: Callable
    ) -> list[NestedFit]:
        """The fits of these sites, whose rows are the chunks: read, or made by `fit` and kept."""
        if self.folder is None:
            return fit()
        file = self._file("fits", names, chunks)
        held = _read(file)
        if held is None:
            fits = fit()
            _write(file, {name: torch.stack([_as_tensor(getattr(f, name)) for f in fits]) for name in _FIELDS})
            return fits
        return [
            NestedFit(**{name: _as_held(name, values[number]) for name, values in held.items()})
            for number in range(len(names))
        ]

    def statistics(
        self,
        names: Sequence[str],
        chunks: Iterable[Float[Tensor, "site some feature"]],
        compute: Callable[[], Float64[Tensor, "site labelling"]],
    ) -> Float64[Tensor, "site labelling"]:
        """The ridge statistics of these sites: read, or made by `compute` and kept."""
        if self.folder is None:
            return compute()
        file = self._file("null", names, chunks)
        held = _read(file)
        if held is None:
            held = {"statistics": compute()}
            _write(file, held)
        return held["statistics"]

    def _file(self, kind: str, names: Sequence[str], chunks: Iterable[Tensor]) -> Path:
        digest = hashlib.sha256(f"{self.key} {json.dumps(list(names))}".encode())
        for chunk in chunks:
            digest.update(f"{chunk.dtype} {chunk.shape}".encode())
            for site in chunk:
                digest.update(site.contiguous().view(torch.uint8).numpy())
        return self.folder / f"{kind}-{digest.hexdigest()[:32]}.safetensors"


_FIELDS = ("scores", "inner_loss", "fold_strengths", "strength", "coefficients", "intercept")


def _as_tensor(value: Tensor | float) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _as_held(name: str, value: Tensor) -> Tensor | float:
    return value.item() if name == "strength" else value


def _read(file: Path) -> dict[str, Tensor] | None:
    try:
        return load_file(file)
    except FileNotFoundError:
        return None
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}). Delete it: what it holds is computed again.") from error


def _write(file: Path, tensors: dict[str, Tensor]) -> None:
    with replaced_file(file) as scratch:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, scratch)

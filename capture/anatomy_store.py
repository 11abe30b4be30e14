"""Anatomies kept on disk, so that a model of a known make is not dissected again in every process.

What a model is made of follows from its code and configuration, not from its weights, so the key is a hash of both: the
classes, paths and plain attributes of all modules, names, shapes, types and devices of parameters and buffers, the
configuration, the attention setting, the versions of torch and transformers, and the source of this package and of
classes from elsewhere. A model with hooks or forwards of its own on a module has no key. An anatomy from the store is
used only after the cheap identities (fires, chain, sum, not empty, tail, null edit, seam parity) held again here.
"""

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from microtome.capture.anatomy import Anatomy, Block, Contribution, HeadColumns, Hop, Identity, Point, Tap
from microtome.capture.batches import PaddingRecipe
from microtome.capture.hashes import text_sha256, write_atomically
from microtome.capture.hooks import HOOKS
from microtome.capture.sites import Site
from microtome.capture.tail import Tail
from microtome.data.registry import cache_folder

_CLASSES = {
    c.__name__: c
    for c in (Anatomy, Block, Contribution, HeadColumns, Hop, Identity, PaddingRecipe, Point, Site, Tail, Tap)
}
_VERSIONED = ("torch", "transformers", "microtome")  # their versions or sources are in every key


def anatomy_key(model: nn.Module, inputs: Mapping[str, Any] | None) -> str | None:
    """The hash under which a model's anatomy is kept; None for a model whose forward cannot be told from its make."""
    modules = []
    sources: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        foreign = [h for held in (module._forward_hooks, module._forward_pre_hooks) for h in held.values()]
        if "forward" in vars(module) or any(hook not in HOOKS for hook in foreign):
            return None
        kind = type(module)
        if kind.__module__.partition(".")[0] not in _VERSIONED:
            if (source := _source_sha256(kind)) is None:
                return None
            sources[f"{kind.__module__}.{kind.__qualname__}"] = source
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str)) and k != "training"}
        modules.append([path, kind.__module__, kind.__qualname__, sorted(plain.items())])
    tensors = [
        [name, tuple(tensor.shape), str(tensor.dtype), tensor.device.type]
        for held in (model.named_parameters(), model.named_buffers())
        for name, tensor in held
    ]
    config = getattr(model, "config", None)
    attention = getattr(config, "_attn_implementation", None)
    described = {
        "modules": modules,
        "sources": sources,
        "tensors": tensors,
        "config": config.to_dict() if hasattr(config, "to_dict") else repr(config),
        "attention": str(getattr(attention, "beside", attention)),
        "inputs": None if inputs is None else {k: str(getattr(v, "dtype", v)) for k, v in inputs.items()},
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "microtome": _own_sha256(),
    }
    return text_sha256(json.dumps(described, sort_keys=True, default=str))[:32]


def kept(key: str) -> tuple[Anatomy, Tail] | None:
    """The anatomy and tail under a key; None if there are none, or they cannot be read."""
    try:
        anatomy, tail = _made(json.loads(_file(key).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (anatomy, tail) if isinstance(anatomy, Anatomy) and isinstance(tail, Tail) else None


def keep(key: str, anatomy: Anatomy, tail: Tail) -> None:
    """Write an anatomy and its tail; a folder that cannot be written to is no error, the next process proves again."""
    try:
        write_atomically(_file(key), json.dumps(_plain((anatomy, tail))))
    except OSError:
        return


def _file(key: str) -> Path:
    return cache_folder("anatomies") / f"{key}.json"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"": type(value).__name__} | {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return [[_plain(k), _plain(v)] for k, v in value.items()]
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value


def _made(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_made(v) for v in value)
    if not isinstance(value, dict):
        return value
    fields = {name: _made(v) for name, v in value.items() if name}
    kind = _CLASSES[value[""]]
    if kind is HeadColumns:
        fields["columns"] = torch.tensor(value["columns"])
    if kind is Anatomy:
        fields |= {name: dict(fields[name]) for name in ("taps", "unavailable", "padding_errors")}
    return kind(**fields)


@cache
def _own_sha256() -> str:
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@cache
def _source_sha256(kind: type) -> str | None:
    """Hash of the source of a class and its bases that are not in torch or transformers; None where it has none."""
    known = (*_VERSIONED, "builtins", "abc", "typing")
    bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in known]
    try:
        files = {inspect.getsourcefile(base) or "" for base in bases}
        return text_sha256("".join(Path(file).read_text(encoding="utf-8") for file in sorted(files)))
    except (OSError, TypeError, ValueError):
        return None

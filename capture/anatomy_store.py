"""Anatomies kept on disk, so that a model of a known make is not dissected again in every process.

What a model is made of follows from its code and configuration, not from its weights, so the key is a hash of both: the
classes, paths and plain attributes of all modules, names, shapes, types and devices of parameters and buffers, values
of whole-number buffers, the configuration, the attention setting, the versions of the packages, the source of this one,
and the compiled code of every function in the files of the model's classes as it is in this process. Only models made
of classes of torch, transformers and PEFT have a key, and only without hooks or forwards of their own on a module.

An anatomy is kept only if every identity held and no weight matrix is constant, so that nothing is refused to others
for the sake of one checkpoint; it is used only after the cheap identities (fires, chain, sum, not empty, tail, null
edit, seam parity) held again here.
"""

import dataclasses
import hashlib
import inspect
import json
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from microtome.capture.anatomy import Anatomy, Block, Contribution, HeadColumns, Hop, Identity, Point, Tap
from microtome.capture.batches import PaddingRecipe
from microtome.capture.hashes import text_sha256, write_atomically
from microtome.capture.hooks import HOOKS
from microtome.capture.running_model import is_plain, plain
from microtome.capture.sites import Site
from microtome.capture.tail import Tail
from microtome.data.registry import cache_folder

_CLASSES = {
    c.__name__: c
    for c in (Anatomy, Block, Contribution, HeadColumns, Hop, Identity, PaddingRecipe, Point, Site, Tail, Tap)
}
_VERSIONED = ("torch", "transformers", "peft", "microtome")  # their versions or sources are in every key
_STANDARD = ("builtins", "abc", "typing")


def anatomy_key(model: nn.Module, inputs: Mapping[str, Any] | None) -> str | None:
    """The hash under which a model's anatomy is kept; None for a model whose forward cannot be told from its make."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return None
    modules, files = [], set()
    for path, module in model.named_modules(remove_duplicate=False):
        foreign = [h for held in (module._forward_hooks, module._forward_pre_hooks) for h in held.values()]
        kinds = {base for base in type(module).__mro__ if base is not object}
        if "forward" in vars(module) or any(hook not in HOOKS for hook in foreign):
            return None
        if any(callable(v) and hasattr(v, "__code__") for k, v in vars(module).items() if hasattr(type(module), k)):
            return None  # a method replaced on the module itself
        if not all(base.__module__.partition(".")[0] in (*_VERSIONED, *_STANDARD) for base in kinds):
            return None
        files |= {base.__module__ for base in kinds if base.__module__.startswith("transformers.models")}
        kind = type(module)
        facts = sorted((k, repr(v)) for k, v in plain(module).items())
        modules.append([path, kind.__module__, kind.__qualname__, facts])
    tensors = [
        [name, tuple(tensor.shape), str(tensor.dtype), tensor.device.type]
        for held in (model.named_parameters(), model.named_buffers())
        for name, tensor in held
    ]
    whole = [[name, b.tolist()] for name, b in model.named_buffers() if not b.is_floating_point() and not b.is_meta]
    config = getattr(model, "config", None)
    attention = getattr(config, "_attn_implementation", None)
    described = {
        "modules": modules,
        "code": {file: _code_sha256(file) for file in sorted(files)},
        "tensors": tensors,
        "whole numbers": whole,
        "config": {k: v for k, v in config.to_dict().items() if k != "_name_or_path"}
        if hasattr(config, "to_dict")
        else repr(config),
        "attention": str(getattr(attention, "beside", attention)),
        "inputs": None if inputs is None else {k: str(getattr(v, "dtype", v)) for k, v in inputs.items()},
        "versions": [[name, version(name)] for name in _VERSIONED if name in sys.modules and name != "microtome"],
        "microtome": _own_sha256(),
    }
    return text_sha256(json.dumps(described, sort_keys=True, default=str))[:32]


def kept(key: str) -> tuple[Anatomy, Tail] | None:
    """The anatomy and tail under a key; None if there are none, or the file is not what was written."""
    try:
        digest, _, text = _file(key).read_text(encoding="utf-8").partition("\n")
    except (OSError, ValueError):
        return None
    return _made(json.loads(text)) if digest == text_sha256(text) else None


def keep(key: str, model: nn.Module, anatomy: Anatomy, tail: Tail) -> None:
    """Write an anatomy and its tail if they hold for every model of this make.

    A folder that cannot be written to is no error: the next process proves again.
    """
    is_degenerate = any(p.ndim > 1 and not p.is_meta and bool((p == p.flatten()[0]).all()) for p in model.parameters())
    if is_degenerate or not all(identity.holds for identity in anatomy.proof):
        return
    text = json.dumps(_plain((anatomy, tail)))
    try:
        write_atomically(_file(key), f"{text_sha256(text)}\n{text}")
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


def _code_sha256(file: str) -> str:
    """Hash of all functions and methods that an imported file holds now, replaced ones included."""
    digest = hashlib.sha256()
    for name, value in sorted(vars(sys.modules[file]).items()):
        owned = vars(value).items() if isinstance(value, type) and value.__module__ == file else [(name, value)]
        for own, held in sorted(owned):
            function = getattr(held, "__func__", getattr(held, "fget", held))
            for layer in (function, inspect.unwrap(function) if callable(function) else None):
                if isinstance(code := getattr(layer, "__code__", None), CodeType):
                    digest.update(f"{name}.{own} {_described(code)}".encode())
            if is_plain(held) and not own.startswith("__"):
                digest.update(f"{name}.{own}={held!r}".encode())
    return digest.hexdigest()


def _described(code: CodeType) -> str:
    constants = [
        _described(c) if isinstance(c, CodeType) else sorted(map(repr, c)) if isinstance(c, frozenset) else repr(c)
        for c in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"

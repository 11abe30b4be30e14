"""What a model computes with at this moment, as hashes: two captures may share a store only if these are the same.

The hash of a checkpoint's file, which provenance has, does not see weights that were edited, cast or trained since, a
number in the configuration that was changed in place, or a hook that somebody registered. This does. Beware: of hooks
and replaced methods only the names can be compared, not what they do.
"""

import json
from typing import Any

import torch
from torch import Tensor, nn

from microtome.capture.fingerprint import new_fingerprint, tensor_bytes
from microtome.capture.hashes import text_sha256
from microtome.capture.hooks import HOOKS

_NOT_ITS_MAKE = {*vars(nn.Module()), "name_or_path"}  # torch's own book-keeping, hooks included, and where it lies
# what only says how or with which version the same is computed: those are facts of the environment
_OF_CONFIG = {"_name_or_path", "_attn_implementation", "attn_implementation", "transformers_version"}


def running_model(model: nn.Module) -> dict[str, str]:
    """Hashes of its tensors (`weights`), of its classes, numbers and configuration (`settings`), and names of foreign
    hooks and replaced methods (`hooks`). Reads every weight once, at the speed of memory."""
    config = getattr(model, "config", None)
    settings = config.to_dict() if hasattr(config, "to_dict") else {"config": repr(config)}
    make = [
        [path, str(type(module)), sorted((k, repr(v)) for k, v in plain(module).items())]
        for path, module in model.named_modules()
    ]
    described = [{k: v for k, v in settings.items() if k not in _OF_CONFIG}, make]
    return {
        "weights": _tensors(model),
        "settings": text_sha256(json.dumps(described, sort_keys=True, default=str)),
        "hooks": ", ".join(_foreign(model)),
    }


def plain(module: nn.Module) -> dict[str, Any]:
    """A module's own attributes that are numbers, strings and the like: eps, scaling, flags."""
    return {k: v for k, v in vars(module).items() if k not in _NOT_ITS_MAKE and is_plain(v)}


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a string, None, a type, or lists and dicts of such."""
    if isinstance(value, tuple | list):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(is_plain(k) and is_plain(v) for k, v in value.items())
    return value is None or isinstance(value, bool | int | float | str | torch.dtype | type)


def _tensors(model: nn.Module) -> str:
    """Over name, dtype, shape and bytes of parameters and buffers, those that no checkpoint holds included."""
    digest = new_fingerprint()
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()], key=lambda item: item[0]):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if not tensor.is_meta:  # offloaded: its bytes are with the hooks that bring it
            digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    values = tensor.detach().cpu()
    if type(values) is not Tensor:  # a quantised weight of a class of its own
        return memoryview(repr((type(values).__name__, values)).encode())
    return tensor_bytes(values)


def _foreign(model: nn.Module) -> list[str]:
    names = []
    for path, module in model.named_modules():
        held = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        names += [f"{path} {_name(hook)}" for hook in held if hook not in HOOKS]
        own = (k for k, v in vars(module).items() if hasattr(v, "__code__") and hasattr(type(module), k))
        names += [f"{path}.{name}" for name in own]
    return sorted(names)


def _name(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)

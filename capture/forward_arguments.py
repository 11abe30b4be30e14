"""What a model's forward takes, and where its inputs belong, also when others have wrapped the model.

Wrappers (adapters, data parallel, offloading) often declare `*args, **kwargs` and hand them on to the only child that
can be called.
"""

import inspect

import torch
from torch import nn


def accepted_arguments(model: nn.Module) -> set[str]:
    """Names of a forward's parameters; a wrapper of one module that takes `**kwargs` takes that module's as well."""
    parameters = inspect.signature(model.forward).parameters
    hands_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    children = [child for child in model.children() if type(child).forward is not nn.Module.forward]  # no containers
    return set(parameters) | (accepted_arguments(children[0]) if hands_on and len(children) == 1 else set())


def takes_any_keyword(model: nn.Module) -> bool:
    """Whether a forward takes keywords that it does not name."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())


def input_device(model: nn.Module) -> torch.device:
    """The device on which inputs are expected: of the first parameter that holds data, or the one that offloading
    (accelerate's hooks) names, or the CPU."""
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    named = next((d for h in hooks if (d := getattr(h, "execution_device", None)) is not None), None)
    if named is not None:
        return torch.device(named)
    held = (p.device for p in model.parameters() if not p.is_meta)
    return next(held, torch.device("cpu"))

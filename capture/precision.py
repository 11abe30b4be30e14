"""How exactly a model computes, for the limits within which its identities can hold.

"full" is float32 and float64, "half" has parameters in float16 or bfloat16, "quantised" has linear maps that round
their inputs (dynamic int8). Quantised weights alone round nothing: such a model is as exact as its activations.
"""

from typing import Literal

import torch
from torch import Tensor, nn

Precision = Literal["full", "half", "quantised"]
ROUNDS = 1e-4  # departure from an affine map; float32 stays below 1e-5, int8 inputs give 1e-3 and more


def precision(model: nn.Module) -> Precision:
    """The precision of a model or module: see the module's docstring.

    Linear maps with packed, integer or subclassed weights are run on random inputs, one of each class; where none can
    be run alone, the model counts as quantised.
    """
    packed = {module for module in model.modules() if _has_packed_weights(module)}
    maps = {type(m): m for m in model.modules() if isinstance(getattr(m, "in_features", None), int)}
    maps = {kind: m for kind, m in maps.items() if any(part in packed for part in m.modules())}
    if packed and (not maps or any(_rounds(m) for m in maps.values())):
        return "quantised"
    halves = (torch.float16, torch.bfloat16)
    return "half" if any(p.dtype in halves for p in model.parameters()) else "full"


def _has_packed_weights(module: nn.Module) -> bool:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    is_packed = any(isinstance(value, torch.ScriptObject) for value in vars(module).values())
    return is_packed or any(_is_packed(tensor) for tensor in own)


def _is_packed(tensor: Tensor) -> bool:
    is_subclass = type(tensor.data) is not Tensor
    small = (torch.int8, torch.uint8, torch.int32)
    return is_subclass or (tensor.ndim > 1 and (tensor.dtype in small or tensor.is_quantized))


def _rounds(linear: nn.Module) -> bool:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 4, int(linear.in_features), generator=generator)
    reference = next((p for p in linear.parameters() if p.is_floating_point()), a)
    if reference.is_meta:
        return True
    a, b = a.to(reference.device, reference.dtype), b.to(reference.device, reference.dtype)
    with torch.no_grad():
        try:
            both, zero = linear(a + b).float(), linear(torch.zeros_like(a)).float()
            departure = linear(a).float() + linear(b).float() - zero - both
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return True
    return not float(departure.abs().max()) <= ROUNDS * float((both - zero).abs().max())


def floating_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the first parameter that holds floating point numbers: what the model computes in."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

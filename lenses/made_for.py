"""Which model something was fitted on, and whether it is used on that one: name and hash of the weights.

A map fitted on one model fits the shapes of its fine-tuned sister as well, and says nothing about it.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from microtome.capture.models import LoadedModel


def weights_of(model: LoadedModel | nn.Module) -> str:
    """SHA-256 of the model's weights, as its provenance says it."""
    loaded = model if isinstance(model, LoadedModel) else LoadedModel.from_module(model, name=type(model).__name__)
    return loaded.provenance.weight_sha256


def name_of(model: LoadedModel | nn.Module) -> str:
    """The name it was loaded by, or its class."""
    return model.provenance.name if isinstance(model, LoadedModel) else type(model).__name__


def facts_of(model: LoadedModel | nn.Module) -> dict[str, Any]:
    """What `require_same_weights` asks for, to be kept with whatever is fitted: `model` and `weight_sha256`."""
    return {"model": name_of(model), "weight_sha256": weights_of(model)}


def require_same_weights(facts: Mapping[str, Any], model: LoadedModel | nn.Module, what: str) -> None:
    """Raise ValueError if `facts` name other weights than the model's; nothing is said where they name none."""
    held = facts.get("weight_sha256")
    if held and held != weights_of(model):
        raise ValueError(
            f"{what} was made for weights {held[:12]} ({facts.get('model')}); this model's are "
            f"{weights_of(model)[:12]} ({name_of(model)}). Fit it on this model, or load the other one."
        )

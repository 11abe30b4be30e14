"""Head shifts as a constant added after the output projection, and as a bias written into the model.

    b_k = sum_h W_O[k, h] (alpha sigma theta)[k, h]

The head form at all tokens and the bias form are the same function; a bias acts on the prompt too, so that it is not
the head form at "generated". The shift is one of head space and has to go through W_O: added to the bias as it is, as
one released weight editor does, it is another vector.
"""

import copy

import torch
from torch import nn

from microtome.capture.models import LoadedModel
from microtome.capture.output_weights import output_weights
from microtome.capture.sites import Site
from microtome.interventions.artefact import Artefact
from microtome.interventions.steering import anatomy_of


def bias_form(model: LoadedModel, shifts: Artefact, strength: float = 1.0) -> Artefact:
    """The same shifts added to attn_out, at all tokens.

    Raises:
        ValueError: an artefact of other sites than heads' z.
        KeyError: a layer whose heads' writes the model does not offer.
    """
    places = [Site.parse(site) for site in shifts.sites]
    if shifts.operation != "add" or any(site.kind != "z" or site.head is None for site in places):
        raise ValueError(f"{shifts}: the bias form is of vectors added to heads (z.LAYER.HEAD).")
    layers = sorted({int(site.layer) for site in places if site.layer is not None})
    weights = output_weights(model, layers=layers, anatomy=anatomy_of(model))
    sums = {}
    for site, vector in zip(places, shifts.tensors["vector"], strict=True):
        matrix = weights[site.whole][site.head].float().cpu()
        sums[site.layer] = sums.get(site.layer, torch.zeros(matrix.shape[1])) + strength * vector @ matrix
    return Artefact(
        "add",
        tuple(f"attn_out.{layer}" for layer in layers),
        {"vector": torch.stack([sums[layer] for layer in layers])},
        method=f"{shifts.method} bias",
        positive=shifts.positive,
        negative=shifts.negative,
        extraction=shifts.extraction,
        positions="all",
        counts=shifts.counts,
        facts=shifts.facts,
    )


def biased_copy(model: LoadedModel, shifts: Artefact, strength: float = 1.0) -> LoadedModel:
    """A copy of the model whose output projections have the shifts in their bias.

    Raises ValueError for a projection that is no plain linear map, and what `bias_form` raises.
    """
    constants = bias_form(model, shifts, strength)
    anatomy = anatomy_of(model)
    module = copy.deepcopy(model.module)
    for layer, vector in zip(constants.layers, constants.tensors["vector"], strict=True):
        tap = anatomy.tap(Site("head_out", layer))
        projection = module.get_submodule(tap.point.module)
        weight = getattr(projection, "weight", None)
        if weight is None or weight.ndim != 2:
            raise ValueError(f"{tap.point.module} ({type(projection).__name__}) is no plain linear map: use the edit.")
        added = vector.to(weight)
        if projection.bias is None:
            projection.bias = nn.Parameter(added)
        else:
            with torch.no_grad():
                projection.bias += added
    return LoadedModel.from_module(module, model.tokenizer, name=f"{model.provenance.name} biased")

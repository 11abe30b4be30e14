"""Head shifts as a constant added after the output projection, and as a bias written into the model.

    b_k = sum_h W_O[k, h] (alpha sigma theta)[k, h]

The head form at all tokens and the bias form are the same function; a bias acts on the prompt too, so that it is not
the head form at "generated". The shift is one of head space and has to go through W_O: added to the bias as it is, as
one released weight editor does, it is another vector.
"""

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from microtome.capture.models import LoadedModel
from microtome.capture.output_weights import output_weights
from microtome.capture.sites import Site
from microtome.interventions.artefact import Artefact
from microtome.interventions.steering import anatomy_of
from microtome.lenses.head_writes import head_writes
from microtome.lenses.made_for import require_same_weights


def bias_form(model: LoadedModel, shifts: Artefact, strength: float = 1.0) -> Artefact:
    """The same shifts added to attn_out, at all tokens.

    Raises:
        ValueError: an artefact of other sites than heads' z; a model that norms what attention writes, where no
            constant behind the norm does the same (`biased_copy` puts it before).
        KeyError: a layer whose heads' writes the model does not offer.
    """
    sums = _constants(model, shifts, strength)
    anatomy = anatomy_of(model)
    for layer in sums:
        if head_writes(model.module, Site("head_out", layer), anatomy=anatomy).norm is not None:
            raise ValueError(
                f"Layer {layer} norms what its heads write: a constant behind the norm is another function. Use "
                "`biased_copy`, whose bias is before it, or the edit at the heads."
            )
    return Artefact(
        "add",
        tuple(f"attn_out.{layer}" for layer in sums),
        {"vector": torch.stack(list(sums.values()))},
        method=f"{shifts.method} bias",
        positive=shifts.positive,
        negative=shifts.negative,
        extraction=shifts.extraction,
        positions="all",
        counts=shifts.counts,
        facts=shifts.facts,
    )


def _constants(model: LoadedModel, shifts: Artefact, strength: float) -> dict[int, Float[Tensor, " d"]]:
    """What the shifts add behind the output projection, by layer."""
    require_same_weights(shifts.facts, model, repr(shifts))
    places = [Site.parse(site) for site in shifts.sites]
    if shifts.operation != "add" or any(site.kind != "z" or site.head is None for site in places):
        raise ValueError(f"{shifts}: the bias form is of vectors added to heads (z.LAYER.HEAD).")
    if shifts.options.get("relative"):
        raise ValueError(f"{shifts} adds in units of each token's norm, which is no constant.")
    layers = sorted({int(site.layer) for site in places if site.layer is not None})
    weights = output_weights(model, layers=layers, anatomy=anatomy_of(model))
    sums: dict[int, Tensor] = {}
    for site, vector in zip(places, shifts.tensors["vector"], strict=True):
        matrix = weights[site.whole][site.head].float().cpu()
        sums[int(site.layer)] = sums.get(int(site.layer), torch.zeros(matrix.shape[1])) + strength * vector @ matrix
    return {layer: sums[layer] for layer in layers}


def biased_copy(model: LoadedModel, shifts: Artefact, strength: float = 1.0) -> LoadedModel:
    """A copy of the model whose output projections have the shifts in their bias.

    Raises ValueError for a projection that is no plain linear map, an artefact of other sites or of another model;
    KeyError for a layer whose heads' writes the model does not offer.
    """
    constants = _constants(model, shifts, strength)
    anatomy = anatomy_of(model)
    module = copy.deepcopy(model.module)
    for layer, vector in constants.items():
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

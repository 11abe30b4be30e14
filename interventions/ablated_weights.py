"""Directional ablation written into the weights: no matrix that writes to the stream can write along the direction.

    W <- W - r r' W for embeddings, output projections of attention and MLP, and their biases

On models that add what these maps return, that is the hook form exactly (`ablation`). Where a norm follows the map
before the stream (Gemma 2), its gain turns the vector and the two differ: that is measured, and refused.
Source: Arditi et al. 2024, section 4.1.
"""

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from microtome.capture.anatomy import Anatomy
from microtome.capture.models import LoadedModel
from microtome.capture.taps import taps
from microtome.interventions.directional_ablation import ablation
from microtome.interventions.steering import anatomy_of

LIMIT = 1e-4
PROBED = 12  # tokens of the check


def ablated_copy(model: LoadedModel, direction: Float[Tensor, "*k d"], *, check: bool = True) -> LoadedModel:
    """A copy of the model whose writers are orthogonal to the direction (or directions); tied embeddings are untied.

    Args:
        check: compare its logits with the hook form's.

    Raises:
        ValueError: logits differ by more than 1e-4 of their size: a norm stands between a writer and the stream, or a
            writer is no linear map. Use the hook form.
    """
    anatomy = anatomy_of(model)
    rows = direction.float() if direction.ndim == 2 else direction.float()[None]
    basis = torch.linalg.qr(rows.T.double()).Q.T.float()
    module = copy.deepcopy(model.module)
    _untie(module)
    with torch.no_grad():
        for embedding in _embeddings(module, anatomy.d_model):
            embedding.weight.copy_(_without(embedding.weight, basis))
        for path in writer_paths(anatomy):
            _orthogonalise(module.get_submodule(path), basis, path)
    made = LoadedModel.from_module(module, model.tokenizer, name=f"{model.provenance.name} ablated")
    if check and (error := _difference(model, made, basis, anatomy)) > LIMIT:
        raise ValueError(
            f"The weight form differs from the hook form by {error:.2g} of the logits (limit {LIMIT:g}): a norm stands "
            "between a writer and the stream, as in Gemma 2, or something else writes. Use ablation(...) with hooks."
        )
    return made


def writer_paths(anatomy: Anatomy) -> list[str]:
    """Paths of the linear maps whose output attention and MLPs add to the stream."""
    points = [tap.point for site, tap in anatomy.taps.items() if site.kind in ("head_out", "mlp_act")]
    return list(dict.fromkeys(point.module for point in points))


def _embeddings(module: nn.Module, d_model: int) -> list[nn.Embedding]:
    return [m for m in module.modules() if isinstance(m, nn.Embedding) and m.embedding_dim == d_model]


def _untie(module: nn.Module) -> None:
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    table = module.get_input_embeddings()
    if head is not None and head.weight is table.weight:
        head.weight = nn.Parameter(table.weight.detach().clone())
        module.config.tie_word_embeddings = False


def _without(rows: Tensor, basis: Tensor) -> Tensor:
    """Vectors in the last axis, without their part along the basis."""
    wide = rows.float()
    return (wide - (wide @ basis.T.to(wide)) @ basis.to(wide)).to(rows.dtype)


def _orthogonalise(layer: nn.Module, basis: Tensor, path: str) -> None:
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise ValueError(f"{path} ({type(layer).__name__}) is no plain linear map: use ablation(...) with hooks.")
    is_transposed = not isinstance(layer, nn.Linear)  # transformers' Conv1D holds [in, out]
    weight.copy_(_without(weight, basis) if is_transposed else _without(weight.T, basis).T)
    if isinstance(bias, Tensor):
        bias.copy_(_without(bias, basis))


def _difference(model: LoadedModel, made: LoadedModel, basis: Tensor, anatomy: Anatomy) -> float:
    """Largest difference of logits between the two forms on random tokens, relative to the largest logit."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.module.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocabulary, (2, PROBED), generator=generator)
    device = next(model.module.parameters()).device
    edits = ablation(model, basis if len(basis) > 1 else basis[0]).steering(model).edits(anatomy)
    with torch.no_grad(), taps(model, ["logits"], edits, anatomy=anatomy) as tape:
        model.module(input_ids=ids.to(device), attention_mask=torch.ones_like(ids).to(device))
    with torch.no_grad():
        other = made.module(input_ids=ids.to(device), attention_mask=torch.ones_like(ids).to(device)).logits
    hook = tape["logits"]
    return float((hook - other).abs().max() / hook.abs().max())

"""Each head's rows of the output projection, `W_O [head, d_head, d_model]`: what turns z into what the head writes.

    head_out[row, h] = z[row, h] W_O[h],     sum over h + bias = attn_out

`capture(model, texts, "head_out")` keeps the writes themselves; they are d_model / d_head times as large as z, so from
z that is already kept the same is one product with these weights.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from microtome.capture.anatomy import Anatomy
from microtome.capture.dissect import dissect
from microtome.capture.layouts import affine_weight
from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site


@torch.no_grad()
def output_weights(
    model: LoadedModel | nn.Module, *, layers: Sequence[int] | int | None = None, anatomy: Anatomy | None = None
) -> dict[Site, Float[Tensor, "head d_head d_model"]]:
    """W_O by the site of z, for all layers that offer `head_out`, or for some; copies, in the weights' own dtype.

    Adapters and quantised projections are read off their images of the axes, so that what they compute is what counts.

    Raises:
        KeyError, IndexError: a layer whose heads' writes this model does not offer.
    """
    module = model.module if isinstance(model, LoadedModel) else model
    anatomy = dissect(module) if anatomy is None else anatomy
    numbers = [layers] if isinstance(layers, int) else layers
    names: list = ["head_out"] if numbers is None else [("head_out", number) for number in numbers]
    weights = {}
    for site in anatomy.expand(names):
        tap = anatomy.tap(site)
        projection = module.get_submodule(tap.point.module)
        columns = tap.heads.columns
        parameter = next(projection.parameters())
        width = getattr(projection, "in_features", int(columns.max()) + 1)
        dtype = parameter.dtype if parameter.dtype.is_floating_point else torch.float32
        like = torch.zeros(1, 1, width, dtype=dtype, device=parameter.device)
        matrix = affine_weight(projection, like)
        weights[Site("z", site.layer, stack=site.stack, call=site.call)] = matrix[columns.to(matrix.device)].clone()
    return weights

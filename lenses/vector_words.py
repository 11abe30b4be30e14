"""Directions as words: a neuron's output row, a probe's weights, a steering vector, through norm and unembedding.

    scores = cap tanh(factor (n(v) W_U + b_U) / cap)  (norm="own")      scores = factor g c(v) W_U  (norm="gain")

No text is needed. Geva et al. 2022 (arXiv:2203.14680) read feed-forward rows this way. Beware: n forgets how long v is,
and the words of -v are other words; read both signs of a direction whose sign is free.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from microtome.capture.anatomy import coefficient
from microtome.capture.dissect import dissect
from microtome.capture.models import LoadedModel
from microtome.kernels.vocabulary_statistics import vocabulary_statistics
from microtome.lenses.frozen_norm import frozen_norm
from microtome.lenses.stream_terms import last_map
from microtome.lenses.token_words import token_words
from microtome.lenses.unembedding import unembedding_of


@torch.no_grad()
def vector_words(
    model: LoadedModel | nn.Module,
    vectors: Float[Tensor, "*any d_model"] | np.ndarray | Sequence[Any],
    *,
    top: int = 10,
    norm: str = "own",
    names: Sequence[str] | None = None,
) -> pd.DataFrame:
    """The first words of each vector: columns vector (name or number), place (0 is the first), token, word, score (the
    logit), prob.

    Args:
        vectors: one or several, in the stream's basis.
        norm: see the module docstring.
        names: of the vectors, in order.

    Raises:
        ValueError: vectors of another width, not finite, zero, or none; names of another number.
    """
    module = model.module if isinstance(model, LoadedModel) else model
    end = unembedding_of(module)
    width = end.weight.shape[1]
    vectors = torch.as_tensor(vectors)
    rows = vectors.reshape(-1, vectors.shape[-1] if vectors.ndim else 1)
    if rows.shape[1] != width or not len(rows):
        raise ValueError(f"vectors are {tuple(vectors.shape)}; this model's stream has {width} coordinates each.")
    if not bool(torch.isfinite(rows).all()):
        raise ValueError("vectors hold NaN or infinity, which have no words.")
    if bool((rows == 0).all(1).any()):
        raise ValueError(f"vector {int((rows == 0).all(1).nonzero()[0, 0])} is zero, which has no words.")
    if names is not None and len(names) != len(rows):
        raise ValueError(f"{len(names)} names for {len(rows)} vectors. Give one for each.")
    if norm not in ("own", "gain"):
        raise ValueError(f"norm is {norm!r}. Give 'own' or 'gain'.")
    rows = rows.to(end.weight)
    is_gain = norm == "gain"
    states = frozen_norm(end.norm, width).folded(rows) if is_gain else end.normed(rows)
    found = vocabulary_statistics(
        states[None],
        end.weight,
        bias=None if is_gain else end.bias,
        factor=end.factor,
        cap=None if is_gain else end.cap,
        top=top,
    )
    scores = found.top_log_probs[0] + found.log_sum_exp[0][:, None]
    count = found.top_ids.shape[-1]
    said = list(range(len(rows))) if names is None else list(names)
    ids = found.top_ids[0].flatten().tolist()
    return pd.DataFrame(
        {
            "vector": [name for name in said for _ in range(count)],
            "place": list(range(count)) * len(rows),
            "token": ids,
            "word": token_words(model, ids),
            "score": scores.flatten().float().cpu().numpy(),
            "prob": found.top_log_probs[0].exp().flatten().float().cpu().numpy(),
        }
    )


@torch.no_grad()
def neuron_vectors(
    model: LoadedModel | nn.Module, layer: int, neurons: Sequence[int] | None = None
) -> Float[Tensor, "neuron d_model"]:
    """What each neuron of an MLP adds to the stream per unit of activation: its row of the last linear map.

    Behind a norm after the MLP (Gemma 2 and 3) the row is multiplied by that norm's gain; the division by the size of
    the whole output depends on the text and is left out, which a reading with norm="own" does not notice.

    Raises:
        ValueError: the layer's MLP has no single last linear map (experts).
        IndexError: a neuron or layer that is not there.
    """
    module = model.module if isinstance(model, LoadedModel) else model
    anatomy = dissect(module)
    block = next((block for block in anatomy.main if block.layer == layer), None)
    if block is None:
        raise IndexError(f"layer {layer} is out of range: this {anatomy.model_class} has {anatomy.layers}, from 0.")
    term = next((term for term in block.contributions if term.role == "mlp"), None)
    if term is None or term.projection is None:
        raise ValueError(f"The MLP of layer {layer} has no single last linear map, so its neurons have no rows.")
    last = last_map(module, term.projection.module, term.point.module, anatomy.d_model)
    count = len(last.weight)
    numbers = list(range(count)) if neurons is None else list(neurons)
    if bad := [n for n in numbers if not 0 <= n < count]:
        raise IndexError(f"neuron {bad[0]} is out of range: layer {layer} has {count}, from 0.")
    return last.folded(last.weight[numbers]) * coefficient(module, term.factor, term.vectors)

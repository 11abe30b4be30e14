"""Do memories say what their triggers lead to, and does a layer say what one of its memories says?

    agreement of a layer   = share of neurons whose value's first word is the token after their largest trigger (of
                             those that are not their text's last token: nothing follows that)
    control                = the same with triggers dealt to the layer's other neurons: its expectation over all
                             permutations is sum over tokens of p(first word) p(next token), in closed form
    composition            = share of positions at which the first word of mlp_out is the first word of no active memory
    residual, ffn, agreement, composition of the block's output (Geva et al. 2021, figure 9): its first word is that of
                             the stream before the MLP, of mlp_out, of both, of neither

Agreement is with 95 % Wilson intervals; neurons share triggers and words, so they are too narrow rather than too wide.
Active memories: the paper's are those with a positive coefficient (ReLU). Neurons of gated or GELU MLPs are never at
zero, so active means the `active` largest |c_i| |v_i| here, and a negative coefficient says the words of -v_i.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from tqdm.auto import tqdm

from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.kernels.vocabulary_statistics import vocabulary_statistics
from microtome.lenses.corpus_pass import NO_TARGET, corpus_pass
from microtome.lenses.frozen_norm import frozen_norm
from microtome.lenses.key_value_memories import Triggers, Values
from microtome.lenses.unembedding import unembedding_of
from microtome.lenses.wilson_interval import wilson_interval


def value_agreement(
    model: LoadedModel | nn.Module,
    triggers: Triggers,
    *,
    layers: Sequence[int] | None = None,
    neurons: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> pd.DataFrame:
    """Agreement of values with triggers by layer, and what it would be by chance.

    Args:
        triggers: of the same model; their sign says whether v or -v is read.
        layers: all that the triggers cover if None.
        neurons: how many of each layer, drawn with `seed`; all if None.

    Returns:
        One row per layer: layer, neurons (that have a trigger with a token behind it), agreement, agreement_low,
        agreement_high, control_agreement, rank (median rank of the next token in the value's distribution, 0 for the
        first), control_rank (with triggers dealt anew), rank_1_percent (share of ranks within the first hundredth of
        the vocabulary), control_rank_1_percent.

    Raises:
        KeyError: a layer that the triggers do not cover.
        ValueError: fewer than one neuron, triggers of a model with other neurons or another vocabulary, or a layer
            whose triggers are all at the end of their texts.
    """
    chosen = list(triggers.coefficient) if layers is None else list(layers)
    if missing := [layer for layer in chosen if layer not in triggers.coefficient]:
        raise KeyError(f"layer {missing[0]} was not looked at; these were: {list(triggers.coefficient)}.")
    if neurons is not None and neurons < 1:
        raise ValueError(f"neurons={neurons}: give at least one per layer.")
    values = Values.of(model, chosen)
    vocab = unembedding_of(values.module, values.anatomy).vocab
    generator = np.random.default_rng(seed)
    rows = []
    for layer in tqdm(chosen, unit="layer", desc="agreement", disable=not progress):
        following = _following(triggers.next_token[layer])
        held = len(values.maps[layer].weight)
        if len(following) != held or int(following.max()) >= vocab:
            raise ValueError(
                f"layer {layer}: triggers of {len(following)} neurons and token ids to {int(following.max())}, a model "
                f"of {held} neurons and {vocab} tokens. Take the triggers of this model."
            )
        followed = (following != NO_TARGET).nonzero()[:, 0]
        if not len(followed):
            raise ValueError(f"layer {layer}: every trigger ends its text, so no token follows. Give longer texts.")
        order = followed[torch.from_numpy(generator.permutation(len(followed)))]
        picked = (order if neurons is None else order[:neurons]).sort().values
        following = following[picked]
        dealt = following[torch.from_numpy(generator.permutation(len(following)))]
        found = values.statistics(layer, picked, sign=triggers.sign, targets=following)
        shuffled = values.statistics(layer, picked, sign=triggers.sign, targets=dealt)["target_rank"].numpy()
        first, rank = found["top_ids"][:, 0], found["target_rank"].numpy()
        share = float((first == following).double().mean())
        low, high = wilson_interval(int((first == following).sum()), len(picked))
        rows.append(
            {
                "layer": layer,
                "neurons": len(picked),
                "agreement": share,
                "agreement_low": low,
                "agreement_high": high,
                "control_agreement": chance_agreement(first, following),
                "rank": float(np.median(rank)),
                "control_rank": float(np.median(shuffled)),
                "rank_1_percent": float((rank < 0.01 * vocab).mean()),
                "control_rank_1_percent": float((shuffled < 0.01 * vocab).mean()),
            }
        )
    return pd.DataFrame(rows)


def _following(next_token: Int64[Tensor, "neuron k"]) -> Int64[Tensor, " neuron"]:
    """The token behind each neuron's largest trigger that has one; NO_TARGET where none has."""
    first = (next_token != NO_TARGET).int().argmax(dim=1, keepdim=True)
    return next_token.gather(1, first)[:, 0]


def chance_agreement(words: Int64[Tensor, " neuron"], following: Int64[Tensor, " neuron"]) -> float:
    """Expected share of equal pairs when one of two lists is dealt anew: sum over tokens of p(word) p(following)."""
    size = int(max(words.max(), following.max())) + 1
    counts = [torch.bincount(ids, minlength=size).double() / len(ids) for ids in (words, following)]
    return float(counts[0] @ counts[1])


def memory_composition(
    model: LoadedModel | nn.Module,
    texts: Any,
    layers: Sequence[int],
    *,
    active: int = 100,
    max_tokens: int = 1024,
    progress: bool = False,
    **encoding: Any,
) -> pd.DataFrame:
    """How often an MLP says what none of its memories says, and where the block's first word comes from.

    Args:
        texts: strings or token ids; the first token of each is left out.
        active: how many memories count as active at a position, by |c_i| |v_i|.

    Returns:
        One row per layer: layer, positions, composed (mlp_out's first word is no active memory's), and of the stream
        behind the block residual, ffn, agreement, composition, which sum to 1.

    Raises:
        ValueError: active below 1, no layers, no token to look at. KeyError: a layer without neurons.
    """
    if active < 1:
        raise ValueError(f"active={active}: give at least one memory.")
    layers = list(dict.fromkeys(layers))
    if not layers:
        raise ValueError("layers is empty. Name at least one.")
    values = Values.of(model, layers)
    end = unembedding_of(values.module, values.anatomy)
    norm = None if end.norm is None else frozen_norm(end.norm, values.anatomy.d_model)
    offered = values.anatomy.taps
    before = {
        layer: site if (site := Site("resid_mid", layer)) in offered else Site("resid_pre", layer) for layer in layers
    }
    sites = [s for n in layers for s in (before[n], Site("mlp_act", n), Site("mlp_out", n), Site("resid_post", n))]
    words: dict[int, Tensor] = {}
    for layer in tqdm(layers, unit="layer", desc="values", disable=not progress):
        words[layer] = torch.stack([values.statistics(layer, sign=sign)["top_ids"][:, 0] for sign in (1, -1)])
    counts: dict[int, np.ndarray] = {layer: np.zeros(6) for layer in layers}
    run = corpus_pass(model, texts, list(dict.fromkeys(sites)), max_tokens=max_tokens, **encoding)
    for chunk in tqdm(run.chunks(), total=len(run.batches), unit="batch", desc="composition", disable=not progress):
        kept = ((chunk.position > 0) & ~chunk.is_special).nonzero()[:, 0]
        if not len(kept):
            continue
        for layer in layers:
            read = {site: chunk.values[site][kept.to(chunk.values[site].device)] for site in chunk.values}
            lens = [end.normed(read[site]) for site in (before[layer], Site("resid_post", layer))]
            write = read[Site("mlp_out", layer)]
            # as a part of the stream: no statistics of its own, no shift
            lens.append(write if norm is None else norm.folded(write).to(write))
            stream, block, said = _first_words(torch.stack(lens), end.weight, end.factor)
            is_said = _said_by_active(read[Site("mlp_act", layer)], said, values, layer, words[layer], active)
            of_stream, of_mlp = block == stream, block == said
            counts[layer] += [
                len(kept),
                int((~is_said).sum()),
                int((of_stream & ~of_mlp).sum()),
                int((of_mlp & ~of_stream).sum()),
                int((of_mlp & of_stream).sum()),
                int((~of_mlp & ~of_stream).sum()),
            ]
    if not all(count[0] for count in counts.values()):
        raise ValueError("No token to look at: the first token of each text and special tokens are left out.")
    names = ["composed", "residual", "ffn", "agreement", "composition"]
    return pd.DataFrame(
        [
            {"layer": layer, "positions": int(count[0]), **dict(zip(names, count[1:] / count[0], strict=True))}
            for layer, count in counts.items()
        ]
    )


def _first_words(
    states: Float[Tensor, "depth token d_model"], weight: Tensor, factor: float
) -> Int64[Tensor, "depth token"]:
    """First words, the bias left out: it would say the same everywhere. A cap changes no order."""
    return vocabulary_statistics(states, weight, factor=factor, top=1).top_ids[..., 0].cpu()


def _said_by_active(
    coefficients: Float[Tensor, "token neuron"],
    said: Int64[Tensor, " token"],
    values: Values,
    layer: int,
    words: Int64[Tensor, "sign neuron"],
    active: int,
) -> Tensor:
    """Whether each position's word is that of one of its active memories."""
    length = values.maps[layer].weight.float().norm(dim=1)
    size = coefficients.float().abs() * length
    largest = size.topk(min(active, size.shape[1]), dim=1).indices
    is_negative = (coefficients.gather(1, largest) < 0).long().cpu()
    return (words[is_negative, largest.cpu()] == said[:, None]).any(1)

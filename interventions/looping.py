"""Layers left out and ranges of layers looped, with what tells whether the loop settles.

    looped(model, 10, 14, repeats=3)      blocks 10 to 13 three times, each repeat moving the stream by a share

Weights of the repeats: "uniform" w_i = 1/n (the whole displacement stays near one pass), "average" w_i = 1/(i+1)
(a running mean), "plain" w_i = 1. n = 1 is the model itself for all of them. Cost: 1 + (n - 1)(b - a) / L forwards.
Source: arXiv 2602.14759 (inner loop inference).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from microtome.capture.block_range import OnState, blocks_looped, blocks_skipped
from microtome.capture.models import LoadedModel
from microtome.interventions.steering import anatomy_of
from microtome.lenses.next_token import CleanTexts
from microtome.lenses.unembedding import unembedding_of

Weighting = Literal["uniform", "average", "plain"]


def loop_weights(repeats: int, weighting: Weighting = "uniform") -> list[float]:
    """w_i of each repeat. Raises ValueError for fewer than one repeat, or another weighting."""
    if repeats < 1:
        raise ValueError(f"repeats={repeats}: 1 is the model as it is; give 1 or more.")
    if weighting == "uniform":
        return [1 / repeats] * repeats
    if weighting == "average":
        return [1 / (i + 1) for i in range(repeats)]
    if weighting == "plain":
        return [1.0] * repeats
    raise ValueError(f"weighting={weighting!r}: give 'uniform', 'average' or 'plain'.")


@contextmanager
def looped(
    model: LoadedModel,
    first: int,
    stop: int,
    repeats: int,
    weighting: Weighting = "uniform",
    *,
    on_state: OnState | None = None,
) -> Iterator[None]:
    """Blocks first .. stop - 1 run `repeats` times in every forward inside, steps of generation included.

    Of a model whose layers alternate (sliding window and full attention), the range should hold whole pairs.

    Raises IndexError and ValueError as `blocks_looped`.
    """
    weights = loop_weights(repeats, weighting)
    with blocks_looped(model.module, anatomy_of(model), first, stop, weights, on_state):
        yield


@contextmanager
def skipped(model: LoadedModel, layers: Sequence[int] | int) -> Iterator[None]:
    """Blocks left out of every forward inside.

    Raises IndexError and ValueError as `blocks_skipped`.
    """
    numbers = [layers] if isinstance(layers, int) else list(layers)
    with blocks_skipped(model.module, anatomy_of(model), numbers):
        yield


def loop_report(
    model: LoadedModel,
    texts: Sequence[str],
    first: int,
    stop: int,
    repeats: int,
    weighting: Weighting = "uniform",
) -> pd.DataFrame:
    """A row per repeat: whether the loop settles, and what it does to the model's predictions.

    Returns:
        cosine to the state before; step |z_{i+1} - z_i| / |z_i|; residual |Phi(z_i) - z_i| / |z_i|, which a small
        weight does not make small; lens_kl, KL of the logit lens between the two; means over tokens but each text's
        first. Beside them forwards (cost), and kl and cross_entropy_added of the looped model (the same in every row).

    Raises:
        ValueError: no text of two tokens or more.
    """
    weights = loop_weights(repeats, weighting)
    end = unembedding_of(model)
    clean = CleanTexts.of(model, list(texts)).run()
    states: list[Tensor] = []
    sums = np.zeros((repeats, 3))
    tokens = 0

    def note(i: int, state: Tensor) -> None:
        nonlocal tokens
        states.append(state.detach())
        if i < repeats:
            return
        for number in range(repeats):
            one, other = (z[:, 1:].flatten(0, 1).float() for z in states[number : number + 2])
            sums[number, 0] += float(torch.cosine_similarity(one, other, dim=1).sum())
            sums[number, 1] += float(((other - one).norm(dim=1) / one.norm(dim=1).clamp_min(1e-30)).sum())
            with torch.no_grad():
                p, q = (end.logits(z).log_softmax(-1) for z in (one, other))
            sums[number, 2] += float((p.exp() * (p - q)).sum())
        tokens += states[0][:, 1:].shape[0] * states[0][:, 1:].shape[1]
        states.clear()

    for text in texts:  # one by one: no padding among the states
        with looped(model, first, stop, repeats, weighting, on_state=note), torch.no_grad():
            ids = model.require_tokenizer()(text, return_tensors="pt")["input_ids"]
            model.module(input_ids=ids.to(end.weight.device))
    if not tokens:
        raise ValueError("No text has two tokens: there is nothing behind the first. Give longer texts.")
    with looped(model, first, stop, repeats, weighting):
        effect = effect_on(clean)
    layers = anatomy_of(model).layers
    return pd.DataFrame(
        {
            "repeat": range(1, repeats + 1),
            "cosine": sums[:, 0] / tokens,
            "step": sums[:, 1] / tokens,
            "residual": sums[:, 1] / tokens / np.abs(weights),
            "lens_kl": sums[:, 2] / tokens,
            "forwards": 1 + (repeats - 1) * (stop - first) / layers,
            **effect,
        }
    )


def effect_on(clean: CleanTexts) -> dict[str, float]:
    """kl to the clean model and cross_entropy_added, nats a token, of the model as it runs in the open context.

    Beware: the clean pass (`clean.run()`) has to be over before the context opens.
    """
    frame = clean.compared().to_frame()
    added = frame["edited_nll"] - frame["clean_nll"]
    return {"kl": float(frame["kl"].mean()), "cross_entropy_added": float(added.mean())}


def loop_ranges(
    model: LoadedModel,
    texts: Sequence[str],
    length: int,
    repeats: int,
    weighting: Weighting = "uniform",
    *,
    firsts: Sequence[int] | None = None,
) -> pd.DataFrame:
    """The same number of extra blocks elsewhere: a row per range of that length, all of equal cost.

    Args:
        firsts: first blocks of the ranges; all by default.

    Returns: first, stop, forwards, kl, cross_entropy_added.

    Raises:
        IndexError: a range the model does not have.
    """
    layers = anatomy_of(model).layers
    chosen = range(layers - length + 1) if firsts is None else firsts
    clean = CleanTexts.of(model, list(texts)).run()
    rows = []
    for first in chosen:
        with looped(model, first, first + length, repeats, weighting):
            effect = effect_on(clean)
        rows.append(
            {
                "first": first,
                "stop": first + length,
                "forwards": 1 + (repeats - 1) * length / layers,
                **effect,
            }
        )
    return pd.DataFrame(rows)

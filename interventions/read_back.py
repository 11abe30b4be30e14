"""What the unsteered model makes of texts that a steered one wrote: nats of every token, and activations at some sites.

One pass over prompt and continuation gives both, so that a record costs one forward more:

    nll_t = -log p(token_t | tokens before it)      of the continuation, and of the whole text but its first token
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from microtome.capture.anatomy import Anatomy
from microtome.capture.batches import MAX_TOKENS
from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.interventions.steering import anatomy_of
from microtome.kernels.vocabulary_statistics import vocabulary_cross_entropy
from microtome.lenses.corpus_pass import corpus_pass
from microtome.lenses.short_repr import short_repr
from microtome.lenses.unembedding import unembedding_of


@dataclass(frozen=True, eq=False)
class ReadBack:
    """Texts as the unsteered model reads them.

    Attributes:
        table: a row per text: nll (nats of the continuation), tokens (of it), nll_whole, tokens_whole.
        text: of each row of `activations`: which text it is of.
        activations: of the continuation's tokens, by site.
    """

    table: pd.DataFrame
    text: np.ndarray
    activations: dict[Site, Float[Tensor, "row d"]]

    __repr__ = short_repr

    def mean_by_text(self, values: np.ndarray) -> np.ndarray:
        """The mean of a number per row over each text; NaN where nothing was written."""
        counts = np.bincount(self.text, minlength=len(self.table))
        sums = np.bincount(self.text, weights=values, minlength=len(self.table))
        with np.errstate(invalid="ignore", divide="ignore"):
            return sums / counts


def read_back(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    sites: Sequence[str] = (),
    *,
    anatomy: Anatomy | None = None,
    max_tokens: int = MAX_TOKENS,
) -> ReadBack:
    """Read texts (ids of the prompts, and of what was written) with the model as it is.

    Raises:
        ValueError: a prompt without a token.
        KeyError, IndexError: a site the model does not offer.
    """
    anatomy = anatomy_of(model) if anatomy is None else anatomy
    if empty := [number for number, ids in enumerate(prompts) if not len(ids)]:
        raise ValueError(f"Prompt {empty[0]} has no token: there is nothing its continuation follows.")
    end = unembedding_of(model, anatomy)
    normed = Site.parse("final_norm" if anatomy.final_norm is not None else f"resid_post.{anatomy.layers - 1}")
    wanted = [Site.parse(site) for site in sites]
    whole = [[*one, *other] for one, other in zip(prompts, continuations, strict=True)]
    lengths = torch.tensor([len(ids) for ids in prompts])
    plan = corpus_pass(
        model,
        whole,
        list(dict.fromkeys([normed, *wanted])),
        anatomy=anatomy,
        max_tokens=max_tokens,
        add_special_tokens=False,
    )
    nats, counts = np.zeros((2, len(whole))), np.zeros((2, len(whole)), dtype=int)
    texts: list[Tensor] = []
    kept: dict[Site, list[Tensor]] = {site: [] for site in wanted}
    for chunk in plan.chunks():
        has = chunk.has_target
        states = chunk.values[normed][has].to(end.weight.device)
        with torch.no_grad():
            nll = vocabulary_cross_entropy(
                states[None], chunk.targets[has], weight=end.weight, bias=end.bias, factor=end.factor, cap=end.cap
            )[0]
        text, is_written = chunk.text[has], chunk.position[has] + 1 >= lengths[chunk.text[has]]
        for part, chosen in enumerate((is_written, torch.ones_like(is_written))):
            rows = text[chosen].numpy()
            nats[part] += np.bincount(rows, weights=nll[chosen].double().numpy(), minlength=len(whole))
            counts[part] += np.bincount(rows, minlength=len(whole))
        behind = chunk.position >= lengths[chunk.text]
        texts.append(chunk.text[behind])
        for site in wanted:
            kept[site].append(chunk.values[site].flatten(1)[behind].float().cpu())
    table = pd.DataFrame({"nll": nats[0], "tokens": counts[0], "nll_whole": nats[1], "tokens_whole": counts[1]})
    return ReadBack(table, torch.cat(texts).numpy(), {site: torch.cat(rows) for site, rows in kept.items()})

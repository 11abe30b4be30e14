"""What every head holds at the end of each text: z averaged over the last few tokens, for all heads at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from microtome.capture.batches import MAX_TOKENS
from microtome.capture.models import LoadedModel
from microtome.interventions.steering import anatomy_of
from microtome.lenses.corpus_pass import corpus_pass
from microtome.lenses.short_repr import short_repr


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Activations of heads.

    Attributes:
        sites: "z.LAYER.HEAD", in order.
        z: of each head, a row per text.
        tokens: how many last tokens were averaged.
    """

    sites: tuple[str, ...]
    z: Float[Tensor, "head text d_head"]
    tokens: int

    __repr__ = short_repr


def head_rows(
    model: LoadedModel, texts: Sequence[Any], *, tokens: int = 1, max_tokens: int = MAX_TOKENS, **encoding: Any
) -> HeadRows:
    """z of every head at the last token of each text, or the mean over the last few.

    Args:
        tokens: averaged, the last ones; texts with fewer give what they have.
        encoding: of `corpus_pass`.

    Raises:
        ValueError: fewer than one token; heads of different widths.
        KeyError: a model that offers no heads.
    """
    if tokens < 1:
        raise ValueError(f"tokens={tokens}: average at least one token.")
    anatomy = anatomy_of(model)
    plan = corpus_pass(model, texts, "z", anatomy=anatomy, max_tokens=max_tokens, **encoding)
    lengths = torch.tensor([text.length for text in plan.texts])
    whole = [anatomy.tap(site) for site in plan.sites]
    if len({tap.width for tap in whole}) != 1:
        raise ValueError(f"Heads have widths {sorted({tap.width for tap in whole})}: they cannot be ranked together.")
    counts = [int(tap.head_count or 0) for tap in whole]
    found = torch.zeros(sum(counts), len(plan.texts), whole[0].width)
    for chunk in plan.chunks():
        last = chunk.position >= lengths[chunk.text] - tokens
        text = chunk.text[last]
        share = (1 / lengths[text].clamp(max=tokens)).float()[:, None, None]
        values = torch.cat([chunk.values[site][last].float().cpu() for site in plan.sites], dim=1)
        found.index_add_(1, text, (values * share).transpose(0, 1))
    sites = [f"{site}.{head}" for site, count in zip(plan.sites, counts, strict=True) for head in range(count)]
    return HeadRows(tuple(sites), found, tokens)

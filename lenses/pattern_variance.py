"""How much a head's pattern depends on what the text says: the variance of its pattern over texts of one length.

    s_var = sum_n |A_n - mean A|_F^2 / ((N - 1) T^2) = (sum_n |A_n|_F^2 - N |mean A|_F^2) / ((N - 1) T^2)

(sheet section 15, after Li et al. 2026, arXiv:2609.34650, not read directly [S]). Zero for a head that looks at
positions alone. The mean is `[T, T]` per head, so T is small, 64 by default, and each text counts with its first T
tokens; patterns of single texts are not kept. `content_share` is sum |A_n - mean A|^2 / sum |A_n|^2, free of T's scale.

Beware: sums are in float64; a variance below some 1e-13 |A|^2 is rounding.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from microtome.lenses.corpus_pass import CorpusPass
from microtome.lenses.head_pass import SeenCall, attention_sites, see_calls
from microtome.lenses.short_repr import short_repr

MOST_LENGTH = 512


@dataclass(frozen=True, eq=False)
class PatternVariance:
    """texts: how many. variance, content_share: `[layer, head]`, NaN for fewer than two texts."""

    texts: int
    variance: Float[np.ndarray, "layer head"]
    content_share: Float[np.ndarray, "layer head"]

    __repr__ = short_repr


def pattern_variance(plan: CorpusPass) -> PatternVariance:
    """Of the texts of a plan, which must all have one length, at most 512.

    Raises ValueError for texts of several lengths or longer ones; KeyError with the reason where no layer's attention
    can be seen.
    """
    lengths = {text.length for text in plan.texts}
    if len(lengths) != 1:
        raise ValueError(f"pattern_variance needs texts of one length; these have {sorted(lengths)[:5]} tokens.")
    if max(lengths) > MOST_LENGTH:
        raise ValueError(
            f"texts of {max(lengths)} tokens: a mean pattern per head takes length squared. Give {MOST_LENGTH} or less."
        )
    layers = len(attention_sites(plan))
    means: list[torch.Tensor | float] = [0.0] * layers
    squares: list[torch.Tensor | float] = [0.0] * layers

    def add(seen: SeenCall) -> None:
        rows = seen.call.pattern_rows(None, None).double()
        means[seen.row] = means[seen.row] + rows.sum(0)
        squares[seen.row] = squares[seen.row] + rows.square().sum((0, 2, 3))

    for number in range(len(plan.batches)):
        see_calls(plan, number, add)
    count, length = len(plan.texts), max(lengths)
    total = torch.stack(squares)
    spread = (total - torch.stack([mean.square().sum((1, 2)) for mean in means]) / count).clamp(min=0)
    if count < 2:
        spread = spread * torch.nan
    return PatternVariance(
        count, (spread / max(count - 1, 1) / length**2).cpu().numpy(), (spread / total).cpu().numpy()
    )

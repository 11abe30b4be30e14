"""Would the ranking of heads come out alike on other rows? Rankings of resampled groups against one another.

AUROC of every probe is taken anew in draws of whole groups (`bootstrap`); draw b is compared with draw b + B/2:

    Kendall's tau  = mean over pairs of probes of the product of the signs of their differences (1: same order)
    Jaccard of top = |top_b and top_b'| / |top_b or top_b'|      (1: same heads; two random choices: k / (2 m - k))

Beware: a draw is noisier than a fresh sample of that size (it holds some 63 % of the groups), so rankings are a little
more stable than this says. Probes are not refitted.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from microtome.probes.bootstrap import bootstrap_auroc

_FEWEST_DRAWS = 20


@dataclass(frozen=True, eq=False)
class RankStability:
    """Agreement of rankings over draws of the groups."""

    tau: float  # mean of Kendall's tau
    tau_low: float  # 2.5 % and 97.5 % of pairs of draws
    tau_high: float
    jaccard: float  # mean overlap of the `top` best
    jaccard_by_chance: float  # of two random choices of as many probes
    in_top: Float64[Tensor, " probe"]  # share of draws in which the probe is among the best `top`
    top: int


def rank_stability(
    scores: Float64[Tensor, "probe example"],
    positive: Bool[Tensor, " example"],
    groups: Int64[Tensor, " example"],
    test: Bool[Tensor, "fold example"],
    *,
    top: int = 10,
    draws: int = 200,
    seed: int = 0,
) -> RankStability:
    """Stability of the order of probes by AUROC of out-of-fold scores (`sweep.scores`).

    Raises ValueError for labels other than two classes, fewer than two probes, a `top` that is not below their number,
    fewer than 20 draws, and as `bootstrap_auroc`.
    """
    if scores.dim() != 2 or positive.dtype != torch.bool:
        raise ValueError(
            f"scores are {list(scores.shape)}, labels {positive.dtype}; ranks are by AUROC of two classes, from "
            "[probe, example] and bool. Of several classes give one: scores[..., K], labels == K."
        )
    if not 1 <= top < len(scores):
        raise ValueError(f"top={top} of {len(scores)} probes; give a number from 1 to {len(scores) - 1}.")
    if draws < _FEWEST_DRAWS:
        raise ValueError(f"draws={draws}; give at least {_FEWEST_DRAWS}.")
    half = draws // 2
    drawn = bootstrap_auroc(scores, positive, groups, test, draws=2 * half, seed=seed)
    taus = torch.stack([_tau(drawn[:, draw], drawn[:, draw + half]) for draw in range(half)])
    best = drawn.argsort(dim=0, descending=True, stable=True)[:top]
    is_top = torch.zeros(drawn.shape, dtype=torch.bool).scatter_(0, best, True)
    both = (is_top[:, :half] & is_top[:, half:]).sum(dim=0).double()
    low, high = torch.quantile(taus, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return RankStability(
        tau=taus.mean().item(),
        tau_low=low,
        tau_high=high,
        jaccard=(both / (2 * top - both)).mean().item(),
        jaccard_by_chance=top / (2 * len(scores) - top),
        in_top=is_top.double().mean(dim=1),
        top=top,
    )


def _tau(first: Tensor, second: Tensor) -> Float64[Tensor, ""]:
    """Kendall's tau-b, which leaves ties out of its scale."""
    signs = [(values[:, None] - values).sign().double() for values in (first, second)]
    scale = (signs[0].square().sum() * signs[1].square().sum()).sqrt()
    return (signs[0] * signs[1]).sum() / scale.clamp(min=1e-300)

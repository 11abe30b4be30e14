"""Would the ranking of heads come out alike on other rows? Rankings of resampled groups against one another.

AUROC (macro for several classes; R2 for numbers) of every probe is taken anew in draws of whole groups (`bootstrap`);
draw b is compared with draw b + B/2:

    Kendall's tau  = mean over pairs of probes of the product of the signs of their differences (1: same order)
    Jaccard of top = |top_b and top_b'| / |top_b or top_b'|      (1: same heads; two random choices: k / (2 m - k))

Beware: a draw is noisier than a fresh sample of that size (it holds some 63 % of the groups), so rankings are a little
more stable than this says. Probes are not refitted.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int64, Shaped
from torch import Tensor

from microtome.probes.measures import Resampling, main_measure
from microtome.probes.sweep_result import Sweep
from microtome.probes.target import Kind

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
    sites: tuple[str, ...] = ()  # names of the probes; none for bare scores

    def __repr__(self) -> str:
        return (
            f"RankStability({len(self.in_top)} probes, tau {self.tau:.2f} [{self.tau_low:.2f}, {self.tau_high:.2f}], "
            f"overlap of the best {self.top} {self.jaccard:.2f}, by chance {self.jaccard_by_chance:.2f})"
        )


def rank_stability(
    scores: Float64[Tensor, "probe example *output"] | Sweep,
    truth: Shaped[Tensor, " example"] | None = None,
    groups: Int64[Tensor, " example"] | None = None,
    test: Bool[Tensor, "fold example"] | None = None,
    *,
    top: int = 10,
    kind: str | None = None,
    draws: int = 200,
    seed: int = 0,
) -> RankStability:
    """Stability of the order of probes by AUROC or R2 of out-of-fold scores.

    Args:
        scores: a sweep, or scores with their truth (bool, class numbers or numbers), groups and test rows of each fold.
        top: how many of the best are compared.
        kind: of a sweep, the kind of site to rank, such as "z"; all of them if None.

    Raises ValueError for a sweep with arrays or scores without, a kind that was not probed, fewer than two probes, a
    `top` that is not below their number, fewer than 20 draws, and as `bootstrap_auroc`.
    """
    sites: tuple[str, ...] = ()
    if isinstance(scores, Sweep):
        if not (truth is groups is test is None):
            raise ValueError("A sweep brings its truth, groups and folds: give the sweep alone, or scores with all.")
        truth, groups, test = scores.truth, scores.groups, scores.test
        sites, scores = _of_kind(scores, kind)
    elif kind is not None or truth is None or groups is None or test is None:
        raise ValueError("Give a sweep, with kind=... or without, or scores with their truth, groups and test rows.")
    if not 1 <= top < len(scores):
        raise ValueError(f"top={top} of {len(scores)} probes; give a number from 1 to {len(scores) - 1}.")
    if draws < _FEWEST_DRAWS:
        raise ValueError(f"draws={draws}; give at least {_FEWEST_DRAWS}.")
    half = draws // 2
    of_labels: dict[torch.dtype, Kind] = {torch.bool: "binary", torch.int64: "classes"}
    rows = Resampling(groups, test, draws=2 * half, seed=seed)
    drawn = main_measure(scores, truth, of_labels.get(truth.dtype, "numbers"), rows)[1]
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
        sites=sites,
    )


def _of_kind(sweep: Sweep, kind: str | None) -> tuple[tuple[str, ...], Tensor]:
    """Names and scores of the probes of a kind."""
    kinds = sweep.table["kind"]
    if kind is None:
        return tuple(sweep.table["site"]), sweep.scores
    if not (kinds == kind).any():
        raise ValueError(f"kind={kind!r} was not probed; give one of {', '.join(dict.fromkeys(kinds))}, or None.")
    return tuple(sweep.table["site"][kinds == kind]), sweep.scores[torch.tensor((kinds == kind).tolist())]


def _tau(first: Tensor, second: Tensor) -> Float64[Tensor, ""]:
    """Kendall's tau-b, which leaves ties out of its scale."""
    signs = [(values[:, None] - values).sign().double() for values in (first, second)]
    scale = (signs[0].square().sum() * signs[1].square().sum()).sqrt()
    return (signs[0] * signs[1]).sum() / scale.clamp(min=1e-300)

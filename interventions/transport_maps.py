"""Activation transport (Rodriguez et al. 2024, "AcT"): a map of each channel from unwanted to wanted texts.

    x_j <- (1 - lambda) x_j + lambda (omega_j x_j + beta_j)          lambda in [0, 1] is the strength

    linear     both samples sorted (the optimal coupling in one dimension), least squares of b_(i) on a_(i):
               omega = cov(a_(.), b_(.)) / var(a),   beta = mean b - omega mean a;    omega >= 0, since both are sorted
    mean       omega = 1, beta = mean b - mean a
    gaussian   omega = sd b / sd a, beta = mean b - omega mean a

Beware: a map by channel depends on the axes. Fitted on one vector per text and applied at every token, the samples'
spread is not the tokens': the linear map acts only where a channel lies within the source's range.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from microtome.capture.collect import capture
from microtome.capture.models import LoadedModel
from microtome.interventions.artefact import Artefact, made_on
from microtome.interventions.operations import Affine
from microtome.interventions.positions import Positions
from microtome.interventions.site_order import require_order
from microtome.interventions.steering import Intervention, Steering, anatomy_of

Kind = Literal["linear", "mean", "gaussian"]


@dataclass(frozen=True, eq=False)
class ChannelMap:
    """omega, beta and the source's range, by channel."""

    gain: Float[Tensor, " d"]
    bias: Float[Tensor, " d"]
    low: Float[Tensor, " d"]
    high: Float[Tensor, " d"]

    def __call__(self, x: Float[Tensor, "*row d"]) -> Float[Tensor, "*row d"]:
        """omega x + beta, everywhere."""
        return self.gain.to(x) * x + self.bias.to(x)


def channel_map(
    source: Float[Tensor, "row d"],
    target: Float[Tensor, "other d"],
    kind: Kind = "linear",
    *,
    quantile: float = 0.0,
) -> ChannelMap:
    """Fit by channel, in float64.

    Args:
        source, target: samples of the unwanted and the wanted texts; of unequal numbers, the larger is resampled at the
            smaller one's quantiles for the slope. Means are those of all rows.
        quantile: share of the source beyond either end of its support; 0 takes its smallest and largest value.

    Raises:
        ValueError: an unknown kind, fewer than two rows, rows that are not finite, a quantile outside [0, 0.5).
    """
    if not 0 <= quantile < 0.5:
        raise ValueError(f"quantile={quantile}: give a share from 0 to below 0.5.")
    if kind not in ("linear", "mean", "gaussian"):
        raise ValueError(f"kind={kind!r}: give 'linear', 'mean' or 'gaussian'.")
    a, b = source.detach().double(), target.detach().double()
    if min(len(a), len(b)) < 2 or not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise ValueError(f"{len(a)} and {len(b)} rows: give at least two finite ones of each.")
    centre, aim = a.mean(0), b.mean(0)
    if kind == "mean":
        gain = torch.ones_like(centre)
    elif kind == "gaussian":
        spread = a.std(0)
        gain = torch.where(spread > 0, b.std(0) / spread.clamp_min(1e-300), 1.0)
    else:
        n = min(len(a), len(b))
        shares = (torch.arange(n, dtype=torch.float64) + 0.5) / n
        one, other = (_at_quantiles(x.sort(dim=0).values, shares) for x in (a, b))
        one, other = one - one.mean(0), other - other.mean(0)
        variance, covariance = one.square().mean(0), (one * other).mean(0)
        gain = torch.where(variance > 1e-16 * (1 + centre.square()), covariance / variance.clamp_min(1e-300), 1.0)
    ends = torch.tensor([quantile, 1 - quantile], dtype=torch.float64)
    low, high = torch.quantile(a, ends, dim=0) if quantile else (a.amin(0), a.amax(0))
    return ChannelMap(gain.float(), (aim - gain * centre).float(), low.float(), high.float())


def _at_quantiles(ordered: Tensor, shares: Tensor) -> Tensor:
    """Sorted rows at these shares: the rows themselves where there are as many."""
    if len(ordered) == len(shares):
        return ordered
    place = (shares * len(ordered) - 0.5).clamp(0, len(ordered) - 1)
    below = place.floor().long()
    above = (below + 1).clamp(max=len(ordered) - 1)
    part = (place - below)[:, None]
    return (1 - part) * ordered[below] + part * ordered[above]


def transport_maps(
    model: LoadedModel,
    wanted: Sequence[Any],
    unwanted: Sequence[Any],
    sites: Sequence[str],
    kind: Kind = "linear",
    *,
    order: Literal["incremental", "at once"] = "incremental",
    extraction: str = "mean",
    quantile: float = 0.0,
    names: tuple[str, str] = ("wanted", "unwanted"),
    positions: Positions = "all",
    progress: bool = True,
    **options: Any,
) -> Artefact:
    """Maps of several sites; strength is lambda.

    Args:
        sites: in the order in which the model computes them, such as mlp_out of some layers.
        order: "incremental" fits each map on source texts steered by the maps before it (one pass per site); "at once"
            fits all on the unsteered model (one pass).
        extraction: which vector stands for a text: "mean" over its tokens, or "last".
        quantile: of `channel_map`; the mean map acts everywhere.
        options: of `capture`.

    Raises:
        ValueError: another order, sites that are not in the model's order, no texts of a side.
    """
    if order not in ("incremental", "at once"):
        raise ValueError(f"order={order!r}: give 'incremental' or 'at once'.")
    if not len(wanted) or not len(unwanted):
        raise ValueError(f"{len(wanted)} wanted and {len(unwanted)} unwanted texts: a map needs both.")
    places = require_order(sites)
    anatomy_of(model).expand(places)
    target = capture(model, list(wanted), places, extraction, progress=False, **options)
    source = None
    if order == "at once":
        source = capture(model, list(unwanted), places, extraction, progress=False, **options)
    maps: list[ChannelMap] = []
    for number, site in enumerate(tqdm(places, desc="maps", disable=not progress)):
        if source is None:
            before = Steering(_interventions(places[:number], maps, kind, positions)).edits(model) if maps else {}
            held = capture(model, list(unwanted), [site], extraction, edits=before, progress=False, **options)
        else:
            held = source
        maps.append(channel_map(held[site].flatten(1), target[site].flatten(1), kind, quantile=quantile))
    tensors = {"gain": torch.stack([m.gain for m in maps]), "bias": torch.stack([m.bias for m in maps])}
    if kind != "mean":
        tensors |= {"low": torch.stack([m.low for m in maps]), "high": torch.stack([m.high for m in maps])}
    return Artefact(
        "affine",
        places,
        tensors,
        method=f"{kind.capitalize()}-AcT",
        positive=names[0],
        negative=names[1],
        extraction=extraction,
        positions=positions,
        counts=(len(wanted), len(unwanted)),
        facts=made_on(model, order=order),
    )


def _interventions(
    sites: Sequence[str], maps: Sequence[ChannelMap], kind: Kind, positions: Positions
) -> list[Intervention]:
    found = []
    for site, one in zip(sites, maps, strict=True):
        ends = {} if kind == "mean" else {"low": one.low, "high": one.high}
        found.append(Intervention(site, Affine(one.gain, one.bias, **ends), positions))
    return found


def film_of_classes(
    source: Float[Tensor, "row d"], target: Float[Tensor, "other d"]
) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"]]:
    """FiLM's gamma and beta that match mean and deviation of two classes: the Gaussian map in its own words."""
    found = channel_map(source, target, "gaussian")
    return found.gain, found.bias


def retained_variance(source: Float[Tensor, "row d"], target: Float[Tensor, "row d"]) -> Float[np.ndarray, " d"]:
    """Squared correlation of the two sorted samples: the share of the target's variance that the linear map reaches."""
    a, b = source.double().sort(dim=0).values, target.double().sort(dim=0).values
    a, b = a - a.mean(0), b - b.mean(0)
    return ((a * b).sum(0).square() / (a.square().sum(0) * b.square().sum(0)).clamp_min(1e-300)).numpy()

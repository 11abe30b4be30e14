"""Where a direction of the residual stream comes from: the depth at which it appears, and what later blocks carried.

    found = direction_origin(moments, probe_weights, "resid_post.20", names=["truth"])
    found.appears                                          # one row per direction
    found.table                                            # one row per direction and depth

For a direction u read at target t, over the depths l = 0..t (r_0, r_1, ... in the same coordinates):

    carried_to_target[l]      R2_u(l -> t): the share of u's variance at t that is an affine image of r_l; 1 at t
    made_at[l]                R2_u(l -> t) - R2_u(l-1 -> t): the share that block l made available; sums to 1 over l
    carried_from_previous[l]  R2_u(l-1 -> l): of u as it is read at l, the share that is an affine image of r_{l-1}
    identity_to_target[l]     R2 of r_l.u itself as the guess: high where u lies in the stream as it will be read
    appears                   the first l whose R2_u(l -> t) is above one half (with texts: the lower end of it)

Where carried_to_target is high and identity_to_target is not, what will be u is there along other directions. The
variance of r_l.u, per token, tells whether carried_from_previous speaks of anything. Readouts are fitted on the fit
shard, strengths chosen on validation, R2 taken on test. Controls: `controls` random directions drawn with the target's
covariance, whose central 95 % are a band; with `shuffled`, readouts of sources of other documents.
Given texts, R2 are of those, with intervals over documents; the controls stay those of the test shard.

Beware: made_at can be negative by estimation noise, or where block l hides linearly what r_{l-1} had.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.lenses.depths import depth_of, in_order
from microtome.lenses.linear_map import LinearMap
from microtome.lenses.map_scores import map_scores
from microtome.lenses.pair_splits import SHARDS, MomentSource, PairSplits, pair_splits
from microtome.lenses.short_repr import short_repr
from microtome.lenses.transport.direction_readouts import ReadoutSource, projected
from microtome.lenses.transport.direction_rows import names_by_site, unit_rows
from microtome.lenses.transport.origin_intervals import OriginReadouts, origin_intervals

_USED = 0.1  # of the variance at the target
_BAND = (2.5, 50.0, 97.5)
_KINDS = ("carried_to_target", "made_at", "carried_from_previous")


@dataclass(frozen=True, eq=False)
class DirectionOrigin:
    """Origins of directions of one target.

    Attributes:
        table: one row per direction and depth: direction, name, site, depth, carried_to_target, made_at,
            carried_from_previous (NaN at the first depth), identity_to_target, variance; of the first three also
            _control_low, _control (median) and _control_high; shuffled_to_target where asked for; with texts _low and
            _high of the first three.
        appears: one row per direction: direction, name, target, appears (site), depth, carried_to_target there;
            made_most (the site of the largest made_at) and made_there; least_carried and least_carried_at, the
            smallest carried_from_previous of the depths behind it at which u has a tenth of its variance at the target
            or more; NaN and "" where there is none.
        facts: threshold, controls, count of fit and test rows, scored ("test shard" or "texts").
    """

    table: pd.DataFrame
    appears: pd.DataFrame
    facts: Mapping[str, Any] = field(default_factory=dict)

    __repr__ = short_repr

    def to_frame(self) -> pd.DataFrame:
        """One row per direction and depth."""
        return self.table

    def matrix(self, value: str = "carried_to_target") -> pd.DataFrame:
        """One column of the table, directions down and depths across.

        Raises:
            KeyError: there is no such column.
        """
        if value not in self.table:
            raise KeyError(f"the table has no column {value!r}; it has {list(self.table.columns)}.")
        sites = list(dict.fromkeys(self.table["site"]))
        return self.table.pivot(index="direction", columns="site", values=value)[sites]


def direction_origin(
    moments: MomentSource,
    directions: Float[Tensor, "direction width"] | Float[Tensor, " width"],
    target: str | Site,
    *,
    names: Sequence[str] | None = None,
    sites: Sequence[Any] | None = None,
    stratum: str = "rest",
    shards: Sequence[Any] = SHARDS,
    strengths: Sequence[int | float] | None = None,
    threshold: float = 0.5,
    controls: int = 64,
    shuffled: bool = False,
    seed: int = 0,
    model: LoadedModel | nn.Module | None = None,
    texts: Any = None,
    documents: Iterable[Any] | None = None,
    draws: int = 1000,
    **encoding: Any,
) -> DirectionOrigin:
    """Trace directions back through the depths.

    Args:
        moments: of the residual stream, with every depth's pairs with the next and with the target.
        directions: u, of any length, in the channels of the stream.
        target: where they are read.
        names: of the directions; their numbers if None.
        sites: depths to look at, the target among them; every depth of the moments up to the target if None.
        stratum, shards: as of `pair_splits`.
        strengths: of the readouts.
        threshold: R2 above which a direction has appeared.
        controls: how many random directions, 0 for none.
        shuffled: a control that needs moments with the shuffled pairing.
        seed: of controls and draws.
        model, texts, documents, draws, encoding: held-out texts for R2 with intervals, as of `feature_transport`.

    Raises:
        ValueError: directions of another width, of length 0 or not finite, a target that is no depth of the moments
            or the first of them, texts without a model, what `pair_splits` raises.
        KeyError: pairs that the moments do not hold.
    """
    if (texts is None) != (model is None):
        raise ValueError("give both the model and the texts, or neither: without them R2 are of the test shard.")
    if not 0 < threshold < 1 or controls < 0 or draws < 1:
        raise ValueError(
            f"threshold={threshold} is to lie between 0 and 1, controls={controls} to be 0 or more, draws={draws} to "
            "be 1 or more."
        )
    target = str(Site.parse(target))
    depths = _depths(moments, target, sites)
    first = pair_splits(moments, depths[-2], target, stratum, shards=shards)
    rows = unit_rows(directions, target, first.fit.d_out)
    known = names_by_site(names, {target: rows})[target]
    drawn = _control_rows(first.fit.yy, controls, seed)
    everything = torch.cat([rows, drawn])
    found = _from_moments(moments, depths, everything, stratum, shards, strengths, shuffled)
    chosen = slice(0, len(rows))
    bands = {kind: np.percentile(found[kind][:, len(rows) :], _BAND, axis=1) for kind in _KINDS} if controls else {}
    values = {kind: value[:, chosen] for kind, value in found.items() if isinstance(value, np.ndarray)}
    facts = {"threshold": threshold, "controls": controls, "scored": "test shard", "fit_rows": first.fit.count}
    facts |= {"rows": first.test.count}
    if texts is not None:
        readouts = OriginReadouts(depths, rows, *(_first_columns(found[n], len(rows)) for n in ("to", "before")))
        values |= origin_intervals(
            readouts,
            moments,
            model,
            texts,
            documents,
            stratum=stratum,
            shards=shards,
            draws=draws,
            seed=seed,
            **encoding,
        )
        facts |= {"scored": "texts", "rows": int(values.pop("rows"))}
    table = _table(depths, known, values, bands)
    return DirectionOrigin(table, _appears(table, target, threshold), facts)


def _from_moments(
    moments: MomentSource,
    depths: list[str],
    rows: Float64[Tensor, "direction width"],
    stratum: str,
    shards: Sequence[Any],
    strengths: Sequence[int | float] | None,
    shuffled: bool,
) -> dict[str, Any]:
    """By name `[depth, direction]`; "to" and "before": the maps from each depth to the target and to the next."""
    target, count = depths[-1], len(depths)
    names = ["carried_to_target", "carried_from_previous", "identity_to_target", "variance"]
    found: dict[str, Any] = {name: np.full((count, len(rows)), np.nan) for name in names}
    found["carried_to_target"][-1] = found["identity_to_target"][-1] = 1
    found |= {"to": [], "before": []}
    if shuffled:
        found["shuffled_to_target"] = np.full((count, len(rows)), np.nan)
    for place, (source, after) in enumerate(pairwise(depths)):
        raw = pair_splits(moments, source, target, stratum, shards=shards)
        shared, here = ReadoutSource.of(raw), projected(raw, rows)
        to = before = shared.readouts(here, strengths)
        following = here
        if after != target:
            following = projected(pair_splits(moments, source, after, stratum, shards=shards), rows)
            before = shared.readouts(following, strengths)
        found["carried_to_target"][place] = to.r2.numpy()
        found["carried_from_previous"][place + 1] = before.r2.numpy()
        found["identity_to_target"][place] = _identity_r2(here, rows)
        found["variance"][place] = ((rows @ raw.test.xx) * rows).sum(1).numpy() / raw.test.count
        found["variance"][place + 1] = following.test.yy.diagonal().numpy() / following.test.count
        found["to"].append(to.map)
        found["before"].append(before.map)
        if shuffled:
            pairs = pair_splits(moments, source, target, stratum, shards=shards, shuffled=True)
            control = ReadoutSource.of(pairs).readouts(projected(pairs, rows), strengths)
            found["shuffled_to_target"][place] = control.r2.numpy()
    found["made_at"] = np.diff(found["carried_to_target"], axis=0, prepend=0)
    return found


def _identity_r2(splits: PairSplits, rows: Tensor) -> np.ndarray:
    if splits.fit.d_in != rows.shape[1]:
        return np.full(len(rows), np.nan)
    copy = LinearMap(rows.T.contiguous(), torch.zeros(len(rows), dtype=torch.float64), "identity")
    each = torch.eye(len(rows), dtype=torch.float64)
    return map_scores(copy, splits.test, splits.fit, directions=each).r2_directions.numpy()


def _first_columns(maps: Sequence[LinearMap], count: int) -> list[LinearMap]:
    return [LinearMap(found.weight[:, :count], found.intercept[:count], found.kind) for found in maps]


def _depths(moments: MomentSource, target: str, sites: Sequence[Any] | None) -> list[str]:
    held = [str(site) for site in (moments.sites if sites is None else sites)]
    if target not in held:
        raise ValueError(f"{target} is not among the sites {held[:8]}. Take moments of it, or name it in `sites`.")
    end = depth_of(target)
    depths = [str(site) for site in in_order(held) if depth_of(site) < end]
    if not depths:
        raise ValueError(f"{target} is the first depth of these moments, so nothing comes before it.")
    return [*depths, target]


def _control_rows(
    products: Float64[Tensor, "width width"], controls: int, seed: int
) -> Float64[Tensor, "control width"]:
    """Unit directions drawn with this covariance."""
    values, axes = torch.linalg.eigh(products)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(controls, len(values), generator=generator, dtype=torch.float64)
    rows = (drawn * values.clamp_min(0).sqrt()) @ axes.T
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)


def _table(
    depths: list[str], names: list[str], values: Mapping[str, np.ndarray], bands: Mapping[str, np.ndarray]
) -> pd.DataFrame:
    frames = []
    for number, name in enumerate(names):
        columns: dict[str, Any] = {
            "direction": number,
            "name": name,
            "site": depths,
            "depth": [depth_of(site) for site in depths],
        }
        order = [kind + end for kind in _KINDS for end in ("", "_low", "_high")]
        order += ["identity_to_target", "shuffled_to_target", "variance"]
        columns |= {kind: values[kind][:, number] for kind in order if kind in values}
        for kind, band in bands.items():
            columns |= dict(zip((f"{kind}_control_low", f"{kind}_control", f"{kind}_control_high"), band, strict=True))
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def _appears(table: pd.DataFrame, target: str, threshold: float) -> pd.DataFrame:
    by = "carried_to_target_low" if "carried_to_target_low" in table else "carried_to_target"
    rows = []
    for number, part in table.groupby("direction", sort=False):
        part = part.reset_index(drop=True)
        place = int((part[by] > threshold).to_numpy().argmax()) if (part[by] > threshold).any() else len(part) - 1
        is_used = part["variance"] >= _USED * part["variance"].iloc[-1]
        made, later = int(part["made_at"].argmax()), part["carried_from_previous"][is_used & (part.index > place)]
        rows.append(
            {
                "direction": number,
                "name": part["name"][0],
                "target": target,
                "appears": part["site"][place],
                "depth": part["depth"][place],
                "carried_to_target": part["carried_to_target"][place],
                "made_most": part["site"][made],
                "made_there": part["made_at"][made],
                "least_carried": later.min() if len(later) else np.nan,
                "least_carried_at": part["site"][int(later.idxmin())] if later.notna().any() else "",
            }
        )
    return pd.DataFrame(rows)

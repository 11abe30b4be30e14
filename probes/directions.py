"""Do direction finders agree? The table of cosines among all of them on one data set, at every site.

For each pair (u, v) of finders, fitted on the same rows:

    cosine              |u . v|
    whitened_cosine     |u' Sigma v| / sqrt(u' Sigma u  v' Sigma v), Sigma = Cov(x): the angle as the data sees it
    score_correlation   of u . x and v . x on held-out rows, u and v fitted without them; mean over folds, sign kept
    chance              sqrt(2 / (pi d)), the mean |cos| of two random directions in d dimensions

and for each finder alone the AUROC of u . x on held-out rows, and its own stability: |cos| of what it finds on
resampled groups with what it finds on all rows. Bands are percentiles over draws of whole groups with replacement,
every finder fitted anew on each.

Beware: two noisy estimates of one direction can have cosine 0.3 and rank rows alike, and directions may differ much in
the raw metric and not at all in the whitened one: read the three columns together, and against each finder's stability.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from microtome.probes.direction_finders import Finder, find_directions
from microtome.probes.folds import grouped_folds
from microtome.probes.labelled_rows import labelled_rows
from microtome.probes.metrics import fold_auroc
from microtome.probes.table_html import table_html

MAX_REDRAWS = 100


@dataclass(frozen=True, eq=False)
class DirectionTable:
    """How direction finders agree.

    Attributes:
        pairs: one row per site and pair of finders: site, kind, layer, head, first, second, cosine, cosine_low,
            cosine_high, whitened_cosine (with _low and _high), score_correlation, chance.
        finders: one row per site and finder: site, kind, layer, head, finder, auroc (held out), stability (median |cos|
            of the draws with the direction of all rows), stability_low.
        directions: by site name and finder, the unit vector `[feature]` found on all rows; class 1 is positive.
    """

    pairs: pd.DataFrame
    finders: pd.DataFrame
    directions: dict[str, dict[str, Float64[Tensor, " feature"]]]

    def __repr__(self) -> str:
        best = self.finders.loc[self.finders["auroc"].idxmax()]
        return (
            f"DirectionTable({len(self.directions)} sites, {self.finders['finder'].nunique()} finders, median |cosine| "
            f"{self.pairs['cosine'].abs().median():.2f}; best {best['finder']} at {best['site']} AUROC "
            f"{best['auroc']:.3f}, stability {best['stability']:.2f})"
        )

    def _repr_html_(self) -> str:
        return table_html(repr(self), self.pairs)

    def matrix(self, site: str, value: str = "cosine") -> pd.DataFrame:
        """Finders by finders at one site, 1 on the diagonal.

        Raises KeyError for a site or column that is not there.
        """
        some = self.pairs[self.pairs["site"] == site]
        if some.empty or value not in some:
            raise KeyError(f"no {value!r} at {site!r}; sites {list(self.directions)}, columns {list(self.pairs)}.")
        names = list(self.directions[site])
        found = pd.DataFrame(np.eye(len(names)), index=names, columns=names)
        for first, second, number in zip(some["first"], some["second"], some[value], strict=True):
            found.loc[first, second] = found.loc[second, first] = number
        return found


def direction_table(
    activations,
    labels,
    *,
    groups,
    sites=None,
    finders: Sequence[str] | None = None,
    own: Mapping[str, Finder] | None = None,
    pairs=None,
    folds: int = 5,
    draws: int = 20,
    level: float = 0.95,
    seed: int = 0,
) -> DirectionTable:
    """Fit every finder at every site on all rows, on training rows of folds and on resampled groups, and compare.

    Args:
        activations: Activations, or a mapping of names to arrays `[row, d]` or `[row, head, d]`.
        labels: one of two values per row, or a column; the larger one is class 1.
        groups: one key per row, a column, or "rows": whole groups are held out and resampled.
        finders: names of `direction_finders`; None for all. "pca_difference" uses `pairs` where given.
        own: further finders (`find_directions` says what they are), such as CCS where there are pairs.
        pairs: `[pair, 2]` rows of class 0 and class 1 that belong together, both of one group.
        draws: resampled fits for the bands; 0 leaves them out.

    Raises ValueError for other labels than two values, groups and folds that cannot be, pairs across groups or out of
    range, and what `find_directions` and `site_blocks` refuse.
    """
    data = labelled_rows(activations, labels, groups=groups, sites=sites, target="binary")
    n_rows, positive, codes = len(data.rows), data.target.values, data.groups
    pairs = None if pairs is None else _checked_pairs(pairs, codes, n_rows)
    test = torch.from_numpy(grouped_folds(positive.numpy().astype(np.int64), codes, folds=folds, seed=seed))
    names = None if finders is None else tuple(finders)
    if names is not None and len(names) + len(own or {}) < 2:
        raise ValueError(f"finders is {list(names)}; a table compares at least two.")
    resampled = _resampled_rows(positive, codes, draws, seed)

    def fitted(features: Tensor, rows: Tensor, number: int) -> dict[str, Tensor]:
        some = None if pairs is None else _pairs_within(pairs, rows, n_rows)
        if some is not None and not len(some):
            raise ValueError("No pair has both rows in a training or resampled set. Give more pairs, or fewer folds.")
        return find_directions(
            features[:, rows], positive[rows], finders=names, own=own, pairs=some, seed=seed + 1000 * number
        )

    pair_rows, finder_rows, directions = [], [], {}
    for block in data.blocks:
        features = block.features.double()
        whole = fitted(features, torch.arange(n_rows), 0)
        found = list(whole)
        at_folds = [fitted(features, (~rows).nonzero()[:, 0], 0) for rows in test]
        at_draws = [fitted(features, rows, 1 + number) for number, rows in enumerate(resampled)]
        covariance = torch.stack([site.T.cov(correction=0) for site in features])
        scores = torch.full((len(found), len(features), n_rows), torch.nan, dtype=torch.float64)
        correlations = []
        for rows, some in zip(test, at_folds, strict=True):
            here = torch.einsum("fsd,sed->fse", torch.stack([some[name] for name in found]), features[:, rows])
            scores[:, :, rows] = here
            correlations.append(_correlations(here))
        correlation = torch.stack(correlations).mean(0)
        held_out = fold_auroc(scores, positive, test)
        cosines = [_cosines(some, None) for some in (whole, *at_draws)]
        whitened = [_cosines(some, covariance) for some in (whole, *at_draws)]
        stability = [torch.stack([(some[name] * whole[name]).sum(1).abs() for name in found]) for some in at_draws] or [
            torch.full((len(found), len(features)), torch.nan, dtype=torch.float64)
        ]
        chance = float(np.sqrt(2 / (np.pi * block.width)))
        for number, site in enumerate(block.probes):
            place = {"site": str(site), "kind": site.kind, "layer": site.layer, "head": site.head}
            directions[str(site)] = {name: whole[name][number] for name in found}
            for first, second in combinations(range(len(found)), 2):
                at = (number, first, second)
                pair_rows.append(
                    place
                    | {"first": found[first], "second": found[second]}
                    | _with_band("cosine", [float(c[at]) for c in cosines], level)
                    | _with_band("whitened_cosine", [float(c[at]) for c in whitened], level)
                    | {"score_correlation": float(correlation[at]), "chance": chance}
                )
            for which, name in enumerate(found):
                own_cosines = torch.stack([some[which, number] for some in stability])
                finder_rows.append(
                    place
                    | {"finder": name, "auroc": float(held_out[which, number])}
                    | {"stability": float(own_cosines.median())}
                    | {"stability_low": float(own_cosines.quantile((1 - level) / 2))}
                )
    whole_numbers = {"layer": "Int64", "head": "Int64"}
    return DirectionTable(
        pd.DataFrame(pair_rows).astype(whole_numbers), pd.DataFrame(finder_rows).astype(whole_numbers), directions
    )


def _cosines(found: dict[str, Tensor], metric: Tensor | None) -> Float64[Tensor, "site finder other"]:
    """|u' M v| at length 1 in the metric M (None: 1); 0 for a direction of zeros."""
    stacked = torch.stack(list(found.values()), 1)
    inner = stacked @ stacked.mT if metric is None else stacked @ metric @ stacked.mT
    length = inner.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
    length = torch.where(length > 0, length, 1.0)
    return (inner / length[:, :, None] / length[:, None, :]).abs().clamp(max=1)


def _correlations(scores: Float64[Tensor, "finder site example"]) -> Float64[Tensor, "site finder other"]:
    """Of the finders' scores over rows, sign kept; 0 for a constant score."""
    centred = (scores - scores.mean(-1, keepdim=True)).transpose(0, 1)
    norm = centred.norm(dim=-1, keepdim=True)
    unit = centred / torch.where(norm > 0, norm, 1.0)
    return unit @ unit.mT


def _with_band(name: str, values: list[float], level: float) -> dict[str, float]:
    """The first value, and percentiles of the others (NaN without any)."""
    low, high = (np.nan, np.nan) if len(values) == 1 else np.quantile(values[1:], [(1 - level) / 2, (1 + level) / 2])
    return {name: values[0], f"{name}_low": float(low), f"{name}_high": float(high)}


def _resampled_rows(positive: Bool[Tensor, " example"], codes: np.ndarray, draws: int, seed: int) -> list[Tensor]:
    """Rows of groups drawn with replacement, a group as often as it was drawn; both classes in every draw."""
    rng = np.random.default_rng(seed)
    members = np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1])
    found = []
    for _ in range(draws):
        for _ in range(MAX_REDRAWS):
            drawn = rng.integers(len(members), size=len(members))
            rows = torch.from_numpy(np.concatenate([members[group] for group in drawn]))
            if positive[rows].any() and not positive[rows].all():
                break
        else:
            raise ValueError("Too few groups carry one of the classes for a bootstrap; add groups, or pass draws=0.")
        found.append(rows)
    return found


def _checked_pairs(pairs, codes: np.ndarray, n_rows: int) -> Int[Tensor, "kept 2"]:
    pairs = torch.as_tensor(np.asarray(pairs), dtype=torch.int64)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or not len(pairs):
        raise ValueError(f"pairs has shape {tuple(pairs.shape)}; expected [pair, 2] row numbers, at least one pair.")
    if int(pairs.min()) < 0 or int(pairs.max()) >= n_rows:
        raise ValueError(f"pairs name rows {int(pairs.min())} to {int(pairs.max())}; there are {n_rows}, from 0.")
    if (split := codes[pairs[:, 0]] != codes[pairs[:, 1]]).any():
        raise ValueError(
            f"pair {int(split.argmax())} has its rows in two groups, so that a fold could hold out one of them. Give "
            "both rows one group."
        )
    return pairs


def _pairs_within(pairs: Int[Tensor, "pair 2"], rows: Int[Tensor, " drawn"], n_rows: int) -> Int[Tensor, "kept 2"]:
    """The pairs both rows of which are among `rows`, as places in `rows`; as often as they were drawn."""
    places: list[list[int]] = [[] for _ in range(n_rows)]
    for place, row in enumerate(rows.tolist()):
        places[row].append(place)
    found = [both for a, b in pairs.tolist() for both in zip(places[a], places[b], strict=True)]
    return torch.tensor(found, dtype=torch.int64).reshape(-1, 2)

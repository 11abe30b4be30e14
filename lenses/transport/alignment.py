"""How alike two models' representations are, layer by layer, from moments of the same tokens in both.

    moments = moments_of_models({"a": model, "b": other}, texts, documents=documents, shuffled=True)
    found = alignment(moments, "a", "b")
    found.matrix("r2_vw")                       # layers of a down, layers of b across: what a says linearly of b
    found.matrix("back_r2_vw")                  # what b says of a

For each pair of sites (x of the one model, y of the other), all on the test shard:

    r2_*            ridge map x -> y (`ridge_pairs`);  back_r2_*  y -> x.  They differ where one holds more
    cka             |S_xy|^2 / (|S_xx| |S_yy|), Frobenius norms of centred products (Kornblith et al. 2019)
    cka_null        its mean over all pairings of the rows: tr S_xx tr S_yy / ((N-1) |S_xx| |S_yy|)
    cka_two         <S_xy, S'_xy> / sqrt(<S_xx, S'_xx> <S_yy, S'_yy>), S of the fit, S' of the test shard: 0 on average
                    for independent sites, however few the rows, as two shards share no noise
    canonical       mean r^2 of canonical directions frozen on the fit shard, of the narrower site's rank
    procrustes      R2 of the rotation with one scale from the narrower to the wider site (`back_` in the other order)

CKA and Procrustes are 1 for a rotated copy only; ridge and canonical correlations for any invertible linear one.

What each has to beat stands beside it. `shuffled_*`: y of another document at the same position. `lexical_*`: ridge
from r_0, the source model's own embedding of the token, to y; and beyond_r2 = (R2(x) - R2(r_0)) / (1 - R2(r_0)), since
much of what two models share is which token it is. A target with random weights (`untrained`) is a pair of its own.
Beware: r_0 says linearly what its d channels hold of the token's identity, not all of it, and includes positions where
they are added to it; an x that forgot r_0 has beyond_r2 below 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm

from microtome.lenses.canonical import canonical_correlations
from microtome.lenses.linear_map import LinearMap
from microtome.lenses.map_scores import map_scores
from microtome.lenses.pair_matrix import pair_matrix
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.pair_splits import SHARDS, MomentSource, PairSplits, pair_splits
from microtome.lenses.ridge_pairs import Pair, RidgePairs, ridge_pairs
from microtome.lenses.short_repr import short_repr
from microtome.lenses.simple_maps import procrustes_map

_KINDS = ("r2_vw", "r2_ua", "r2_wh")
_EMBEDDING = "resid_pre.0"


@dataclass(frozen=True, eq=False)
class Alignment:
    """Of every site of one model with every site of another.

    Attributes:
        table: one row per pair, see the module: source, target, r2_vw, r2_ua, r2_wh, identity_r2_vw (NaN where widths
            differ) and back_ of each, cka, cka_null, cka_two, canonical, canonical_above_edge (directions), procrustes
            and back_procrustes; lexical_ and beyond_ of r2_vw, r2_wh and back_ of these, NaN where r_0 is not there;
            shuffled_ of r2_vw, back_r2_vw, cka, canonical where moments hold the shuffled pairing; strength,
            back_strength, count, test_count.
        sources, targets: names, in order of depth.
        maps: source to target, where they were asked for.
        back_maps: target to source, by (target, source).
    """

    table: pd.DataFrame
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    maps: Mapping[Pair, LinearMap] = field(default_factory=dict)
    back_maps: Mapping[Pair, LinearMap] = field(default_factory=dict)

    __repr__ = short_repr

    def to_frame(self) -> pd.DataFrame:
        """One row per pair."""
        return self.table

    def matrix(self, value: str = "r2_vw") -> pd.DataFrame:
        """One column as a matrix, sources down and targets across, in order of depth.

        Raises:
            KeyError: there is no such column.
        """
        return pair_matrix(self.table, value, self.sources, self.targets)

    def reversed(self) -> "Alignment":
        """Source and target exchanged: the same numbers under each other's names."""
        swapped = {"source": "target", "target": "source"}
        for name in self.table.columns:
            for lead in ("", "lexical_", "beyond_", "shuffled_"):
                if name.startswith(f"{lead}back_"):
                    forward = lead + name.removeprefix(f"{lead}back_")
                    swapped |= {name: forward, forward: name}
        table = self.table.rename(columns=swapped)[list(self.table.columns)]
        order = {pair: number for number, pair in enumerate((a, b) for a in self.targets for b in self.sources)}
        rank = [order[pair] for pair in zip(table["source"], table["target"], strict=True)]
        table = table.iloc[sorted(range(len(rank)), key=rank.__getitem__)].reset_index(drop=True)
        return Alignment(table, self.targets, self.sources, self.back_maps, self.maps)


def alignment(
    moments: MomentSource,
    sources: str | Sequence[Any],
    targets: str | Sequence[Any],
    *,
    strengths: Sequence[int | float] | None = None,
    penalty: str = "isotropic",
    select: str | None = None,
    refit: bool = False,
    stratum: str = "rest",
    shards: Sequence[Any] = SHARDS,
    lexical: bool | tuple[str, str] = True,
    canonical: bool = True,
    procrustes: bool = True,
    keep_maps: bool = False,
    progress: bool = False,
) -> Alignment:
    """Compare every source with every target, in both directions.

    Args:
        moments: which hold the pairs, from `moments_of_models` or `moments_of_aligned`.
        sources, targets: the model's name ("a" stands for all its sites "a/..."), or names of sites.
        strengths, penalty, select, refit, stratum, shards: as of `ridge_pairs`.
        lexical: regress on r_0 too: "model/resid_pre.0" of both sides where the moments hold it, or the names of two
            other sites, such as ("a/embed", "b/embed").
        canonical, procrustes: canonical correlations and Procrustes, which take most of the time.
        keep_maps: whether weights are kept, 16 d_in d_out bytes per pair.
        progress: show bars.

    Raises:
        ValueError: no sites of that name, a site on both sides, and what `ridge_pairs` raises.
        KeyError: a pair that the moments do not hold.
    """
    sources, targets = _sites(moments, sources), _sites(moments, targets)
    if both := [name for name in sources if name in targets]:
        raise ValueError(f"{both[0]} is a source and a target. Give sites of two models, or of two captures.")
    pairs = [(x, y) for x in sources for y in targets]
    options: dict[str, Any] = {
        "strengths": strengths,
        "penalty": penalty,
        "select": select,
        "refit": refit,
        "stratum": stratum,
        "shards": shards,
        "progress": progress,
    }
    roots = _embeddings(moments, sources, targets, lexical)
    there = _ridges(moments, pairs, roots[0], options, keep_maps)
    back = _ridges(moments, [(y, x) for x, y in pairs], roots[1], options, keep_maps)
    columns = [_directed(there, pairs, roots[0], ""), _directed(back, [(y, x) for x, y in pairs], roots[1], "back_")]
    names = pd.DataFrame(pairs, columns=["source", "target"])
    rows = []
    with tqdm(total=len(pairs), desc="alignment", unit="pair", disable=not progress) as bar:
        for x, y in pairs:
            splits = pair_splits(moments, x, y, stratum, shards=shards)
            rows.append(_symmetric(splits.joined() if refit else splits, canonical, procrustes))
            bar.update()
    table = pd.concat([names, *columns, pd.DataFrame(rows)], axis=1)
    if getattr(moments, "is_shuffled", False):
        table = pd.concat([table, _shuffled(moments, pairs, options, canonical)], axis=1)
    kept = (
        {pair: found.maps[pair] for pair in wanted} if keep_maps else {}
        for found, wanted in ((there, pairs), (back, [(y, x) for x, y in pairs]))
    )
    return Alignment(table, tuple(sources), tuple(targets), *kept)


def cka(pair: PairMoments) -> float:
    """|S_xy|^2 / (|S_xx| |S_yy|) of centred products; NaN where a site does not vary."""
    below = float(pair.xx.norm() * pair.yy.norm())
    return float(pair.xy.square().sum()) / below if below > 0 else torch.nan


def cka_null(pair: PairMoments) -> float:
    """Mean of `cka` over all pairings of these rows: what so few rows give where x says nothing of y."""
    below = (pair.count - 1) * float(pair.xx.norm() * pair.yy.norm())
    return float(pair.xx.trace() * pair.yy.trace()) / below if below > 0 else torch.nan


def cka_of_two(one: PairMoments, other: PairMoments) -> float:
    """Linear CKA from products of two sets of independent rows, whose noise does not square; NaN where the estimate of
    a site's own norm is not positive."""
    below = float((one.xx * other.xx).sum() * (one.yy * other.yy).sum())
    return float((one.xy * other.xy).sum()) / below**0.5 if below > 0 else torch.nan


def _sites(moments: MomentSource, wanted: str | Sequence[Any]) -> list[str]:
    known = [str(site) for site in moments.sites]
    if not isinstance(wanted, str):
        names = [str(name) for name in wanted]
    elif wanted in known:
        names = [wanted]
    else:
        names = [name for name in known if name.startswith(f"{wanted}/")]
    if not names or (unknown := [name for name in names if name not in known]):
        models = sorted({name.split("/", 1)[0] for name in known if "/" in name})
        said = repr(wanted) if not names else unknown[0]
        raise ValueError(f"no site is called {said}. Models: {models}; sites: {known[:4]}, {len(known)} in all.")
    return list(dict.fromkeys(names))


def _embeddings(
    moments: MomentSource, sources: list[str], targets: list[str], lexical: bool | tuple[str, str]
) -> tuple[str | None, str | None]:
    """r_0 of each side, None where it is not there."""
    known = [str(site) for site in moments.sites]
    if not isinstance(lexical, bool):
        return _sites(moments, [lexical[0]])[0], _sites(moments, [lexical[1]])[0]
    found = []
    for side in (sources, targets):
        models = {name.rpartition("/")[0] for name in side}
        name = f"{models.pop()}/{_EMBEDDING}" if len(models) == 1 else ""
        found.append(name if lexical and name in known else None)
    return found[0], found[1]


def _ridges(
    moments: MomentSource, pairs: list[Pair], root: str | None, options: dict[str, Any], keep_maps: bool
) -> RidgePairs:
    """Of these pairs and of r_0 with each target."""
    extra = [] if root is None else [(root, y) for y in dict.fromkeys(y for _, y in pairs)]
    return ridge_pairs(moments, list(dict.fromkeys([*pairs, *extra])), keep_maps=keep_maps, **options)


def _directed(found: RidgePairs, pairs: list[Pair], root: str | None, lead: str) -> pd.DataFrame:
    """Columns of one direction, in the order of the pairs."""
    table = found.table.set_index(["source", "target"])
    own = table.loc[pairs].reset_index(drop=True)
    columns = {f"{lead}{kind}": own[kind] for kind in (*_KINDS, "identity_r2_vw", "strength")}
    if not lead:
        columns |= {name: own[name] for name in ("count", "test_count")}
    for kind in ("r2_vw", "r2_wh"):
        of_root = torch.nan if root is None else table.loc[[(root, y) for _, y in pairs], kind].to_numpy()
        columns |= {
            f"lexical_{lead}{kind}": pd.Series(of_root, index=own.index),
            f"beyond_{lead}{kind}": (own[kind] - of_root) / (1 - of_root),
        }
    return pd.DataFrame(columns)


def _symmetric(splits: PairSplits, canonical: bool, procrustes: bool) -> dict[str, float]:
    fit, test = splits.fit, splits.test
    row = {"cka": cka(test), "cka_null": cka_null(test), "cka_two": cka_of_two(fit, test)}
    if canonical:
        row |= _canonical(splits)
    if procrustes:
        row |= {"procrustes": torch.nan, "back_procrustes": torch.nan}
        for name, each in (("procrustes", splits), ("back_procrustes", splits.reversed())):
            if each.fit.d_in <= each.fit.d_out:
                row[name] = map_scores(procrustes_map(each.fit), each.test, each.fit).r2_vw
    return row


def _canonical(splits: PairSplits) -> dict[str, float]:
    found = canonical_correlations(splits.fit, splits.test)
    rank = max(1, min(found.rank_x, found.rank_y))
    return {
        "canonical": float(found.held_out.clamp_min(0).square().sum()) / rank,
        "canonical_above_edge": found.count_above_edge,
    }


def _shuffled(moments: MomentSource, pairs: list[Pair], options: dict[str, Any], canonical: bool) -> pd.DataFrame:
    back_pairs = [(y, x) for x, y in pairs]
    there = ridge_pairs(moments, pairs, shuffled=True, **options).table
    back = ridge_pairs(moments, back_pairs, shuffled=True, **options).table
    rows = []
    for x, y in pairs:
        splits = pair_splits(moments, x, y, options["stratum"], shards=options["shards"], shuffled=True)
        row = {"shuffled_cka": cka(splits.test)}
        rows.append(row | ({"shuffled_canonical": _canonical(splits)["canonical"]} if canonical else {}))
    return pd.concat(
        [
            pd.DataFrame({"shuffled_r2_vw": there["r2_vw"], "shuffled_back_r2_vw": back["r2_vw"]}),
            pd.DataFrame(rows),
        ],
        axis=1,
    )

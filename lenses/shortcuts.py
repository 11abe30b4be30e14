"""Shortcuts: affine maps from one depth straight to a deeper one, instead of the blocks between.

    r_j ~ r_i W_ij + c_ij,   i < j             "jump to conclusions", Yom Din et al. 2023 (arXiv 2303.09435), `mat`

`method="ridge"` has an intercept and a strength chosen on the validation shard. `method="published"` is what the paper
fitted: least squares without either, on the residual stream before the final norm; it wants many rows per channel (the
paper had 11.7 for GPT-2 small and 5.6 for XL). The last depth is the stream that the final norm reads, so a map to it
followed by norm and unembedding is a lens (`translators`).

The same for what attention or the MLP writes: between layers (`deeper_pairs(sites, "attn_out")`), or from what enters
the part (`part_pairs`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm

from microtome.capture.sites import Site
from microtome.lenses.depths import deeper_pairs, depth_of
from microtome.lenses.described_tensors import read_described, write_described
from microtome.lenses.linear_map import LinearMap
from microtome.lenses.map_scores import Reference, map_scores, reference
from microtome.lenses.pair_splits import SHARDS, MomentSource, pair_splits, pairs_held
from microtome.lenses.ridge_map import uncentred_least_squares_map
from microtome.lenses.ridge_pairs import Pair, ridge_pairs
from microtome.lenses.short_repr import short_repr

METHODS = ("ridge", "published")
_FORMAT = 1
TENSORS, FACTS = "shortcuts.safetensors", "shortcuts.json"
_KINDS = ("r2_vw", "r2_ua", "r2_wh", "r2_increment")


@dataclass(frozen=True, eq=False)
class Shortcuts:
    """Maps between depths.

    Attributes:
        maps: by the names of source and target.
        table: one row per map: source, target, method, R2 on the test shard (r2_vw, r2_ua, r2_wh, r2_increment), and
            for ridge everything `ridge_pairs` says.
        method: "ridge" or "published".
        stratum: tokens they were fitted on.
    """

    maps: Mapping[Pair, LinearMap]
    table: pd.DataFrame
    method: str
    stratum: str

    __repr__ = short_repr

    def to_frame(self) -> pd.DataFrame:
        """One row per map."""
        return self.table

    def between(self, source: Any, target: Any) -> LinearMap:
        """The map between two sites.

        Raises:
            KeyError: there is none; the targets that this source has are listed.
        """
        name = str(Site.parse(source)), str(Site.parse(target))
        if name not in self.maps:
            others = [end for begin, end in self.maps if begin == name[0]]
            raise KeyError(f"no shortcut from {name[0]} to {name[1]}; from there they lead to {others}.")
        return self.maps[name]

    def translators(self, target: Any = None) -> dict[Site, LinearMap]:
        """Maps to one depth by their source, first depth first: what a lens reads with. The deepest target if None.

        Raises:
            KeyError: no map leads there.
        """
        ends = {end for _, end in self.maps}
        end = max(ends, key=depth_of) if target is None else str(Site.parse(target))
        if end not in ends:
            raise KeyError(f"no shortcut leads to {end}; they lead to {sorted(ends, key=depth_of)}.")
        sources = sorted((begin for begin, other in self.maps if other == end), key=depth_of)
        return {Site.parse(source): self.maps[source, end] for source in sources}

    def save(self, folder: str | Path) -> None:
        """Write `shortcuts.safetensors` and then `shortcuts.json`; the folder is made."""
        folder, tensors = Path(folder), {}
        for number, found in enumerate(self.maps.values()):
            tensors |= {f"{number}.weight": found.weight, f"{number}.intercept": found.intercept}
        said = {
            "method": self.method,
            "stratum": self.stratum,
            "maps": [found.description for found in self.maps.values()],
            "table": self.table.to_dict("list"),
        }
        write_described(folder / TENSORS, folder / FACTS, tensors, said, number=_FORMAT)

    @classmethod
    def load(cls, folder: str | Path) -> "Shortcuts":
        """Read what `save` wrote, on the CPU.

        Raises:
            FileNotFoundError: there are no shortcuts in this folder.
            ValueError: the files do not belong together, or are of another format.
        """
        folder = Path(folder)
        tensors, facts = read_described(folder / TENSORS, folder / FACTS, number=_FORMAT, again="Fit and save again.")
        maps = [
            LinearMap(tensors[f"{number}.weight"], tensors[f"{number}.intercept"], **description)
            for number, description in enumerate(facts["maps"])
        ]
        table = pd.DataFrame(facts["table"])
        return cls({(found.source, found.target): found for found in maps}, table, facts["method"], facts["stratum"])


def fit_shortcuts(
    moments: MomentSource,
    pairs: Sequence[tuple[Any, Any]] | None = None,
    *,
    method: str = "ridge",
    strengths: Sequence[int | float] | None = None,
    refit: bool = False,
    stratum: str = "rest",
    shards: Sequence[Any] = SHARDS,
    dtype: torch.dtype = torch.float32,
    progress: bool = False,
) -> Shortcuts:
    """Fit shortcuts and score them on the test shard.

    Args:
        moments: of the sites.
        pairs: of source and target; every residual depth with every deeper one that is held if None.
            `pairs_to_last` is enough for a lens.
        method: "ridge", or "published": least squares without intercept.
        strengths, refit: of ridge, as of `ridge_map`.
        stratum: which tokens: "rest" (neither sinks nor BOS), "sinks" or "all". The paper has no strata: "all".
        shards: fit, validation and test, as of `ridge_pairs`.
        dtype: what maps are kept in; they are fitted in float64.
        progress: show a bar.

    Raises:
        ValueError: another method, no pairs, or a shard without rows.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; there are {METHODS}.")
    pairs = pairs_held(moments, deeper_pairs(moments.sites)) if pairs is None else list(pairs)
    if not pairs:
        raise ValueError("there are no pairs. Give at least one (source, target).")
    if method == "ridge":
        found = ridge_pairs(
            moments,
            pairs,
            strengths=strengths,
            refit=refit,
            stratum=stratum,
            shards=shards,
            keep_maps=True,
            map_dtype=dtype,
            progress=progress,
        )
        return Shortcuts(found.maps, found.table.assign(method=method), method, stratum)
    maps: dict[Pair, LinearMap] = {}
    rows, references = [], dict[str, Reference]()
    for source, target in tqdm(pairs, desc="shortcuts", unit="pair", disable=not progress):
        splits, name = pair_splits(moments, source, target, stratum, shards=shards), (str(source), str(target))
        if name[1] not in references:
            references[name[1]] = reference(splits.test, splits.fit.mean_y)
        plain = uncentred_least_squares_map(splits.fit)
        scores = map_scores(plain, splits.test, splits.fit, against=references[name[1]])
        facts = {**plain.facts, "stratum": stratum}
        maps[name] = LinearMap(plain.weight, plain.intercept, plain.kind, *name, facts=facts).to(dtype)
        rows.append(
            {"source": name[0], "target": name[1], **{kind: getattr(scores, kind) for kind in _KINDS}}
            | {"count": splits.fit.count, "tokens_per_channel": splits.fit.count / splits.fit.d_in, "method": method}
        )
    return Shortcuts(maps, pd.DataFrame(rows), method, stratum)

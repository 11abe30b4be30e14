"""One ridge fit after another over many pairs of sites, with the work that pairs share done once.

Shared by the pairs of a source: its axes and the rotated moments of its validation and test rows. Shared by the pairs
of a target: what errors are measured against. What is left for a pair of width d is six products of d x d matrices, 25
strengths included. `ridge_pairs` makes a table of scores of it, `transport.transport_map` one of ceilings and sizes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from microtome.lenses.linear_map import LinearMap
from microtome.lenses.map_scores import MapScores, Reference, increment_total, reference, scores_of_traces
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.pair_splits import SHARDS, MomentSource, PairSplits, pair_splits
from microtome.lenses.ridge_map import map_at
from microtome.lenses.source_basis import SourceBasis, source_basis
from microtome.lenses.strength_path import StrengthPath, squared_errors, strength_path

Pair = tuple[str, str]


@dataclass(frozen=True, eq=False)
class FittedPair:
    """The ridge fit of one pair.

    Attributes:
        name: of source and target.
        splits: what the map was fitted and scored on; fit and validation together where it was refitted.
        basis: axes of the source in that fit shard.
        loadings: C = T^T S_xy in them.
        path: of strengths, and which was taken.
        scores: of the map on the test shard.
        against: what its errors are measured against.
    """

    name: Pair
    splits: PairSplits
    basis: SourceBasis
    loadings: Float64[Tensor, "d_in d_out"]
    path: StrengthPath
    scores: MapScores
    against: Reference

    @property
    def penalty(self) -> float:
        """λ of the map."""
        return self.path.strength * self.basis.unit

    def map(self, stratum: str) -> LinearMap:
        """The map itself, which takes one more product."""
        found = map_at(self.basis, self.loadings, self.splits.fit, self.path.strength, self.penalty)
        facts = {**found.facts, "stratum": stratum, "selected_by": self.path.selected_by, "edge": self.path.edge}
        return LinearMap(found.weight, found.intercept, found.kind, *self.name, found.strength, None, facts)


def fitted_pairs(
    moments: MomentSource,
    pairs: Sequence[tuple[Any, Any]],
    strengths: Float64[Tensor, " strength"],
    *,
    penalty: str = "isotropic",
    select: str | None = None,
    refit: bool = False,
    stratum: str = "rest",
    shards: Sequence[Any] = SHARDS,
    shuffled: bool = False,
) -> Iterator[FittedPair]:
    """Fits in order of sources, each source with its targets as given; arguments and errors as `ridge_pairs`."""
    by_source: dict[str, list[tuple[Any, Any]]] = {}
    for pair in pairs:
        by_source.setdefault(str(pair[0]), []).append(pair)
    references: dict[str, Reference] = {}
    for group in by_source.values():
        shared = None
        for source, target in group:
            name = str(source), str(target)
            splits = pair_splits(moments, source, target, stratum, shards=shards, shuffled=shuffled)
            final = splits.joined() if refit else splits
            shared = _Source.of(splits, final, penalty) if shared is None else shared
            if name[1] not in references:
                references[name[1]] = reference(final.test, final.fit.mean_y)
            against = references[name[1]]
            loadings = shared.chooser.rotated(splits.fit.xy)
            path = _path(shared, splits, loadings, strengths, select)
            loadings = loadings if final is splits else shared.basis.rotated(final.fit.xy)
            scores = _scores(shared, final, loadings, path.strength * shared.basis.unit, against)
            yield FittedPair(name, final, shared.basis, loadings, path, scores, against)


@dataclass(frozen=True, eq=False)
class _Source:
    """What pairs of one source share: the axes in which strengths are compared, with the moments of validation rows in
    them, and those of the maps that are kept, with the moments of test rows; the same axes unless maps are refitted."""

    chooser: SourceBasis
    validation: Float64[Tensor, "d_in d_in"] | None
    basis: SourceBasis
    test: Float64[Tensor, "d_in d_in"]

    @classmethod
    def of(cls, splits: PairSplits, final: PairSplits, penalty: str) -> "_Source":
        chooser, held = source_basis(splits.fit, penalty), splits.validation
        basis = chooser if final is splits else source_basis(final.fit, penalty)
        validation = None if held is None else chooser.gram(_about(held, splits.fit, "xx"))
        return cls(chooser, validation, basis, basis.gram(_about(final.test, final.fit, "xx")))


def _about(part: PairMoments, fit: PairMoments, which: str) -> Tensor:
    """xx or xy of a shard about the fit means."""
    shift_x, shift_y = part.mean_x - fit.mean_x, part.mean_y - fit.mean_y
    return torch.addr(getattr(part, which), shift_x, shift_x if which == "xx" else shift_y, alpha=part.count)


def _path(shared: _Source, splits: PairSplits, loadings: Tensor, strengths: Tensor, select: str | None) -> StrengthPath:
    fit, held, basis = splits.fit, splits.validation, shared.chooser
    errors, total = None, 0.0
    if held is not None:
        total = float(held.yy.trace() + held.count * (held.mean_y - fit.mean_y).square().sum())
        errors = squared_errors(
            basis.damping(strengths.to(fit.xy) * basis.unit),
            loadings,
            loadings @ loadings.T,
            shared.validation,
            basis.transform.T @ _about(held, fit, "xy"),
            total,
        )
    return strength_path(basis, fit, loadings, errors, total, strengths, select)


def _scores(shared: _Source, splits: PairSplits, loadings: Tensor, penalty: float, against: Reference) -> MapScores:
    """As `map_scores`, with the map in the source's axes: A = diag(1/(w+λ)) C."""
    damping = shared.basis.damping_of(penalty)
    inner = damping[:, None] * loadings
    cross = shared.basis.transform.T @ _about(splits.test, splits.fit, "xy")
    # E = S - A^T cross - cross^T A + A^T G A, of which only the diagonal and tr(S^-1 E) are needed
    pulled = torch.addmm(cross, shared.test, inner, beta=-2)
    diagonal = against.total.diagonal() + (inner * pulled).sum(0)
    whitened = against.rank + float((inner @ against.inverse).flatten() @ pulled.flatten())
    increment = increment_total(splits.test, splits.fit)
    return scores_of_traces(float(diagonal.sum()), diagonal, whitened, increment, against)

"""Directions of concepts at a subject, from the inverse of a relation (LRC): is this country one that pays in euro?

    v_o = mean over occurrences of object o of  pinv_r(J) (o - b),  then unit length;      class of s: largest v . s
    edit: s + scale |s| (v_new - v_old)

Chanin, Hunter and Camburu (2024), "Identifying Linear Relational Concepts in Large Language Models", NAACL,
arXiv:2311.08968, section 3; chanind/linear-relational, whose rank is 200 and whose objects come from earlier layers
(`target` of `relation_operator`). A direction needs an operator and examples of its object, no other class: a probe's
direction, here the difference of means of the subjects' states, needs the subjects of all classes.
Beware: v . s is compared between concepts without an intercept, so that a concept whose direction lies along the mean
of all s wins too often; `centre` takes that mean away (the paper does not).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from microtome.capture.dissect import dissect
from microtome.capture.models import LoadedModel
from microtome.lenses.made_for import require_same_weights
from microtome.lenses.relation_prompts import RelationPrompts, relation_prompts
from microtome.lenses.relations import (
    RelationOperator,
    RelationStates,
    edited_logits,
    relation_states,
)
from microtome.lenses.short_repr import short_repr
from microtome.lenses.unembedding import Unembedding, unembedding_of
from microtome.lenses.wilson_interval import wilson_interval

RANKS = (16, 48, 96, 200)


@dataclass(frozen=True, eq=False)
class ConceptDirections:
    """Unit directions of concepts at one depth.

    Attributes:
        names: of the concepts, in alphabetical order.
        vectors: v.
        counts: occurrences averaged over.
        depth: l of the states that they classify.
        centre: what is taken from s before it is compared; zeros in the paper.
    """

    names: tuple[str, ...]
    vectors: Float[Tensor, "concept d_model"]
    counts: tuple[int, ...]
    depth: int
    centre: Float[Tensor, " d_model"]

    __repr__ = short_repr

    def scores(self, subject: Float[Tensor, "example d_model"]) -> Float[Tensor, "example concept"]:
        """v . (s - centre)."""
        return (subject - self.centre) @ self.vectors.T

    def classify(self, subject: Float[Tensor, "example d_model"]) -> list[str]:
        """The concept of the largest score."""
        return [self.names[place] for place in self.scores(subject).argmax(1).tolist()]

    def swap(
        self,
        subject: Float[Tensor, "example d_model"],
        old: Sequence[str],
        new: Sequence[str],
        *,
        scale: int | float = 1.0,
    ) -> Float[Tensor, "example d_model"]:
        """What to add to s to make `old` into `new`: scale |s| (v_new - v_old). Raises KeyError for unknown names."""
        if unknown := (set(old) | set(new)) - set(self.names):
            raise KeyError(f"there is no direction for {sorted(unknown)}; there are {list(self.names)}.")
        change = self.vectors[[self.names.index(name) for name in new]]
        change = change - self.vectors[[self.names.index(name) for name in old]]
        return scale * subject.norm(dim=1, keepdim=True) * change


def concept_directions(
    operator: RelationOperator,
    depth: int,
    rank: int,
    objects: Float[Tensor, "example d_model"],
    names: Sequence[str],
    *,
    centre: Float[Tensor, " d_model"] | None = None,
) -> ConceptDirections:
    """The direction of each name, from the states `objects` at which it was the object.

    Raises ValueError for another number of names, a rank outside 1 to d_model, or a depth that was not fitted.
    """
    if len(names) != len(objects) or not len(names):
        raise ValueError(f"there are {len(names)} names for {len(objects)} object states. Give one for each.")
    place = operator.depths.index(depth) if depth in operator.depths else -1
    inverse = operator.inverse(depth, rank)
    back = (objects - operator.bias[place]) @ inverse.T
    return _by_name(back, names, depth, centre)


def mean_directions(subject: Float[Tensor, "example d_model"], names: Sequence[str], depth: int) -> ConceptDirections:
    """The baseline from subjects alone: each name's mean of s less the mean of all, unit; s is centred on that."""
    centre = subject.mean(0)
    return _by_name(subject - centre, names, depth, centre)


def _by_name(
    rows: Float[Tensor, "example d_model"], names: Sequence[str], depth: int, centre: Float[Tensor, " d_model"] | None
) -> ConceptDirections:
    unique = sorted(set(names))
    members = [[row for row, name in enumerate(names) if name == one] for one in unique]
    vectors = torch.stack([rows[chosen].mean(0) for chosen in members])
    return ConceptDirections(
        tuple(unique),
        torch.nn.functional.normalize(vectors, dim=1),
        tuple(map(len, members)),
        depth,
        torch.zeros(rows.shape[1]) if centre is None else centre,
    )


@dataclass(frozen=True, eq=False)
class ConceptStudy:
    """What `concept_study` found.

    Attributes:
        directions: of the chosen rank.
        rank: chosen by edits of validation subjects.
        table: score ("accuracy" or "causality"), method, rank, hits, count, share, low, high; on unseen subjects.
        choice: rank, share of validation edits after which the model says the new object.
    """

    directions: ConceptDirections
    rank: int
    table: pd.DataFrame
    choice: pd.DataFrame

    __repr__ = short_repr


def concept_study(
    model: LoadedModel,
    pairs: Sequence[tuple[str, str]],
    template: str,
    operator: RelationOperator,
    depth: int,
    *,
    examples: Sequence[tuple[str, str]] = (),
    target: int | None = None,
    ranks: Sequence[int] = RANKS,
    scale: int | float = 1.0,
    seed: int = 0,
) -> ConceptStudy:
    """Classify and edit subjects that no direction has seen.

    Pairs that the model gets right and whose object has three subjects or more are divided, object by object: half make
    directions, a quarter (one at least) chooses the rank, the rest tests. Methods: relation (LRC), relation centred,
    mean difference, shuffled (LRC with the names of its examples exchanged at random), commonest (the object with most
    examples). target: depth of o, as the operator was fitted.

    Raises:
        ValueError: fewer than two objects of three known subjects, or of two first tokens; ranks above d_model; an
            operator of other weights or another target.
    """
    anatomy, end = dissect(model.module), unembedding_of(model)
    require_same_weights(operator.facts, model, "the operator")
    last = len(anatomy.blocks)
    fitted = operator.facts.get("target", target)
    if (last if fitted is None else fitted) != (last if target is None else target):
        raise ValueError(f"the operator's o is at depth {fitted}, target is {target}. Give target={fitted}.")
    generator = np.random.default_rng(seed)
    shown = {subject for subject, _ in examples}
    pairs = [(str(s), str(o)) for s, o in pairs if s not in shown]
    prompts = relation_prompts(model, pairs, template, examples=examples)
    states = relation_states(model, prompts, [depth], end, anatomy=anatomy, target=target)
    fit, validation, test = _divide(states, prompts, generator)
    names = prompts.objects
    s, o = states.at(depth), states.object
    if not (ranks := [rank for rank in ranks if rank <= s.shape[1]]):
        raise ValueError(f"no rank is at most d_model, {s.shape[1]}. Give ranks of 1 to {s.shape[1]}.")

    def made(rank: int, labels: Sequence[str], centre: Tensor | None = None) -> ConceptDirections:
        return concept_directions(operator, depth, rank, o[fit], labels, centre=centre)

    own = [names[row] for row in fit]
    edits = [
        (
            rank,
            *_edit_hits(model, made(rank, own), states, prompts, validation, end, scale, np.random.default_rng(seed)),
        )
        for rank in ranks
    ]
    rank = max(edits, key=lambda row: row[1])[0]
    mixed = [own[place] for place in generator.permutation(len(own))]
    methods = {
        "relation": made(rank, own),
        "relation centred": made(rank, own, s[fit].mean(0)),
        "mean difference": mean_directions(s[fit], own, depth),
        "shuffled": made(rank, mixed),
    }
    rows = []
    truth = [names[row] for row in test]
    for method, directions in methods.items():
        hits = sum(found == name for found, name in zip(directions.classify(s[test]), truth, strict=True))
        rows.append(("accuracy", method, hits, len(test)))
    commonest = max(sorted(set(own)), key=own.count)
    rows.append(("accuracy", "commonest", truth.count(commonest), len(test)))
    for method in ("relation", "mean difference", "shuffled"):
        hits, count = _edit_hits(model, methods[method], states, prompts, test, end, scale, np.random.default_rng(seed))
        rows.append(("causality", method, hits, count))
    table = pd.DataFrame(
        [(*row, row[2] / row[3] if row[3] else float("nan"), *wilson_interval(row[2], row[3])) for row in rows],
        columns=["score", "method", "hits", "count", "share", "low", "high"],
    )
    choice = pd.DataFrame([(rank, hits / count) for rank, hits, count in edits], columns=["rank", "share"])
    return ConceptStudy(methods["relation"], rank, table, choice)


def _divide(
    states: RelationStates, prompts: RelationPrompts, generator: np.random.Generator
) -> tuple[list[int], list[int], list[int]]:
    known = set(states.is_known.nonzero()[:, 0].tolist())
    by_name: dict[str, list[int]] = {}
    for row, name in enumerate(prompts.objects):
        if row in known:
            by_name.setdefault(name, []).append(row)
    by_name = {name: rows for name, rows in by_name.items() if len(rows) >= 3}
    if len(by_name) < 2:
        raise ValueError(
            f"{len(by_name)} objects have three subjects that the model knows. Concept directions need two such "
            "objects: give more pairs, or a relation of many subjects to an object."
        )
    fit, validation, test = [], [], []
    for rows in by_name.values():
        order = [rows[place] for place in generator.permutation(len(rows))]
        some = max(1, len(rows) // 4)
        validation += order[:some]
        test += order[some : 2 * some]
        fit += order[2 * some :]
    if len({int(prompts.object_ids[row]) for row in fit}) < 2:
        raise ValueError(
            f"the objects {sorted(by_name)} all begin with the same token, so no edit could be told from none. Take "
            "objects of different first tokens."
        )
    return fit, validation, test


def _edit_hits(
    model: LoadedModel,
    directions: ConceptDirections,
    states: RelationStates,
    prompts: RelationPrompts,
    rows: list[int],
    end: Unembedding,
    scale: int | float,
    generator: np.random.Generator,
) -> tuple[int, int]:
    """Edits towards a random concept of another first token: after how many the model says that token, and how many."""
    first = dict(zip(prompts.objects, prompts.object_ids.tolist(), strict=True))
    old, new = [], []
    for row in rows:
        name = prompts.objects[row]
        others = [other for other in directions.names if first[other] != first[name]]
        old.append(name)
        new.append(others[int(generator.integers(len(others)))])
    delta = directions.swap(states.at(directions.depth)[rows], old, new, scale=scale)
    said = edited_logits(model, prompts.take(rows), directions.depth, delta, end).argmax(-1)
    return int((said == torch.tensor([first[name] for name in new])).sum()), len(rows)

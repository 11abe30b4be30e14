"""Does an affine map decode a relation in this model? Fitted, chosen and tested on different pairs, with controls.

1. `examples` pairs that the model knows (given the others as context) make J and b at every depth (`relations`).
2. A third of the other groups chooses depth and beta by faithfulness, and depth and rank of the edit by its success.
3. The rest tests: faithfulness on prompts that the model gets right ("known") and on all of them; causality between
   known pairs of different objects. Shares have Wilson's 95 % intervals.

Controls of faithfulness, each with its own depth and factor chosen in the same way:
    identity      factor s + mean(o - s)              the state with a shift, no Jacobian
    mean          mean o                              no subject at all
    logit lens    s as it is
    shuffled      LRE of another test subject's s     what the answers' distribution alone gives
Controls of causality at the edit's depth:
    identity      s + (o' - o)
    random        a random direction of the edit's length
    other state   s' in place of s                    what any edit at this place can do, a ceiling

Hernandez et al. (2024), arXiv:2308.09124, sections 3 and 4: some of their 47 relations are well approximated, many are
not. Beware: choosing depth and beta on a few dozen pairs is itself noisy; look at `choice`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from microtome.capture.dissect import dissect
from microtome.capture.models import LoadedModel
from microtome.lenses.relation_prompts import RelationPrompts, relation_prompts
from microtome.lenses.relations import (
    RelationOperator,
    RelationStates,
    edited_logits,
    relation_operator,
    relation_states,
)
from microtome.lenses.token_words import token_words
from microtome.lenses.unembedding import Unembedding, unembedding_of
from microtome.lenses.wilson_interval import wilson_interval

BETAS = (1.0, 1.5, 2.25, 3.5, 5.0, 8.0)
RANKS = (8, 16, 32, 64, 96, 128, 192, 256)


@dataclass(frozen=True, eq=False)
class RelationStudy:
    """What `relation_study` found.

    Attributes:
        operator: J and b at every depth.
        depth, beta: chosen for faithfulness. edit_depth, rank: chosen for edits; None if there was nothing to edit.
        faithfulness: method, depth, beta, prompts ("known" or "all"), hits, count, share, low, high.
        causality: method, depth, rank, hits, count, share, low, high; share of edits after which the model says the
            new object. Empty if fewer than two known objects are left to test.
        choice: what the validation pairs said: kind, depth, beta or rank, share.
        pairs: subject, object, part (example, validation, test), said, is_known.
    """

    operator: RelationOperator
    depth: int
    beta: float
    edit_depth: int | None
    rank: int | None
    faithfulness: pd.DataFrame
    causality: pd.DataFrame
    choice: pd.DataFrame
    pairs: pd.DataFrame

    def __repr__(self) -> str:
        def share(table: pd.DataFrame, **where: object) -> str:
            for column, value in where.items():
                table = table[table[column] == value]
            return "-" if table.empty else f"{table['share'].iloc[0]:.2f} of {table['count'].iloc[0]}"

        faithful = share(self.faithfulness, method="relation", prompts="known")
        causal = share(self.causality, method="relation")
        return f"RelationStudy(depth {self.depth}, beta {self.beta:g}; faithful {faithful}, causal {causal})"

    def to_frame(self) -> pd.DataFrame:
        """Both tables, one under the other, with the column `score`."""
        parts = {"faithfulness": self.faithfulness, "causality": self.causality.assign(prompts="known")}
        return pd.concat([part.assign(score=name) for name, part in parts.items()], ignore_index=True)


def relation_study(
    model: LoadedModel,
    pairs: Sequence[tuple[str, str]],
    template: str,
    *,
    groups: Sequence[str] | None = None,
    examples: int = 8,
    depths: Sequence[int] | None = None,
    betas: Sequence[float] = BETAS,
    ranks: Sequence[int] = RANKS,
    edit_depths: Sequence[int] | None = None,
    seed: int = 0,
    progress: bool = False,
) -> RelationStudy:
    """Fit, choose and test.

    Args:
        pairs: subject and object; each subject once.
        template: as for `relation_prompts`.
        groups: what is not to be torn apart, for each pair; other pairs of an example's group are left out.
        examples: n.
        depths: to choose from; default 0 to L - 1.
        betas, ranks: to choose from; ranks above d_model are left out.
        edit_depths: default the chosen depth and up to four between the first and it.

    Raises:
        ValueError: fewer than 4 groups besides the examples, repeated subjects, another number of groups, examples
            below 2, or a model without an unembedding.
    """
    pairs = [(str(subject), str(thing)) for subject, thing in pairs]
    groups = [subject for subject, _ in pairs] if groups is None else list(groups)
    if len(groups) != len(pairs) or len({subject for subject, _ in pairs}) < len(pairs):
        raise ValueError(
            f"there are {len(groups)} groups for {len(pairs)} pairs. Give each subject once, with a group."
        )
    if examples < 2:
        raise ValueError(f"examples is {examples}. Give 2 or more: each has the others before it.")
    if len(set(groups)) < examples + 4:
        raise ValueError(
            f"{len(pairs)} pairs in {len(set(groups))} groups do not leave 4 groups besides {examples} examples. Give "
            "more pairs or fewer examples."
        )
    anatomy, end = dissect(model.module), unembedding_of(model)
    depths = list(range(len(anatomy.blocks))) if depths is None else list(depths)
    generator = np.random.default_rng(seed)
    shots, rest = _choose_examples(model, pairs, groups, template, examples, end, generator)
    own = relation_prompts(model, shots, template, examples=shots)
    operator = relation_operator(model, own, depths, anatomy=anatomy, progress=progress)
    fitted = relation_states(model, own, depths, end, anatomy=anatomy)

    names = sorted({groups[row] for row in rest})
    chosen = set(generator.permutation(names)[: max(1, len(names) // 3)].tolist())
    parts = {
        "validation": [row for row in rest if groups[row] in chosen],
        "test": [row for row in rest if groups[row] not in chosen],
    }
    prompts = {
        k: relation_prompts(model, [pairs[r] for r in rows], template, examples=shots) for k, rows in parts.items()
    }
    states = {k: relation_states(model, p, depths, end, anatomy=anatomy) for k, p in prompts.items()}

    decoders = _decoders(operator, fitted)
    faithfulness, choice = [], []
    picked: dict[str, tuple[int, float]] = {}
    for method, decode in decoders.items():
        free_depths = depths if method != "mean" else depths[:1]
        free_betas = betas if method in ("relation", "identity") else (1.0,)
        scores = [
            (
                depth,
                float(beta),
                *_agreement(decode(states["validation"].at(depth), depth, float(beta)), states["validation"], end),
            )
            for depth in free_depths
            for beta in free_betas
        ]
        choice += [("faithfulness", method, *score[:2], None, score[2]) for score in scores]
        depth, beta, *_ = max(scores, key=lambda score: (score[2], score[3]))
        picked[method] = depth, beta
        faithfulness += _faithfulness_rows(
            method, depth, beta, decode(states["test"].at(depth), depth, beta), states["test"], end
        )
    depth, beta = picked["relation"]
    # a shift by one in a random order: nobody keeps an own state
    order = generator.permutation(len(states["test"].wanted))
    other = np.empty_like(order)
    other[order] = np.roll(order, 1)
    faithfulness += _faithfulness_rows(
        "shuffled", depth, beta, operator(states["test"].at(depth)[other], depth, beta=beta), states["test"], end
    )

    if edit_depths is None:
        edit_depths = sorted({depths[round(place)] for place in np.linspace(0, depths.index(depth), 5)})
    editing = _Editing(model, operator, prompts, states, end, generator)
    edit_depth, rank, tried, causality = editing.choose_and_test(
        edit_depths, [rank for rank in ranks if rank <= anatomy.d_model]
    )
    table = pd.DataFrame(
        {
            "subject": [*own.subjects, *(pairs[row][0] for rows in parts.values() for row in rows)],
            "object": [*own.objects, *(pairs[row][1] for rows in parts.values() for row in rows)],
            "part": ["example"] * len(own) + [part for part, rows in parts.items() for _ in rows],
            "said": token_words(model, torch.cat([found.said for found in (fitted, *states.values())])),
            "is_known": [bool(known) for found in (fitted, *states.values()) for known in found.is_known],
        }
    )
    return RelationStudy(
        operator,
        depth,
        beta,
        edit_depth,
        rank,
        pd.DataFrame(
            faithfulness, columns=["method", "depth", "beta", "prompts", "hits", "count", "share", "low", "high"]
        ),
        causality,
        pd.DataFrame([*choice, *tried], columns=["score", "method", "depth", "beta", "rank", "share"]),
        table,
    )


def _choose_examples(
    model: LoadedModel,
    pairs: list[tuple[str, str]],
    groups: list[str],
    template: str,
    examples: int,
    end: Unembedding,
    generator: np.random.Generator,
) -> tuple[list[tuple[str, str]], list[int]]:
    """Pairs that the model knows with some others as context (unknown ones only if these are too few), and the rows of
    the pairs whose groups they leave untouched."""
    order = generator.permutation(len(pairs)).tolist()
    first: list[int] = []
    for row in order:
        if len(first) < examples and groups[row] not in {groups[other] for other in first}:
            first.append(row)
    context = [pairs[row] for row in first]
    prompts = relation_prompts(model, [pairs[row] for row in order], template, examples=context)
    known = relation_states(model, prompts, [0], end).is_known.tolist()
    ranked = [row for row, is_known in zip(order, known, strict=True) if is_known]
    ranked += [row for row, is_known in zip(order, known, strict=True) if not is_known]
    shots: list[int] = []
    for row in ranked:
        if len(shots) < examples and groups[row] not in {groups[other] for other in shots}:
            shots.append(row)
    taken = {groups[row] for row in shots}
    return [pairs[row] for row in shots], [row for row in range(len(pairs)) if groups[row] not in taken]


def _decoders(operator: RelationOperator, fitted: RelationStates) -> dict[str, Callable[[Tensor, int, float], Tensor]]:
    mean = fitted.object.mean(0)

    def identity(s: Tensor, depth: int, beta: float) -> Tensor:
        return beta * s + (fitted.object - fitted.at(depth)).mean(0)

    return {
        "relation": lambda s, depth, beta: operator(s, depth, beta=beta),
        "identity": identity,
        "mean": lambda s, depth, beta: mean.expand_as(s),
        "logit lens": lambda s, depth, beta: s,
    }


def _first_tokens(decoded: Float[Tensor, "example d_model"], end: Unembedding) -> Int64[Tensor, " example"]:
    with torch.no_grad():
        return end.logits(decoded.to(end.weight)).argmax(-1).cpu()


def _agreement(decoded: Tensor, states: RelationStates, end: Unembedding) -> tuple[float, float]:
    """Share of agreement with the model among known prompts (all, if none is known), and among all."""
    agrees = (_first_tokens(decoded, end) == states.said).double()
    known = agrees[states.is_known] if bool(states.is_known.any()) else agrees
    return float(known.mean()), float(agrees.mean())


def _faithfulness_rows(
    method: str, depth: int, beta: float, decoded: Tensor, states: RelationStates, end: Unembedding
) -> list[tuple]:
    agrees = _first_tokens(decoded, end) == states.said
    rows = []
    for prompts, chosen in (("known", states.is_known), ("all", torch.ones_like(states.is_known))):
        hits, count = int(agrees[chosen].sum()), int(chosen.sum())
        rows.append((method, depth, beta, prompts, hits, count, _share(hits, count), *wilson_interval(hits, count)))
    return rows


def _share(hits: int, count: int) -> float:
    return hits / count if count else float("nan")


@dataclass(frozen=True, eq=False)
class _Editing:
    """Edits of subjects' states between known prompts of the validation and the test pairs."""

    model: LoadedModel
    operator: RelationOperator
    prompts: dict[str, RelationPrompts]
    states: dict[str, RelationStates]
    end: Unembedding
    generator: np.random.Generator

    def choose_and_test(
        self, depths: Sequence[int], ranks: Sequence[int]
    ) -> tuple[int | None, int | None, list[tuple], pd.DataFrame]:
        """The best depth and rank on validation edits, all that was tried, and the test's table."""
        columns = ["method", "depth", "rank", "hits", "count", "share", "low", "high"]
        plans = {part: self._targets(part) for part in ("validation", "test")}
        if any(len(sources) == 0 for sources, _ in plans.values()) or not ranks:
            return None, None, [], pd.DataFrame(columns=columns)
        tried = []
        for depth in depths:
            for rank in ranks:
                hits = self._hits("validation", plans["validation"], depth, self._relation("validation", depth, rank))
                tried.append(("causality", "relation", depth, None, rank, float(hits.double().mean())))
        _, _, depth, _, rank, _ = max(tried, key=lambda row: row[-1])
        delta = self._relation("test", depth, rank)
        states = self.states["test"]

        def random(sources: Tensor, targets: Tensor) -> Tensor:
            noise = torch.from_numpy(self.generator.standard_normal(delta(sources, targets).shape)).float()
            return noise / noise.norm(dim=1, keepdim=True) * delta(sources, targets).norm(dim=1, keepdim=True)

        methods = {
            "relation": delta,
            "identity": lambda sources, targets: states.object[targets] - states.object[sources],
            "random": random,
            "other state": lambda sources, targets: states.at(depth)[targets] - states.at(depth)[sources],
        }
        rows = []
        for method, change in methods.items():
            hits = self._hits("test", plans["test"], depth, change)
            count, total = int(hits.sum()), len(hits)
            used = rank if method == "relation" else None
            rows.append((method, depth, used, count, total, _share(count, total), *wilson_interval(count, total)))
        return depth, rank, tried, pd.DataFrame(rows, columns=columns)

    def _relation(self, part: str, depth: int, rank: int) -> Callable[[Tensor, Tensor], Tensor]:
        inverse, objects = self.operator.inverse(depth, rank), self.states[part].object
        return lambda sources, targets: (objects[targets] - objects[sources]) @ inverse.T

    def _targets(self, part: str) -> tuple[Tensor, Tensor]:
        """For each known prompt another known one with a different first token of the object, at random."""
        states = self.states[part]
        known = states.is_known.nonzero()[:, 0].tolist()
        sources, targets = [], []
        for row in known:
            others = [other for other in known if states.wanted[other] != states.wanted[row]]
            if others:
                sources.append(row)
                targets.append(others[int(self.generator.integers(len(others)))])
        return torch.tensor(sources, dtype=torch.long), torch.tensor(targets, dtype=torch.long)

    def _hits(
        self, part: str, plan: tuple[Tensor, Tensor], depth: int, change: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        sources, targets = plan
        prompts = self.prompts[part].take(sources.tolist())
        logits = edited_logits(self.model, prompts, depth, change(sources, targets), self.end)
        return logits.argmax(-1) == self.states[part].wanted[targets]

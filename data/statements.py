"""True and false statements built from a table of facts, such that the words alone tell nothing about the truth.

    entities are paired, A with a and B with b (a is not true of B, b is not true of A), and each pair gives
    "A is in a" true    "A is in b" false    "B is in b" true    "B is in a" false

The false objects are so a shuffle of the true ones. A plain shuffle balances every word over the whole table only: the
training part of a split then holds an object more often on the side that the test part lacks, and a bag of words falls
far below chance (the cities, logistic regression on word counts, five folds by city: accuracy 0.36, AUROC 0.29). Here
every pair is balanced by itself, and `group` keeps pairs whole: in any split by groups every word is as often in true
as in false statements, and the same regression gives 0.50 and 0.50.

A group is a block of two pairs (three in one block, if the number of pairs is odd), the same for every variant, so
that a probe can be fitted on the plain statements of some groups and asked about the conjunctions of others. All
statements of a block use one template for each relation.
Variants: "plain"; "negated" (the same with "is not": the label flips); "conjunction" ("It is the case both that ... and
that ...": eight per block, four of them true, the words balanced in each block).
Beware: groups hold entities apart, not objects or templates; for those, split by `object` or `template`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Int64

VARIANTS = ("plain", "negated", "conjunction")
_STARTS = 20


@dataclass(frozen=True)
class Relation:
    """What is stated of an entity.

    name: the column of `entities` that holds the true object (str). templates: clauses with {entity}, {is_} ("is" or
    "is not") and {object}, without capital and full stop. alike: pairs of objects that are never exchanged, because
    what the one is true of, the other may be true of as well.
    """

    name: str
    templates: tuple[str, ...]
    alike: frozenset[frozenset[str]] = frozenset()

    def clashes(self, first: str, second: str) -> bool:
        """Whether the two objects are the same or alike."""
        return first == second or frozenset((first, second)) in self.alike


def build_statements(
    entities: pd.DataFrame, relations: Sequence[Relation], *, variants: Sequence[str] = ("plain",), seed: int = 0
) -> pd.DataFrame:
    """The statements of the variants, one after the other, in the order of `entities`; for a conjunction, of groups.

    entities: an even number of rows with the columns entity (str), popularity (number) and one per relation; any
    others are not looked at. seed: decides pairs, blocks, templates and conjunctions.
    Columns: text (str), label (bool, True where the statement is true), group (int, the block), variant, relation,
    template ("country.1"), entity, object, true_object (str; for a conjunction two, joined by "; "), popularity (of a
    conjunction the smaller one).
    Raises ValueError for unknown variants, an odd number of entities, and if no pairing avoids accidental truths.
    """
    if isinstance(variants, str) or not variants or set(variants) - set(VARIANTS) or len(set(variants)) < len(variants):
        raise ValueError(f"variants is {variants!r}. Give a list of one or more of {list(VARIANTS)}, each once.")
    generator = np.random.default_rng(seed)
    values = {relation.name: entities[relation.name].tolist() for relation in relations}

    def clash(first: int, second: int) -> bool:
        return any(r.clashes(values[r.name][first], values[r.name][second]) for r in relations)

    pairs = swap_pairs(len(entities), clash, generator)
    blocks = np.arange(len(pairs)) // 2
    if len(pairs) % 2 and len(pairs) > 1:
        blocks[-1] = blocks[-2]
    templates = {
        relation.name: generator.permutation(np.arange(blocks[-1] + 1) % len(relation.templates))
        for relation in relations
    }
    book = _Book(entities.reset_index(drop=True), pairs, blocks, templates)
    rows = []
    for variant in VARIANTS:  # in this order, so that a variant's rows do not depend on the others asked for
        if variant == "conjunction":
            made = _conjunctions(book, relations, generator)
        else:
            made = _single(book, relations, is_negated=variant == "negated")
        if variant in variants:
            rows.append(made)
    by_name = dict(zip([v for v in VARIANTS if v in variants], rows, strict=True))
    return pd.concat([by_name[variant] for variant in variants], ignore_index=True)


def swap_pairs(
    count: int, clash: Callable[[int, int], bool], generator: np.random.Generator
) -> Int64[np.ndarray, "pair two"]:
    """A random way to pair 0 ... count - 1 in which no pair clashes. Raises ValueError for an odd count or no way."""
    if count < 2 or count % 2:
        raise ValueError(f"{count} entities cannot be paired. Give an even number, 2 or more.")
    for _ in range(_STARTS):
        pairs = generator.permutation(count).reshape(-1, 2).astype(np.int64)
        if _mend(pairs, clash, generator):
            return pairs
    raise ValueError(
        f"found no way to pair {count} entities without an accidental truth. "
        "More than half of them may share one object: leave some of these out."
    )


def _mend(pairs: np.ndarray, clash: Callable[[int, int], bool], generator: np.random.Generator) -> bool:
    """Exchange members of clashing pairs with those of random other pairs, in place; whether none clashes any more."""
    for place in range(len(pairs)):
        tries = 0
        while clash(*pairs[place].tolist()):
            other = int(generator.integers(len(pairs)))
            (a, b), (c, d) = pairs[place].tolist(), generator.permutation(pairs[other]).tolist()
            # the exchange mends this pair and does not spoil one that was fine
            if other != place and not clash(a, d) and (not clash(c, b) or clash(c, d)):
                pairs[place], pairs[other] = (a, d), (c, b)
            tries += 1
            if tries > 20 * len(pairs):
                return False
    return True


@dataclass(frozen=True)
class _Book:
    """The entities, their pairs, each pair's block, and each block's template for every relation."""

    entities: pd.DataFrame
    pairs: np.ndarray
    blocks: np.ndarray
    templates: dict[str, np.ndarray]

    def objects(self, relation: Relation, pair: int) -> list[dict[bool, str]]:
        """For both entities of the pair: the object of the true and of the false statement."""
        first, second = (self.entities[relation.name][entity] for entity in self.pairs[pair])
        return [{True: first, False: second}, {True: second, False: first}]

    def template(self, relation: Relation, block: int) -> tuple[str, str]:
        """Its name and its clause."""
        number = int(self.templates[relation.name][block])
        return f"{relation.name}.{number}", relation.templates[number]


def _single(book: _Book, relations: Sequence[Relation], *, is_negated: bool) -> pd.DataFrame:
    place = {int(entity): (pair, side) for pair, two in enumerate(book.pairs) for side, entity in enumerate(two)}
    rows = []
    for entity, name in enumerate(book.entities["entity"]):
        pair, side = place[entity]
        block = int(book.blocks[pair])
        for relation in relations:
            objects = book.objects(relation, pair)[side]
            template, clause = book.template(relation, block)
            for truth in (True, False):
                said = clause.format(entity=name, is_="is not" if is_negated else "is", object=objects[truth])
                rows.append(
                    {
                        "text": _sentence(said),
                        "label": truth != is_negated,
                        "group": block,
                        "variant": "negated" if is_negated else "plain",
                        "relation": relation.name,
                        "template": template,
                        "entity": name,
                        "object": objects[truth],
                        "true_object": objects[True],
                        "popularity": book.entities["popularity"][entity],
                    }
                )
    return pd.DataFrame(rows)


def _conjunctions(book: _Book, relations: Sequence[Relation], generator: np.random.Generator) -> pd.DataFrame:
    """Of the pairs (A, B) and (C, D): A&C with B&D, and A&D with B&C, once both true and once false in one way.

    The ways are true-false, false-true and false-false. A row and its counterpart (the other two entities, false in
    the same way) name every object of the block once, as the true rows do: so no word tells the label.
    """
    rows = []
    names, popularity = book.entities["entity"], book.entities["popularity"]
    # a third pair in a block takes no part
    for first, second in zip(range(0, len(book.pairs) - 1, 2), range(1, len(book.pairs), 2), strict=True):
        block = int(book.blocks[first])
        for relation in relations:
            template, clause = book.template(relation, block)
            objects = (book.objects(relation, first), book.objects(relation, second))
            for crossed in (0, 1):
                false_way = ((True, False), (False, True), (False, False))[int(generator.integers(3))]
                for truths in ((True, True), false_way):
                    for side in (0, 1):
                        sides = (side, (side + crossed) % 2)
                        entities = [int(book.pairs[first, sides[0]]), int(book.pairs[second, sides[1]])]
                        said = [objects[part][sides[part]][truths[part]] for part in (0, 1)]
                        clauses = [
                            clause.format(entity=names[entity], is_="is", object=thing)
                            for entity, thing in zip(entities, said, strict=True)
                        ]
                        rows.append(
                            {
                                "text": f"It is the case both that {clauses[0]} and that {clauses[1]}.",
                                "label": all(truths),
                                "group": block,
                                "variant": "conjunction",
                                "relation": relation.name,
                                "template": template,
                                "entity": "; ".join(names[entity] for entity in entities),
                                "object": "; ".join(said),
                                "true_object": "; ".join(objects[part][sides[part]][True] for part in (0, 1)),
                                "popularity": min(popularity[entity] for entity in entities),
                            }
                        )
    columns = ["text", "label", "group", "variant", "relation", "template", "entity", "object", "true_object"]
    return pd.DataFrame(rows, columns=[*columns, "popularity"])


def _sentence(clause: str) -> str:
    return f"{clause[0].upper()}{clause[1:]}."

"""Control tasks: labels that only memory of the word can give, and how many test words could have been remembered.

Every type (the token at the probed position, the entity, any key of a row) draws one label, once, from the labels of
the data, and keeps it wherever it occurs, in training and test rows alike (Hewitt & Liang 2019, sec. 2):

    control(row) = draw(type(row)),   draw(type) = label of a row taken at random.

Selectivity = score on the task - score on the control task: what a probe reads beyond the identity of the type.

Beware: a type that lies in test rows only cannot have been learned, so the control is then at chance whatever the probe
can do. That holds for every type with a single row, whose control label is as good as a shuffled one, and for all types
if groups are cut by type (the entity as group: nothing is covered, and the control says nothing about memory). Show
`coverage` beside every selectivity. The other end: a few types that hold most rows (the full stop at the end of a text)
are learned from any site that knows the token, so the control task is then the easier one and selectivity below zero,
which says nothing against the probe (SmolLM2, sentiment at the last token: 68 types, control AUROC 0.98).
"""

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float64, Int64

from microtome.probes.row_keys import row_keys

_DRAWS_TRIED = 100


def control_task(
    types,
    labels: Bool[np.ndarray, " example"] | Int64[np.ndarray, " example"] | Float64[np.ndarray, " example"],
    *,
    seed: int = 0,
    train: Bool[np.ndarray, "mask example"] | None = None,
) -> Bool[np.ndarray, " example"] | Int64[np.ndarray, " example"] | Float64[np.ndarray, " example"]:
    """A label for each row that depends on its type alone.

    Args:
        types: one key per row (token ids, strings, anything hashable).
        labels: the real ones, whose frequencies are drawn from; the answer is of the same kind.
        seed: fixes the draw.
        train: training masks of a sweep, outer and inner. Of 100 draws the first counts under which every one of them
            holds every class (of numbers: two different ones).

    Raises ValueError for another number of types than labels, a row without a type, one type only, and if no draw
    leaves every training mask every class; TypeError as `row_keys`.
    """
    codes = type_codes(types, len(labels))
    n_types = int(codes.max()) + 1
    if n_types < 2:
        first = row_keys(types, len(labels), "types").tolist()[0]
        raise ValueError(
            f"All {len(labels)} rows are of one type ({first!r}), so their control labels are all the same. "
            "Give a key that differs between rows: the token at the probed position, or the entity."
        )
    kept = np.ones((1, len(labels)), dtype=bool) if train is None else train
    for rng in np.random.default_rng(seed).spawn(_DRAWS_TRIED):
        control = labels[rng.integers(len(labels), size=n_types)][codes]
        if _holds_every_class(control, labels, kept):
            return control
    wanted = 2 if labels.dtype == np.float64 else len(np.unique(labels))
    raise ValueError(
        f"None of {_DRAWS_TRIED} draws over {n_types} types leaves every training fold rows of all {wanted} classes. "
        "Too few types, or too rare a class: give a finer type, join rare classes, ask for fewer folds, or do without "
        "the control task."
    )


def shuffled_labels(
    labels: Bool[np.ndarray, " example"] | Int64[np.ndarray, " example"] | Float64[np.ndarray, " example"],
    groups: Int64[np.ndarray, " example"],
    *,
    seed: int = 0,
) -> Bool[np.ndarray, " example"] | Int64[np.ndarray, " example"] | Float64[np.ndarray, " example"]:
    """The labels in an order that keeps what groups share: for analyses without folds (a sweep shuffles within folds).

    Labels that are the same throughout each group are dealt to the groups anew. Otherwise groups of one size exchange
    their labels, then the rows inside each group do. Raises ValueError for another number of groups than labels, and
    groups that are no numbers from 0.
    """
    if len(labels) != len(groups) or groups.dtype.kind not in "iu" or groups.min(initial=0) < 0:
        raise ValueError(
            f"{len(labels)} labels for {len(groups)} groups of {groups.dtype}. Give one group number per row, such as "
            "group_codes makes."
        )
    rng = np.random.default_rng(seed)
    order = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups)
    starts = np.cumsum(sizes) - sizes
    in_order = labels[order]
    shuffled = np.empty_like(labels)
    first = in_order[starts]
    if (in_order == np.repeat(first, sizes)).all():
        return rng.permutation(first)[groups]
    for size in np.unique(sizes):
        members = np.flatnonzero(sizes == size)
        places = starts[members][:, None] + np.arange(size)
        shuffled[order[places]] = rng.permuted(in_order[places[rng.permutation(len(members))]], axis=1)
    return shuffled


def coverage(
    types, test: Bool[np.ndarray, "fold example"], train: Bool[np.ndarray, "fold example"] | None = None
) -> float:
    """Share of test rows whose type occurs in the training rows of their fold; all other rows if `train` is None.

    0: no control label could be learned. 1: all could. Raises ValueError for another number of types than rows, a row
    without a type, and masks without a test row.
    """
    train = ~test if train is None else train
    codes = type_codes(types, test.shape[1])
    if not test.any():
        raise ValueError("test has no row; give the test rows of each fold.")
    seen = 0
    for tested, trained in zip(test, train, strict=True):
        seen += np.isin(codes[tested], codes[trained]).sum()
    return float(seen / test.sum())


def type_codes(types, n_rows: int) -> Int64[np.ndarray, " example"]:
    """Number of each row's type, in order of first appearance."""
    codes, _ = pd.factorize(row_keys(types, n_rows, "types"))
    if (codes < 0).any():
        raise ValueError(f"types has no key for row {int((codes < 0).argmax())}. Fill it in, or leave the row out.")
    return codes.astype(np.int64)


def _holds_every_class(control: np.ndarray, labels: np.ndarray, train: Bool[np.ndarray, "mask example"]) -> bool:
    if labels.dtype == np.float64:
        return all(len(np.unique(control[rows])) > 1 for rows in train)
    held = np.stack([train[:, control == value].any(axis=1) for value in np.unique(labels)])
    return bool(held.all())

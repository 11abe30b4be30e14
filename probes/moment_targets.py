"""Labellings as target columns of `Moments`, the fold of every row, and the rows on which strengths are chosen."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from microtome.probes.moment_probes import METHODS

SELECTION_ROWS = 50_000

Labellings = (
    Bool[Tensor, "labelling example"] | Int64[Tensor, "labelling example"] | Float64[Tensor, "labelling example"]
)


@dataclass(frozen=True)
class MomentTargets:
    """Everything about the labels that fitting a site needs.

    Two classes (bool) have one column of 0 and 1, numbers theirs, class numbers (int64) one of 0 and 1 per class.
    """

    labels: Tensor  # [labelling, example]: int64 class numbers, or float64
    values: Float64[Tensor, "example column"]  # labelling by labelling
    classes: int  # columns per labelling
    is_number: bool
    cell: Int64[Tensor, " example"]
    folds: int
    selection: Int64[Tensor, " kept"]  # ascending
    selection_weight: Float64[Tensor, " kept"]

    @classmethod
    def of(cls, labellings: Labellings, test: Bool[Tensor, "fold example"], method: str) -> "MomentTargets":
        """Raises ValueError for fewer than three folds, rows in none or several, numbers where classes are wanted."""
        if method not in METHODS:
            raise ValueError(f"method={method!r}; there are {', '.join(METHODS)}.")
        is_number = labellings.is_floating_point()
        if is_number and method != "ridge":
            raise ValueError(f'method="{method}" tells classes apart; labels that are numbers need method="ridge".')
        if len(test) < 3:
            raise ValueError(f"{len(test)} folds; inner folds are the other outer ones, so at least 3 are needed.")
        if labellings.shape[1] != test.shape[1] or not (test.sum(dim=0) == 1).all():
            raise ValueError(
                f"test is {list(test.shape)}, labellings {list(labellings.shape)}; every row must be in exactly one "
                "fold."
            )
        if is_number:
            labels, values, classes = labellings.double(), labellings.T.double(), 1
        elif labellings.dtype == torch.bool:
            labels, values, classes = labellings.to(torch.int64), labellings.T.double(), 1
        else:
            labels, classes = labellings, int(labellings.max()) + 1
            values = torch.nn.functional.one_hot(labels.T, classes).double().flatten(1)
        cell = torch.zeros(test.shape[1], dtype=torch.int64)
        for fold, rows in enumerate(test):
            cell[rows] = fold
        kept, weight = _selection_rows(cell if is_number else cell + len(test) * labels[0])
        return cls(labels, values, classes, is_number, cell, len(test), kept, weight)


def _selection_rows(strata: Int64[Tensor, " example"]) -> tuple[Tensor, Tensor]:
    """At most 50,000 rows, evenly spaced in each stratum, and how many rows each stands for."""
    if len(strata) <= SELECTION_ROWS:
        return torch.arange(len(strata)), torch.ones(len(strata), dtype=torch.float64)
    kept = torch.zeros(len(strata), dtype=torch.float64)
    names = strata.unique()
    for name in names:
        rows = (strata == name).nonzero()[:, 0]
        taken = min(len(rows), SELECTION_ROWS // len(names))
        kept[rows[torch.arange(taken) * len(rows) // taken]] = len(rows) / taken
    rows = kept.nonzero()[:, 0]
    return rows, kept[rows]

"""Which units are on: one bit per unit and row, 1[h > threshold], as features and as a code that can be compared.

    redundancy = (n - number of different codes) / n,     distance(a, b) = popcount(a xor b)

"Neural networks behave as hash encoders" (code: LeavesLei/activation-code): nearly every training input has a code of
its own, and simple classifiers on codes do well. Compare with a model of random weights, which is the baseline, not
with chance. Bits are packed eight to a byte; codes are compared by XOR and popcount, and counted by sorting.

Beware: for ReLU, GELU and SiLU alike the activation is above 0 exactly where the pre-activation is, so `mlp_act` at
threshold 0 gives the bits of a plain MLP. In a gated MLP (Llama, Qwen) `mlp_act` is act(gate) x up, so that a bit is
the sign of the product, not of the gate.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64, Int64, UInt8, UInt64
from torch import Tensor

from microtome.capture.activations import Activations, SiteName
from microtome.capture.sites import Site
from microtome.capture.stored_tensor import in_memory
from microtome.probes.folds import grouped_folds
from microtome.probes.groups import group_codes

NEIGHBOURS = 9
_DISTANCES_AT_ONCE = 2**22  # distances held at once, with the words they are counted from
Codes = UInt8[np.ndarray, "example byte"]


def sign_patterns(
    activations: Activations, sites: Iterable[SiteName] | None = None, *, threshold: float | Mapping = 0.0
) -> Activations:
    """Every site as +1 where a unit is above its threshold and -1 elsewhere, float32; rows and axes as they were.

    Args:
        sites: all if None.
        threshold: a number, or by site a number or an array that broadcasts over `[d]` or `[head, d]`.

    Raises:
        KeyError: a site that was not captured, or one without a threshold.
        ValueError: a threshold of another shape.
    """
    chosen = activations if sites is None else activations.only(sites)
    tensors: dict[Site, Tensor] = {}
    for site in chosen.sites:
        values = in_memory(chosen.tensors[site])
        tensors[site] = torch.where(values > _threshold(threshold, site, values), 1.0, -1.0).to(torch.float32)
    return Activations(chosen.rows, tensors, {**chosen.provenance, "sign_patterns": _said(threshold)})


def _threshold(threshold: float | Mapping, site: Site, values: Tensor) -> Tensor:
    if isinstance(threshold, Mapping):
        by_name = {str(name): value for name, value in threshold.items()}
        if str(site) not in by_name:
            raise KeyError(f"threshold has none for {site}; it has {list(by_name)[:6]}. Give one for every site.")
        threshold = by_name[str(site)]
    given = torch.as_tensor(threshold, dtype=values.dtype, device=values.device)
    if given.isnan().any():
        raise ValueError(f"the threshold of {site} is NaN, above which nothing lies. Give a number.")
    try:
        return given.expand(values.shape[1:])
    except RuntimeError as error:
        raise ValueError(
            f"the threshold of {site} has shape {list(given.shape)}; expected one number, or {list(values.shape[1:])}."
        ) from error


def _said(threshold: float | Mapping) -> float | str:
    return "by site" if isinstance(threshold, Mapping) else float(threshold)


def packed_codes(activations: Activations, sites: Iterable[SiteName] | None = None) -> Codes:
    """Bits of all units of all sites, side by side and eight to a byte: 1 where the value is above 0.

    Takes sign patterns or the activations themselves. Padding bits are 0. Raises KeyError for a site that is not there.
    """
    chosen = activations if sites is None else activations.only(sites)
    bits = [(in_memory(tensor) > 0).flatten(1).cpu().numpy() for tensor in chosen.tensors.values()]
    return np.packbits(np.concatenate(bits, axis=1), axis=1)


def code_redundancy(codes: Codes) -> float:
    """The share of rows whose code another row had before: (n - different codes) / n. Sorts rows, compares no pairs.

    Raises ValueError for no rows.
    """
    if not len(codes):
        raise ValueError("codes has no rows.")
    rows = np.ascontiguousarray(codes).view(np.dtype((np.void, codes.shape[1]))).ravel()
    return (len(rows) - len(np.unique(rows))) / len(rows)


def hamming_neighbours(
    queries: UInt8[np.ndarray, "query _"], references: UInt8[np.ndarray, "reference _"], k: int = NEIGHBOURS
) -> tuple[Int64[np.ndarray, "query neighbour"], Int64[np.ndarray, "query neighbour"]]:
    """The k references nearest to each query, nearest first (of equal ones the earlier row), and how many bits differ.

    Raises ValueError for codes of another width, and fewer references than k.
    """
    if queries.shape[1] != references.shape[1]:
        raise ValueError(
            f"queries have {queries.shape[1]} bytes, references {references.shape[1]}. Use the same units."
        )
    if not 1 <= k <= len(references):
        raise ValueError(f"k={k} neighbours of {len(references)} references. Give k from 1 to {len(references)}.")
    left, right = _words(queries), _words(references)
    index, distance = [], []
    step = max(1, _DISTANCES_AT_ONCE // max(1, right.size))
    for start in range(0, len(left), step):
        differ = left[start : start + step, None] ^ right[None]
        counts = np.bitwise_count(differ).sum(axis=2, dtype=np.int64)
        keys = counts * len(right) + np.arange(len(right))  # one number orders by distance, then by row
        nearest = np.argpartition(keys, k - 1, axis=1)[:, :k]
        order = np.take_along_axis(nearest, np.argsort(np.take_along_axis(keys, nearest, axis=1), axis=1), axis=1)
        index.append(order)
        distance.append(np.take_along_axis(counts, order, axis=1))
    return np.concatenate(index), np.concatenate(distance)


def _words(codes: Codes) -> UInt64[np.ndarray, "example word"]:
    """Bytes as 64-bit words, padded with zeros."""
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 8)))
    return np.ascontiguousarray(padded).view(np.uint64)


@dataclass(frozen=True, eq=False)
class CodeNeighbours:
    """Labels told by the nearest codes of other groups.

    Attributes:
        table: per site `site`, `n_units`, `redundancy`, `accuracy` (of rows by neighbours in the other folds' groups)
            and `majority` (accuracy of the training folds' commonest class), shares of 1.
        predicted: class number of each row by site, classes ascending.
        classes: what the numbers mean.
        test: `[fold, example]`, the rows that each fold held out.
    """

    table: pd.DataFrame
    predicted: dict[Site, Int64[np.ndarray, " example"]]
    classes: tuple
    test: np.ndarray


def code_neighbours(
    activations: Activations,
    labels: str | np.ndarray | pd.Series,
    *,
    groups: str | np.ndarray | pd.Series,
    sites: Iterable[SiteName] | None = None,
    k: int = NEIGHBOURS,
    folds: int = 5,
    seed: int = 0,
) -> CodeNeighbours:
    """k nearest codes by Hamming distance, out of fold and by group: which class most of them have.

    Args:
        activations: sign patterns or activations; a bit is 1 above 0.
        labels: class of every row, or the name of a column.
        groups: one key per row, the name of a column, or "rows" where rows are independent; no group is split.
        sites: all if None; heads of a site count as one code.
        k: neighbours that vote; of equal votes the class of the nearer neighbours (least sum of places) wins.

    Raises:
        KeyError: a site or column that is not there.
        ValueError: labels missing or of one class, groups as `group_codes`, folds as `grouped_folds`, k larger than a
            fold's training rows.
    """
    rows = activations.rows
    y, classes = _classes(rows[labels] if isinstance(labels, str) else labels, len(rows))
    if isinstance(groups, str) and groups != "rows":
        groups = rows[groups]
    texts = next((rows[name] for name in ("string", "token_ids") if name in rows), None)
    codes_of_groups = group_codes(groups, n_rows=len(rows), texts=texts, entities={"text": rows["text"]})
    test = grouped_folds(y, codes_of_groups, folds=folds, seed=seed)
    majority = np.mean(np.concatenate([y[held] == np.bincount(y[~held]).argmax() for held in test]))
    chosen = activations if sites is None else activations.only(sites)
    predicted, table = {}, []
    for site, tensor in chosen.tensors.items():
        codes = packed_codes(activations, [site])
        found = np.empty(len(y), dtype=np.int64)
        for held in test:
            train = np.flatnonzero(~held)
            nearest, _ = hamming_neighbours(codes[held], codes[train], k)
            found[held] = _vote(y[train][nearest], len(classes))
        predicted[site] = found
        n_units = int(np.prod(tensor.shape[1:]))
        table.append((str(site), n_units, code_redundancy(codes), float((found == y).mean()), float(majority)))
    columns = ["site", "n_units", "redundancy", "accuracy", "majority"]
    return CodeNeighbours(pd.DataFrame(table, columns=columns), predicted, classes, test)


def _classes(labels: np.ndarray | pd.Series, n_rows: int) -> tuple[Int64[np.ndarray, " example"], tuple]:
    series = pd.Series(np.asarray(labels))
    if len(series) != n_rows:
        raise ValueError(f"labels has {len(series)} entries for {n_rows} rows. Pass one per row.")
    if series.isna().any():
        raise ValueError(f"label of row {int(series.isna().argmax())} is missing. Drop the row, or fill it in.")
    codes, values = pd.factorize(series, sort=True)
    if len(values) < 2:
        raise ValueError(f"labels holds one class only ({values.tolist()}); neighbours need two to tell apart.")
    return codes.astype(np.int64), tuple(values.tolist())


def _vote(labels: Int64[np.ndarray, "query neighbour"], n_classes: int) -> Int64[np.ndarray, " query"]:
    """The commonest class; of equal ones the class whose neighbours come earlier, then the smaller."""
    is_class = labels[:, :, None] == np.arange(n_classes)
    places: Float64[np.ndarray, " neighbour"] = np.arange(labels.shape[1]) / labels.shape[1] ** 2
    score = (is_class * (1 - places[None, :, None])).sum(axis=1)
    return score.argmax(axis=1)

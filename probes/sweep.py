"""Linear probes of every site and head, cross-validated by group, with intervals and controls.

For each outer fold a logistic probe is fitted on the other folds, its strength chosen on inner folds of those alone
(`nested_fit`), and its logits kept for the rows of that fold. AUROC counts the pairs of rows that one fit tested
(`fold_auroc`): logits of two folds come from two fits, and pooling them would compare intercepts. Accuracy takes logit
0 as threshold.

Every site comes with: a 95 % cluster-bootstrap interval, widened for cross-validation (`bootstrap`); the whole
pipeline on shuffled labels, group by group, same folds (control_*; selectivity = auroc - control_auroc); and
p_best_site, the chance that the best of all sites scores as high by luck (`permutation`). `selected` scores the choice
of a site itself: in each fold the site is chosen by inner loss alone.

Beware: the control is one shuffle, the same at every site, so its AUROC scatters about 0.5 like that of any useless
probe, and neighbours scatter together; what luck does over all sites is the null's to say. A linear probe shows that a
label can be read off a site, not that the model reads it.
"""

import hashlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby, islice
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Int64
from torch import Tensor
from tqdm.auto import tqdm

from microtome.capture.activations import Activations
from microtome.data.provenance import environment
from microtome.probes.folds import grouped_folds, nested_folds
from microtome.probes.groups import ROWS, group_codes
from microtome.probes.labels import binary_labels
from microtome.probes.logistic_solver import default_strengths
from microtome.probes.nested_fit import NestedFit, nested_fits
from microtome.probes.permutation import RIDGE, best_site_null, group_permutations, ridge_auroc
from microtome.probes.site_blocks import SiteBlock, as_activations, site_blocks
from microtome.probes.sweep_checkpoint import SweepCheckpoint
from microtome.probes.sweep_result import Sweep
from microtome.probes.sweep_table import interval_stretch, selected_site, sweep_table

FEWEST_PERMUTATIONS = 20
FEWEST_BOOTSTRAPS = 100
_SHUFFLES_TRIED = 100
_SIDE_BY_SIDE_BYTES = 2**25  # float64 rows of the sites in one call of the solver


def sweep(
    activations: Activations | Mapping,
    labels: str | Sequence | np.ndarray | pd.Series | Tensor,
    *,
    groups: str | Sequence | np.ndarray | pd.Series | Tensor,
    sites: Iterable | None = None,
    strengths: Sequence[float] | None = None,
    folds: int = 5,
    inner_folds: int = 4,
    permutations: int = 999,
    bootstraps: int = 2000,
    seed: int = 0,
    texts: Iterable | None = None,
    entities: Mapping[str, Iterable] | None = None,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> Sweep:
    """Probe every site for a binary label.

    Args:
        activations: Activations, or a mapping of site names to arrays `[row, d]` or `[row, head, d]`.
        labels: two different values, one per row, or the name of a column of `activations.rows`. The larger value is
            the positive class.
        groups: one key per row, the name of a column, or "rows" to declare that rows are independent. Rows of a group
            are never split. Equal texts or entities in different groups are refused (`merged_groups` joins them).
        sites: names of sites, heads or kinds; every captured site if None.
        strengths: values of C to choose from, ascending; `default_strengths` of each site's width if None.
        folds, inner_folds: outer folds that report, inner ones that choose the strength.
        permutations: shuffles for the null of the best site, at least 20; 0 leaves p_best_site NaN.
        bootstraps: draws of the groups for the intervals, at least 100.
        seed: fixes folds, shuffles and draws, for rows in this order.
        texts: one string per row for the leakage check; the column `string` or `token_ids` if None and there is one.
        entities: further keys that must not cross groups, by name; the number of the text always is one.
        checkpoint: a folder that keeps what is finished, so that the same sweep goes on after it was killed; the caller
            deletes it.
        progress: show a bar.

    Raises:
        ValueError: labels as `binary_labels`, groups as `group_codes`, folds as `grouped_folds`, sites as
            `site_blocks`; labels that cannot be shuffled within groups; strengths that do not ascend.
        KeyError: a column or site that is not there.
    """
    started = time.perf_counter()
    activations = as_activations(activations)
    rows = activations.rows
    strengths = None if strengths is None else _ascending(strengths)
    if bootstraps < FEWEST_BOOTSTRAPS:
        raise ValueError(f"bootstraps={bootstraps}: 95 % intervals need at least {FEWEST_BOOTSTRAPS} draws.")
    if permutations != 0 and permutations < FEWEST_PERMUTATIONS:
        raise ValueError(
            f"permutations={permutations}: p is at least 1 / (permutations + 1), so fewer than {FEWEST_PERMUTATIONS} "
            "never reach 0.05. Give more, or 0 for no null."
        )
    positive, classes = binary_labels(_column(labels, rows, "labels"), n_rows=len(rows))
    if not (isinstance(groups, str) and groups == ROWS):
        groups = _column(groups, rows, "groups")
    if texts is None:
        texts = next((rows[name] for name in ("string", "token_ids") if name in rows), None)
    if "text" in rows and "text" not in (entities or {}):  # rows of one text, whatever it says
        entities = {**(entities or {}), "text": rows["text"]}
    codes = group_codes(groups, n_rows=len(rows), texts=texts, entities=entities)
    blocks = site_blocks(activations, sites)

    seeds = [int(word) for word in np.random.SeedSequence(seed).generate_state(4)]
    test = grouped_folds(positive.astype(np.int64), codes, folds=folds, seed=seeds[0])
    nested = nested_folds(positive.astype(np.int64), codes, test, folds=inner_folds, seed=seeds[0])
    control = _control_labels(positive, codes, test, nested, seed=seeds[1])
    shuffles = group_permutations(positive, codes, test, permutations=permutations, seed=seeds[2])
    labellings = torch.from_numpy(np.stack([positive, control]))
    tests = torch.from_numpy(test)

    settings = {"strengths": strengths, "ridge": RIDGE}
    kept = SweepCheckpoint.of(checkpoint, [positive, control, test, nested, shuffles], settings)
    prepared = time.perf_counter()
    n_probes = sum(len(block.probes) for block in blocks)
    with tqdm(total=n_probes, desc="probes", unit="probe", disable=not progress) as bar:
        fits = _fit_all(blocks, labellings, tests, torch.from_numpy(nested), strengths, kept, bar)
    fitted = time.perf_counter()
    statistics = None
    if permutations:
        labelled = torch.from_numpy(np.concatenate([positive[None], shuffles]))
        with tqdm(total=n_probes, desc="null of the best site", unit="probe", disable=not progress) as bar:
            statistics = _ridge_statistics(blocks, labelled, tests, kept, bar)
    shuffled = time.perf_counter()

    null = None if statistics is None else best_site_null(statistics)
    probes = [probe for block in blocks for probe in block.probes]
    resampling = {"draws": bootstraps, "seed": seeds[3]}
    groups_of_rows = torch.from_numpy(codes)
    table = sweep_table(probes, fits, labellings, groups_of_rows, tests, null, **resampling)
    provenance = {
        "settings": {
            "sites": [str(block.probes[0].whole) for block in blocks],
            "strengths": _strengths_used(blocks, strengths),
            "folds": folds,
            "inner_folds": inner_folds,
            "permutations": permutations,
            "bootstraps": bootstraps,
            "seed": seed,
            "ridge_per_training_row": RIDGE,
            "interval_stretch": interval_stretch(folds),
        },
        "data": {
            "rows": len(rows),
            "groups": int(codes.max()) + 1,
            "rows_declared_independent": isinstance(groups, str),
            "texts_checked": texts is not None,
            "classes": [str(value) for value in classes],
            "positive_rows": int(positive.sum()),
            "labels_sha256": _digest(positive),
            "folds_sha256": _digest(test),
        },
        "activations": activations.provenance,
        "environment": environment(),
        "seconds": {
            "checks": round(prepared - started, 3),
            "probes": round(fitted - prepared, 3),
            "null": round(shuffled - fitted, 3),
            "intervals": round(time.perf_counter() - shuffled, 3),
        },
    }
    return Sweep(
        table=table,
        scores=torch.stack([fit.scores[0] for fit in fits]),
        control_scores=torch.stack([fit.scores[1] for fit in fits]),
        coefficients={str(probe): fit.coefficients for probe, fit in zip(probes, fits, strict=True)},
        intercepts=torch.stack([fit.intercept for fit in fits]),
        null=torch.empty(0, dtype=torch.float64) if null is None else null.maximum,
        null_line=math.nan if null is None else null.line,
        selected=selected_site(probes, fits, labellings[0], groups_of_rows, tests, **resampling),
        positive=labellings[0],
        control_positive=labellings[1],
        groups=groups_of_rows,
        test=tests,
        fold_strengths=torch.stack([fit.fold_strengths[0] for fit in fits]),
        provenance=provenance,
    )


def _fit_all(
    blocks: list[SiteBlock],
    labellings: Tensor,
    test: Tensor,
    nested: Tensor,
    strengths: tuple[float, ...] | None,
    kept: SweepCheckpoint,
    bar,
) -> list[NestedFit]:
    """One nested fit per probe; sites of one width are solved side by side."""
    fits = []
    for width, same in groupby(blocks, key=lambda block: block.width):
        sites = (named for block in same for named in zip(block.probes, block.features, strict=True))
        together = max(1, _SIDE_BY_SIDE_BYTES // (8 * width * test.shape[1]))
        while some := list(islice(sites, together)):
            names, features = [str(probe) for probe, _ in some], torch.stack([values for _, values in some])
            fits += kept.fits(names, features, partial(nested_fits, features, labellings, test, nested, strengths))
            bar.update(len(features))
    return fits


def _strengths_used(blocks: list[SiteBlock], strengths: tuple[float, ...] | None) -> dict[str, list[float]]:
    """Values of C by the width of a site."""
    widths = sorted({block.width for block in blocks})
    return {str(width): list(strengths or default_strengths(width)) for width in widths}


def _ridge_statistics(blocks: list[SiteBlock], labelled: Tensor, test: Tensor, kept: SweepCheckpoint, bar) -> Tensor:
    statistics = []
    for block in blocks:
        names, features = [str(probe) for probe in block.probes], block.features
        statistics.append(kept.statistics(names, features, partial(ridge_auroc, features, labelled, test)))
        bar.update(len(block.probes))
    return torch.cat(statistics)


def _control_labels(
    positive: Bool[np.ndarray, " example"],
    groups: Int64[np.ndarray, " example"],
    test: Bool[np.ndarray, "fold example"],
    nested: Bool[np.ndarray, "fold inner example"],
    *,
    seed: int,
) -> Bool[np.ndarray, " example"]:
    """The first of 100 shuffles under which every training mask holds both classes."""
    train = np.concatenate([~test, (~test[:, None] & ~nested).reshape(-1, len(positive))])
    shuffles = group_permutations(positive, groups, test, permutations=_SHUFFLES_TRIED, seed=seed)
    held = shuffles.astype(np.float32) @ train.T.astype(np.float32)
    usable = ((held > 0) & (held < train.sum(axis=1))).all(axis=1)
    if not usable.any():
        raise ValueError(
            f"Each of {_SHUFFLES_TRIED} shuffles of the labels leaves a training fold with one class, so there is no "
            "shuffled-label control. Too few groups carry one of the classes: add groups, or ask for fewer folds."
        )
    return shuffles[usable.argmax()]


def _column(values, rows: pd.DataFrame, name: str):
    if not isinstance(values, str):
        return values
    if values not in rows:
        hint = ' or "rows"' if name == "groups" else ""
        raise KeyError(
            f"{name}={values!r} is no column of activations.rows, which has {list(rows)}. Name one of them{hint}, or "
            "pass one value per row."
        )
    return rows[values]


def _ascending(strengths: Sequence[float]) -> tuple[float, ...]:
    values = tuple(float(value) for value in strengths)
    if not values or any(b <= a for a, b in zip((0.0, *values), values, strict=False)):
        raise ValueError(
            f"strengths={values}; give positive values of C in ascending order, such as (0.001, 0.01, 0.1)."
        )
    return values


def _digest(values: np.ndarray) -> str:
    return hashlib.sha256(np.packbits(values).tobytes()).hexdigest()

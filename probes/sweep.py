"""Linear probes of every site and head, cross-validated by group, with intervals, controls and baselines.

Labels are two classes, several, or numbers (`target`); the probe is a logistic one, or what `probe=` names (`methods`).
For each outer fold a probe is fitted on the other folds, its strength chosen on inner folds of those alone
(`nested_fit`), and its scores kept for the rows of that fold. `measures` says what is reported of them.

Every site comes with: a 95 % cluster-bootstrap interval, widened for cross-validation (`bootstrap`); the whole
pipeline on shuffled labels, group by group, same folds (control_*; selectivity = auroc - control_auroc), and on a
control task, a label drawn once for each type of token (`control_task`, control_task_*); and p_best_site, the chance
that the best of all sites scores as high by luck (`permutation`). `selected` scores the choice of a site itself: in
each fold the site is chosen by inner loss alone. `baselines` is what the words, their number and their place tell.

Beware: the control is one shuffle, the same at every site, so its AUROC scatters about 0.5 like that of any useless
probe, and neighbours scatter together; what luck does over all sites is the null's to say. A linear probe shows that a
label can be read off a site, not that the model reads it.
"""

import hashlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations, groupby, islice
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool
from torch import Tensor
from tqdm.auto import tqdm

from microtome.capture.activations import Activations
from microtome.data.provenance import environment
from microtome.probes.baselines import baselines as text_baselines
from microtome.probes.control_task import control_task, coverage, type_codes
from microtome.probes.folds import grouped_folds, nested_folds
from microtome.probes.groups import ROWS
from microtome.probes.labelled_rows import SIDE_BY_SIDE_BYTES, column_of, labelled_rows
from microtome.probes.measures import Resampling
from microtome.probes.methods import ProbeMethod, probe_method
from microtome.probes.nested_fit import NestedFit
from microtome.probes.permutation import RIDGE, best_site_null, group_permutations, ridge_statistic, shuffled_control
from microtome.probes.site_blocks import SiteBlock, as_activations
from microtome.probes.sweep_checkpoint import SweepCheckpoint
from microtome.probes.sweep_result import Sweep
from microtome.probes.sweep_table import baseline_table, selected_site, sweep_table
from microtome.probes.target import Kind, Target

FEWEST_PERMUTATIONS = 20
FEWEST_BOOTSTRAPS = 100
LEAST_COVERAGE = 0.5  # share of test rows whose token some training row has, from which the control task is made
LARGEST_TYPE = 0.5  # share of rows that one token may have: a label that most rows share is no task


def sweep(
    activations: Activations | Mapping | np.ndarray | Tensor | pd.DataFrame,
    labels: str | Sequence | np.ndarray | pd.Series | Tensor,
    *,
    groups: str | Sequence | np.ndarray | pd.Series | Tensor,
    sites: Iterable | None = None,
    target: Kind | None = None,
    probe: str | None = None,
    strengths: Sequence[float] | None = None,
    class_weight: Literal["balanced"] | None = None,
    folds: int = 5,
    inner_folds: int = 4,
    permutations: int = 999,
    bootstraps: int = 2000,
    seed: int = 0,
    texts: Iterable | None = None,
    entities: Mapping[str, Iterable] | None = None,
    types: str | Sequence | np.ndarray | pd.Series | None = "token",
    baselines: bool = True,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> Sweep:
    """Probe every site for a label.

    Args:
        activations: Activations or a store, one array of features `[row, d]` or `[row, head, d]`, a table of numbers,
            or a mapping of site names to arrays.
        labels: one per row, or the name of a column of `activations.rows`. Of two values the larger is the positive
            class; other names are classes, numbers with a fraction numbers.
        groups: one key per row, the name of a column, or "rows" to declare that rows are independent. Rows of a group
            are never split. Equal texts or entities in different groups are refused (`merged_groups` joins them).
        sites: names of sites, heads or kinds; every captured site if None.
        target: "binary", "classes" or "numbers", where the labels leave it open.
        probe: a name of `methods`; the logistic one for classes and the ridge for numbers if None.
        strengths: values to choose from, ascending: of C, or what the probe has instead; its default ones if None.
        class_weight: "balanced" lets both classes weigh the same (logistic probe). Scores are then no calibrated logits
            of the data as they are.
        folds, inner_folds: outer folds that report, inner ones that choose the strength.
        permutations: shuffles for the null of the best site, at least 20; 0 leaves p_best_site NaN.
        bootstraps: draws of the groups for the intervals, at least 100.
        seed: fixes folds, shuffles and draws, for rows in this order.
        texts: one string per row for the leakage check; the column `string` or `token_ids` if None and there is one.
        entities: further keys that must not cross groups, by name; the number of the text always is one.
        types: one key per row, or a column, that the control task draws its labels for; None for no such control. The
            column `token` gives none either where it is missing, where tokens come back too seldom or where most rows
            have the same one, and provenance says so.
        baselines: fit what can be told from the texts alone, where they are known.
        checkpoint: a folder that keeps what is finished, so that the same sweep goes on after it was killed; the caller
            deletes it.
        progress: show a bar.

    Raises:
        ValueError: labels as `target_of`, groups as `group_codes`, folds as `grouped_folds`, sites as
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
    data = labelled_rows(activations, labels, groups=groups, sites=sites, target=target, texts=texts, entities=entities)
    wanted, codes, blocks = data.target, data.groups, list(data.blocks)
    method = probe_method(probe, wanted.kind, class_weight=class_weight)
    method.require(folds)
    _refuse_too_large(blocks, method, permutations)

    seeds = [int(word) for word in np.random.SeedSequence(seed).generate_state(4)]
    test = grouped_folds(wanted.codes, codes, folds=folds, seed=seeds[0], names=wanted.names)
    nested = nested_folds(wanted.codes, codes, test, folds=inner_folds, seed=seeds[0], names=wanted.names)
    truth = wanted.values.numpy()
    masks = _training_masks(test, nested)
    controls = [shuffled_control(truth, codes, test, masks, seed=seeds[1])]
    task, task_facts = _control_task(types, rows, truth, test, masks, seed=seeds[1])
    controls += [] if task is None else [task]
    shuffles = group_permutations(truth, codes, test, permutations=permutations, seed=seeds[2])
    labellings = torch.from_numpy(np.stack([truth, *controls]))
    tests, nested_tests = torch.from_numpy(test), torch.from_numpy(nested)

    settings = {"strengths": strengths, "ridge": RIDGE, "probe": method.name, "weight": class_weight}
    kept = SweepCheckpoint.of(checkpoint, [labellings.numpy(), test, nested, shuffles], settings)
    prepared = time.perf_counter()
    n_probes = sum(len(block.probes) for block in blocks)
    with tqdm(total=n_probes, desc="probes", unit="probe", disable=not progress) as bar:
        fits = _fit_all(method, blocks, labellings, tests, nested_tests, strengths, kept, bar)
    fitted = time.perf_counter()
    statistics = None
    if permutations:
        labelled = torch.from_numpy(np.concatenate([truth[None], shuffles]))
        with tqdm(total=n_probes, desc="null of the best site", unit="probe", disable=not progress) as bar:
            statistics = _ridge_statistics(blocks, labelled, wanted.kind, tests, kept, bar)
    shuffled = time.perf_counter()

    null = None if statistics is None else best_site_null(statistics)
    probes = [probe for block in blocks for probe in block.probes]
    resampling = Resampling(torch.from_numpy(codes), tests, draws=bootstraps, seed=seeds[3])
    table = sweep_table(probes, fits, labellings, wanted.kind, resampling, null)
    known: dict[str, NestedFit] = {}
    if baselines and (data.texts is not None or "token" in rows):
        known = text_baselines(
            data.texts if data.texts is not None and _are_strings(data.texts) else None,
            labellings=labellings[:1],
            test=tests,
            nested=nested_tests,
            rows=rows,
        )
    provenance = {
        "settings": {
            "sites": [str(block.probes[0].whole) for block in blocks],
            "probe": method.name,
            "class_weight": class_weight,
            "strengths": _strengths_used(method, blocks, strengths),
            "folds": folds,
            "inner_folds": inner_folds,
            "permutations": permutations,
            "bootstraps": bootstraps,
            "seed": seed,
            "ridge_per_training_row": RIDGE,
            "interval_stretch": resampling.stretch,
        },
        "target": {"kind": wanted.kind, "classes": [str(value) for value in wanted.classes]},
        "data": {
            "rows": len(rows),
            "groups": int(codes.max()) + 1,
            "rows_declared_independent": isinstance(groups, str) and groups == ROWS,
            "texts_checked": data.texts is not None,
            "control_task": task_facts,
            **_counts(wanted),
            "labels_sha256": _digest(truth),
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
    nothing = torch.empty(0, dtype=torch.float64)
    has_task = len(labellings) > 2
    return Sweep(
        table=table,
        scores=torch.stack([fit.scores[0] for fit in fits]),
        control_scores=torch.stack([fit.scores[1] for fit in fits]),
        control_task_scores=torch.stack([fit.scores[2] for fit in fits]) if has_task else nothing,
        coefficients={str(probe): fit.coefficients for probe, fit in zip(probes, fits, strict=True)},
        intercepts=torch.stack([fit.intercept for fit in fits]),
        null=nothing if null is None else null.maximum,
        null_line=math.nan if null is None else null.line,
        selected=selected_site(probes, fits, labellings[0], wanted.kind, resampling),
        baselines=baseline_table(known, labellings[0], wanted.kind, resampling),
        baseline_scores=torch.stack([fit.scores[0] for fit in known.values()]) if known else nothing,
        truth=labellings[0],
        control_truth=labellings[1],
        control_task_truth=labellings[2] if has_task else nothing,
        groups=resampling.groups,
        test=tests,
        fold_strengths=torch.stack([fit.fold_strengths[0] for fit in fits]),
        provenance=provenance,
    )


def _fit_all(
    method: ProbeMethod,
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
    for (width, is_large), same in groupby(blocks, key=lambda block: (block.width, block.is_large)):
        if is_large:
            for block in same:
                names = [str(probe) for probe in block.probes]
                fit = partial(method.fits_of_chunks, block.chunks, labellings, test, strengths)
                fits += kept.fits(names, block.chunks(), fit)
                bar.update(len(names))
            continue
        sites = (named for block in same for named in zip(block.probes, block.features, strict=True))
        together = max(1, SIDE_BY_SIDE_BYTES // (8 * width * test.shape[1]))
        while some := list(islice(sites, together)):
            names, features = [str(probe) for probe, _ in some], torch.stack([values for _, values in some])
            fits += kept.fits(names, [features], partial(method.fits, features, labellings, test, nested, strengths))
            bar.update(len(features))
    return fits


def _refuse_too_large(blocks: list[SiteBlock], method: ProbeMethod, permutations: int) -> None:
    for block in blocks:
        if block.is_large and (method.fits_of_chunks is None or permutations):
            raise ValueError(
                f"{block.probes[0].whole} takes {block.values.nbytes / 1e9:.1f} GB, more than is read at once, and "
                f'probe={method.name!r} with permutations={permutations} needs it in memory. Give probe="lda" or '
                '"ridge", which read it in chunks, and permutations=0; or take fewer rows, or one head.'
            )


def _strengths_used(
    method: ProbeMethod, blocks: list[SiteBlock], strengths: tuple[float, ...] | None
) -> dict[str, list[float]]:
    """Values to choose from, by the width of a site."""
    widths = sorted({block.width for block in blocks})
    return {str(width): list(strengths or method.default_strengths(width)) for width in widths}


def _counts(target: Target) -> dict:
    """How many rows of each class, or where the numbers lie."""
    if target.kind == "numbers":
        return {"mean": target.values.mean().item(), "deviation": target.values.std(correction=0).item()}
    counts = np.bincount(target.codes, minlength=len(target.classes))
    rows = {str(name): int(count) for name, count in zip(target.classes, counts, strict=True)}
    return {"classes": list(rows), "rows_of_class": list(rows.values())}


def _ridge_statistics(
    blocks: list[SiteBlock], labelled: Tensor, kind: Kind, test: Tensor, kept: SweepCheckpoint, bar
) -> Tensor:
    statistics = []
    for block in blocks:
        names, features = [str(probe) for probe in block.probes], block.features
        compute = partial(ridge_statistic, features, labelled, test, kind=kind)
        statistics.append(kept.statistics(names, [features], compute))
        bar.update(len(block.probes))
    return torch.cat(statistics)


def _training_masks(
    test: Bool[np.ndarray, "fold example"], nested: Bool[np.ndarray, "fold inner example"]
) -> Bool[np.ndarray, "mask example"]:
    """All rows that some fit trains on: without a fold, without one of its inner folds or without a second fold."""
    inner = (~test[:, None] & ~nested).reshape(-1, test.shape[1])
    pairs = [~(first | second) for first, second in combinations(test, 2)] if len(test) > 2 else []
    return np.concatenate([~test, inner, np.reshape(pairs, (-1, test.shape[1])).astype(bool)])


def _control_task(
    types,
    rows: pd.DataFrame,
    truth: np.ndarray,
    test: Bool[np.ndarray, "fold example"],
    masks: Bool[np.ndarray, "mask example"],
    *,
    seed: int,
) -> tuple[np.ndarray | None, dict]:
    """Labels of the control task, or None, and what provenance says of them. Types that were given must do."""
    is_default = isinstance(types, str) and types == "token"
    if types is None or (is_default and ("token" not in rows or rows["token"].nunique() < 2)):
        return None, {"made": False, "reason": "no types" if types is not None else "not wanted"}
    keys = column_of(types, rows, "types")
    share = coverage(keys, test)
    counts = np.bincount(type_codes(keys, len(rows)))
    largest = float(counts.max() / len(rows))
    facts = {"types": len(counts), "coverage": share, "share_of_largest_type": largest}
    if is_default and share < LEAST_COVERAGE:
        return None, {"made": False, "reason": "types come back too seldom", **facts}
    if is_default and largest > LARGEST_TYPE:
        return None, {"made": False, "reason": "most rows are of one type", **facts}
    try:
        return control_task(keys, truth, seed=seed, train=masks), {"made": True, **facts}
    except ValueError as error:
        if not is_default:
            raise
        return None, {"made": False, "reason": str(error), **facts}


def _are_strings(texts) -> bool:
    return all(isinstance(text, str) for text in texts)


def _ascending(strengths) -> tuple[float, ...]:
    if np.ndim(strengths) != 1 or isinstance(strengths, str):
        raise ValueError(f"strengths={strengths!r}; give several in ascending order, or one as (value,).")
    values = tuple(float(value) for value in strengths)
    if not values or any(b <= a for a, b in zip((0.0, *values), values, strict=False)):
        raise ValueError(
            f"strengths={values}; give positive values of C in ascending order, such as (0.001, 0.01, 0.1)."
        )
    return values


def _digest(values: np.ndarray) -> str:
    packed = np.packbits(values) if values.dtype == bool else np.ascontiguousarray(values)
    return hashlib.sha256(packed.tobytes()).hexdigest()

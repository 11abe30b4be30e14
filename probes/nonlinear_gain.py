"""What a network reads from a site beyond what a linear probe reads, everything else being equal.

At every site both probes, logistic (`nested_fit`) and network (`mlp_nested`), get the same rows, pooled the same way,
and the same outer and inner folds; the penalty of the one and the epochs of the other are chosen by log-loss on the
inner folds. Then

    gain = AUROC of the network - AUROC of the linear probe      (`fold_auroc` on the same held-out rows),

with a cluster-bootstrap interval of the paired difference (both probes in the same draws; stretched for
cross-validation, see `bootstrap`) and p_gain_best_site, the chance that the best of all sites gains as much if at no
site it matters which probe a score came from (`paired_swap`).

Beside it stands what either probe makes of labels that say nothing: shuffled ones, and, given `types`, those of a
Hewitt-Liang control task, which only memory of the type gives. A network that gains 1 point on the task and 20 on the
control task has added nothing: look at mlp_type_selectivity - linear_type_selectivity.

The studies this follows (NL-ITI, Hoscilowicz et al. 2024) compare a network on the mean of several tokens with a linear
probe on the last one, which mixes two changes; `pool` is the same for both here.

Beware: the linear probe is fitted to its optimum, the network stops after 10 epochs. A negative gain means that it has
not learned, not that the site is linear: try `MlpSettings(epochs=..., learning_rate=...)`; the epoch is chosen on inner
folds, so that later ones do no harm. Intervals and p take the fits as they are.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor
from tqdm.auto import tqdm

from microtome.capture.activations import Activations
from microtome.capture.sites import Site
from microtome.probes.bootstrap import bootstrap_auroc, cross_validation_stretch, percentile_intervals
from microtome.probes.control_task import control_task, coverage
from microtome.probes.folds import grouped_folds, nested_folds
from microtome.probes.labelled_rows import column_of, labelled_rows
from microtome.probes.metrics import fold_auroc, log_loss_bits
from microtome.probes.mlp_nested import mlp_nested_fits
from microtome.probes.mlp_networks import MlpSettings
from microtome.probes.nested_fit import nested_fits
from microtome.probes.paired_swap import SwapNull, paired_swap
from microtome.probes.permutation import shuffled_control
from microtome.probes.pooling import last_rows, pool_last
from microtome.probes.site_blocks import as_activations
from microtome.probes.table_html import table_html

_SHUFFLES_TRIED = 100
_FEWEST_BATCHES = 1000
_PROBES = ("linear", "mlp")


@dataclass(frozen=True, eq=False)
class NonlinearGain:
    """Both probes of every site.

    Columns of `table`, one row per site or head: site, kind, layer, head; linear_auroc, mlp_auroc, gain, each with
    _low and _high (95 %); p_gain, of the site alone, and p_gain_best_site (NaN without permutations); linear_bits and
    mlp_bits, log-loss per row; linear_control_auroc, mlp_control_auroc under shuffled labels, and linear_selectivity,
    mlp_selectivity, AUROC less that; with types linear_type_auroc, mlp_type_auroc, linear_type_selectivity and
    mlp_type_selectivity likewise; strength (C) and epochs, chosen, the median over outer folds.
    """

    table: pd.DataFrame
    linear_scores: Float64[Tensor, "site labelling example"]  # held-out logits
    mlp_scores: Float64[Tensor, "site labelling example"]
    labellings: Bool[Tensor, "labelling example"]  # the real labels, shuffled ones, those of the control task if any
    groups: Int64[Tensor, " example"]
    test: Bool[Tensor, "fold example"]
    null: Float64[Tensor, " permutation"]  # largest gain of any site in each exchange of the scores, stretched
    type_coverage: float  # share of held-out rows whose type the training rows hold; NaN without types
    provenance: dict[str, Any]

    def __repr__(self) -> str:
        best = self.strongest(1).iloc[0]
        return (
            f"NonlinearGain({len(self.table)} sites, best gain {best['site']} {best['gain']:+.3f} "
            f"[{best['gain_low']:.3f}, {best['gain_high']:.3f}], p {best['p_gain_best_site']:.3g})"
        )

    def _repr_html_(self) -> str:
        return table_html(repr(self), self.table)

    def strongest(self, count: int = 10) -> pd.DataFrame:
        """The sites of largest gain."""
        return self.table.sort_values("gain", ascending=False, kind="stable").head(count)


def nonlinear_gain(
    activations: Activations | Mapping,
    labels: str | Sequence | np.ndarray | pd.Series | Tensor,
    *,
    groups: str | Sequence | np.ndarray | pd.Series | Tensor,
    sites: Iterable | None = None,
    pool: Literal["last"] | int | None = None,
    types: str | Sequence | np.ndarray | pd.Series | Tensor | None = None,
    settings: MlpSettings | None = None,
    strengths: Sequence[float] | None = None,
    folds: int = 5,
    inner_folds: int = 4,
    permutations: int = 999,
    bootstraps: int = 2000,
    seed: int = 0,
    texts: Iterable | None = None,
    entities: Mapping[str, Iterable] | None = None,
    progress: bool = True,
) -> NonlinearGain:
    """Fit both probes at every site.

    Args:
        activations: Activations, or a mapping of site names to arrays `[row, d]` or `[row, head, d]`.
        labels: two different values, one per row, or the name of a column; the larger is the positive class.
        groups: one key per row, a column, or "rows" to declare the rows independent; as in `sweep`.
        sites: names of sites, heads or kinds; all if None.
        pool: for rows that are tokens: "last", or how many of the last tokens of each text to average (NL-ITI's
            command line takes 2). Labels, groups and types must then be the same in all pooled rows of a text. None
            takes the rows as they are.
        types: one key per row, or a column, for the control task: the token at the probed position, or the entity.
        settings: of the network; if None those of NL-ITI, with more epochs where its ten would be fewer than 1,000
            batches: a network that was not trained shows no gain, whatever there is.
        strengths: values of C of the linear probe; those of `sweep` if None.
        folds, inner_folds: outer folds that report, inner ones that choose.
        permutations: exchanges of the two probes' scores, at least 20, or 0.
        bootstraps: draws of the groups.
        seed: fixes folds, start values, batches, shuffles and draws.
        texts, entities: checked against leaking between groups, as in `sweep`.
        progress: show a bar.

    Raises:
        ValueError: what `target_of`, `group_codes`, `grouped_folds`, `site_blocks` and `control_task` raise; labels
            that cannot be shuffled within groups, and ones that differ within a pooled text.
        KeyError: a column or site that is not there.
    """
    activations = as_activations(activations)
    columns = {"labels": labels, "groups": groups, "types": types}
    columns = {name: column_of(values, activations.rows, name) for name, values in columns.items()}
    if pool is not None:
        activations, columns = _pooled(activations, columns, sites, 1 if pool == "last" else pool)
        sites = None
    data = labelled_rows(
        activations,
        columns["labels"],
        groups=columns["groups"],
        sites=sites,
        target="binary",
        texts=texts,
        entities=entities,
    )
    rows, target, codes = data.rows, data.target, data.groups
    settings = settings or MlpSettings(epochs=_epochs_for(len(rows)))

    seeds = [int(word) for word in np.random.SeedSequence(seed).generate_state(6)]
    test = grouped_folds(target.codes, codes, folds=folds, seed=seeds[0])
    nested = nested_folds(target.codes, codes, test, folds=inner_folds, seed=seeds[0])
    train = np.concatenate([~test, (~test[:, None] & ~nested).reshape(-1, len(rows))])
    positive = target.values.numpy()
    labellings = [positive, shuffled_control(positive, codes, test, train, seed=seeds[1])]
    if columns["types"] is not None:
        labellings.append(control_task(columns["types"], positive, seed=seeds[2], train=train))
    labelled, tests = torch.from_numpy(np.stack(labellings)), torch.from_numpy(test)

    parts = []
    masks = (labelled, tests, torch.from_numpy(nested))
    probes = data.probes
    with tqdm(total=len(probes), desc="sites", disable=not progress) as bar:
        for features in data.chunks():
            linear = nested_fits(features, *masks, strengths)
            network = mlp_nested_fits(features, *masks, settings=settings, seed=seeds[3] % 2**31)
            strength = torch.stack([fit.fold_strengths[0].median() for fit in linear])
            scores = torch.stack([fit.scores for fit in linear])
            parts.append((scores, network.scores, strength, network.epochs[:, 0].median(-1).values))
            bar.update(len(features))
    linear_scores, mlp_scores, strength, epochs = (torch.cat(part) for part in zip(*parts, strict=True))
    group = torch.from_numpy(codes)
    null = None
    if permutations:
        real = (mlp_scores[:, 0], linear_scores[:, 0])
        stretch = cross_validation_stretch(folds)
        null = paired_swap(*real, labelled[0], group, tests, permutations=permutations, seed=seeds[4], stretch=stretch)
    table = _table(probes, (linear_scores, mlp_scores), labelled, group, tests, null, draws=bootstraps, seed=seeds[5])
    covered = math.nan if columns["types"] is None else coverage(columns["types"], test)
    provenance = {
        "rows": len(rows),
        "groups": int(codes.max()) + 1,
        "classes": [str(value) for value in target.classes],
        "pool": pool,
        "network": {**settings.__dict__, "standardised": "by the training rows of the fold, in place of batch norm"},
        "folds": folds,
        "inner_folds": inner_folds,
        "permutations": permutations,
        "bootstraps": bootstraps,
        "interval_stretch": cross_validation_stretch(folds),
        "seed": seed,
        "activations": activations.provenance,
    }
    return NonlinearGain(
        table=table.assign(strength=strength.numpy(), epochs=epochs.numpy()),
        linear_scores=linear_scores,
        mlp_scores=mlp_scores,
        labellings=labelled,
        groups=group,
        test=tests,
        null=torch.empty(0, dtype=torch.float64) if null is None else null.maximum,
        type_coverage=covered,
        provenance=provenance,
    )


def _table(
    probes: Sequence[Site],
    scores: tuple[Tensor, Tensor],
    labellings: Bool[Tensor, "labelling example"],
    groups: Int64[Tensor, " example"],
    test: Bool[Tensor, "fold example"],
    null: SwapNull | None,
    *,
    draws: int,
    seed: int,
) -> pd.DataFrame:
    stretch = cross_validation_stretch(len(test))
    real = torch.cat([values[:, 0] for values in scores])
    estimate = fold_auroc(real, labellings[0], test)
    drawn = bootstrap_auroc(real, labellings[0], groups, test, draws=draws, seed=seed)
    linear, network = estimate.chunk(2)
    linear_drawn, network_drawn = drawn.chunk(2)
    table = {
        "site": [str(probe) for probe in probes],
        "kind": [str(replace(probe, layer=None, head=None)) for probe in probes],
        "layer": pd.array([probe.layer for probe in probes], dtype="Int64"),
        "head": pd.array([probe.head for probe in probes], dtype="Int64"),
    }
    for name, value, values, bounds in (
        ("linear_auroc", linear, linear_drawn, (0.0, 1.0)),
        ("mlp_auroc", network, network_drawn, (0.0, 1.0)),
        ("gain", network - linear, network_drawn - linear_drawn, (-1.0, 1.0)),
    ):
        interval = percentile_intervals(value, values, stretch=stretch, bounds=bounds)
        table |= {name: value.numpy(), f"{name}_low": interval.low.numpy(), f"{name}_high": interval.high.numpy()}
    missing = np.full(len(probes), math.nan)
    table["p_gain"] = missing if null is None else null.p_value.numpy()
    table["p_gain_best_site"] = missing if null is None else null.p_best_site.numpy()
    for name, values in zip(_PROBES, scores, strict=True):
        table[f"{name}_bits"] = log_loss_bits(values[:, 0], labellings[0]).numpy()
    for number, (control, selectivity) in enumerate(
        [("control_auroc", "selectivity"), ("type_auroc", "type_selectivity")][: len(labellings) - 1], start=1
    ):
        for name, values, reached in zip(_PROBES, scores, (linear, network), strict=True):
            auroc = fold_auroc(values[:, number], labellings[number], test)
            table |= {f"{name}_{control}": auroc.numpy(), f"{name}_{selectivity}": (reached - auroc).numpy()}
    return pd.DataFrame(table)


def _epochs_for(rows: int) -> int:
    """As published, or as many as make 1,000 batches."""
    published = MlpSettings()
    return max(published.epochs, -(-_FEWEST_BATCHES * published.batch // rows))


def _pooled(activations: Activations, columns: dict, sites: Iterable | None, tokens: int) -> tuple[Activations, dict]:
    """One row per text, of the sites asked for, and the columns of those rows."""
    chosen = activations if sites is None else activations.only(sites)
    pooled = pool_last(chosen, tokens)
    last = last_rows(activations.rows, tokens)
    kept = {}
    for name, values in columns.items():
        if values is None or isinstance(values, str):
            kept[name] = values
            continue
        values = values.numpy(force=True) if hasattr(values, "numpy") else values
        series = pd.Series(list(values))
        if len(series) != activations.n_rows:
            raise ValueError(f"{name} has {len(series)} entries for {activations.n_rows} rows. Pass one per row.")
        codes = pd.factorize(series)[0]
        # the type is that of the last token; labels and groups belong to the text
        differs = (last >= 0) & (codes[last] != codes[last[:, :1]])
        if name != "types" and differs.any():
            text = activations.rows["text"].iloc[last[int(differs.any(1).argmax()), 0]]
            raise ValueError(
                f"{name} differ among the rows of text {text} that are pooled. Give every row of a text the same, or "
                "pool=None for one row per token."
            )
        kept[name] = series.iloc[last[:, 0]].reset_index(drop=True)
    return pooled, kept

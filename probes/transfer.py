"""Train on one domain, test on another: every pair of domains, every site, and which site one would have chosen.

All groups, whatever their domain, are dealt to K folds, level in domain and class. For fold f and training domain a, a
probe is fitted on a's rows outside f and scores the rows inside f of every domain. So a group that occurs in two
domains never trains and tests together, every row is tested once by each training domain, and the diagonal is grouped
cross-validation with exactly as many training rows as its neighbours. Strength C by inner folds of a alone; accuracy at
logit 0, the threshold of the training domain; AUROC over pairs of rows of one fold and domain.

Which site does one take (`choices`)? By three rules, each scored on rows it has not seen, but for the last:

    source     lowest inner loss in the training domain: no row of the test domain is looked at
    target     highest AUROC on the test domain's rows of the other folds: what its labels would have bought
    hindsight  highest AUROC on the very rows reported: too good by construction, as a roof

An intermediate layer is often reported to transfer better than the last (Uselis & Oh 2025); compare the layers that
source and target choose, and their scores.

Beware: off the diagonal 0.5 is not what a useless probe scores. Where the test domain's classes lie far apart in some
direction, a probe of pure noise leans one way or the other along it by luck, and so scores far above or below 0.5 on
all of its rows (0.14 and 0.80 in the test's data). The interval knows nothing of that luck: it is about this probe.
`control_reach` shows its size, the largest distance from 0.5 of probes fitted on shuffled labels; a transfer within it,
in either direction, is nothing (three shuffles show it roughly: raise `controls` before claiming one). Domains also
differ in class shares: AUROC does not notice, accuracy does. Intervals on the diagonal are widened for
cross-validation; off it no test row trains a probe, so they are not.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from microtome.capture.activations import Activations
from microtome.capture.sites import Site
from microtome.figures.transfer_matrix import transfer_matrix
from microtome.probes.bootstrap import (
    bootstrap_accuracy,
    bootstrap_auroc,
    cross_validation_stretch,
    percentile_intervals,
)
from microtome.probes.folds import grouped_folds, nested_folds
from microtome.probes.labelled_rows import column_of, labelled_rows
from microtome.probes.metrics import accuracy, fold_auroc
from microtome.probes.row_keys import row_keys
from microtome.probes.table_html import table_html
from microtome.probes.transfer_fits import source_scores, with_shuffled

_FEWEST_BOOTSTRAPS = 100


@dataclass(frozen=True, eq=False)
class Transfer:
    """Scores of every training domain's probes on every row.

    table: one row per pair of domains and site: train, test, site, layer, head, auroc, accuracy (each with _low and
    _high), control_auroc and control_reach (of probes fitted on labels shuffled by group and tested on the real ones:
    mean AUROC, largest distance from 0.5), train_rows, test_rows.
    choices: one row per pair and rule: train, test, rule, site (chosen in most folds), layer (mean over folds), auroc
    and accuracy with their intervals.
    """

    table: pd.DataFrame
    choices: pd.DataFrame
    scores: Float64[Tensor, "domain site example"]  # logits by training domain, in the order of `domains`
    domains: tuple[str, ...]
    sites: tuple[str, ...]
    domain_of_row: Int64[Tensor, " example"]
    positive: Bool[Tensor, " example"]
    groups: Int64[Tensor, " example"]
    test: Bool[Tensor, "fold example"]

    def __repr__(self) -> str:
        apart = self.table[self.table["train"] != self.table["test"]]
        best = apart.loc[apart["auroc"].idxmax()]
        return (
            f"Transfer({len(self.domains)} domains, {len(self.sites)} sites, {len(self.positive):,} rows; best between "
            f"domains {best['train']} to {best['test']} at {best['site']} AUROC {best['auroc']:.3f} "
            f"[{best['auroc_low']:.3f}, {best['auroc_high']:.3f}])"
        )

    def _repr_html_(self) -> str:
        return table_html(repr(self), self.choices)

    def pair(self, train: str, test: str, site: str) -> dict[str, Tensor]:
        """Scores, positive, groups and test of one pair's test rows, as `compare_scores` and `gap_recovered` take them.

        Raises KeyError for a domain or site that is not there.
        """
        for name, known in ((train, self.domains), (test, self.domains), (site, self.sites)):
            if name not in known:
                raise KeyError(f"{name!r} is none of {', '.join(known[:8])}.")
        rows = self.domain_of_row == self.domains.index(test)
        return {
            "scores": self.scores[self.domains.index(train), self.sites.index(site), rows],
            "positive": self.positive[rows],
            "groups": self.groups[rows].unique(return_inverse=True)[1],
            "test": self.test[:, rows],
        }

    def plot(self, *, site: str | None = None, rule: str = "source", value: str = "auroc") -> go.Figure:
        """Matrix of one site, or of the sites that a rule chose if `site` is None. Raises KeyError for another name."""
        table, column, name = (self.choices, "rule", rule) if site is None else (self.table, "site", site)
        if not (table[column] == name).any():
            raise KeyError(f"no {column} {name!r}; there are {', '.join(dict.fromkeys(table[column]))}.")
        return transfer_matrix(table[table[column] == name], value=value)


def transfer(
    activations: Activations | Mapping,
    labels: str | Sequence | np.ndarray | pd.Series | Tensor,
    domains: str | Sequence | np.ndarray | pd.Series,
    *,
    groups: str | Sequence | np.ndarray | pd.Series | Tensor,
    sites: Iterable | None = None,
    strengths: Sequence[float] | None = None,
    folds: int = 5,
    inner_folds: int = 4,
    controls: int = 3,
    bootstraps: int = 1000,
    seed: int = 0,
) -> Transfer:
    """Probe every site in every domain and test it in all of them.

    Args:
        activations, labels, groups, sites, strengths, folds, inner_folds, seed: as for `sweep`; labels of two classes.
        domains: a name per row (or the name of a column): source, language, layer of difficulty (`hardness_strata`).
        controls: shuffles of the training labels, 1 or more.
        bootstraps: draws for the intervals, at least 100.

    Raises ValueError for labels of another kind, one domain, a row without a domain, a class that lies in fewer groups
    of a domain than there are folds; and as `sweep` for its arguments.
    """
    given = labelled_rows(activations, labels, groups=groups, sites=sites)
    if given.target.kind != "binary":
        raise ValueError(f"labels are {given.target.kind}; transfer tells two classes apart. Make them two.")
    if bootstraps < _FEWEST_BOOTSTRAPS or controls < 1:
        raise ValueError(
            f"bootstraps={bootstraps}, controls={controls}; give at least {_FEWEST_BOOTSTRAPS} draws and 1 shuffle."
        )
    positive = given.target.values
    domain, names = _domains(column_of(domains, given.rows, "domains"), positive.numpy(), given.groups, folds)
    test = grouped_folds(2 * domain + positive.numpy(), given.groups, folds=folds, seed=seed)
    probes = given.probes
    scores = torch.empty(len(names), 1 + controls, len(probes), len(positive), dtype=torch.float64)
    inner_loss = torch.empty(len(names), len(probes), folds, dtype=torch.float64)
    tests = torch.from_numpy(test)
    for number in range(len(names)):
        own = np.flatnonzero(domain == number)
        codes = np.unique(given.groups[own], return_inverse=True)[1]
        inner = nested_folds(positive.numpy()[own].astype(np.int64), codes, test[:, own], folds=inner_folds, seed=seed)
        train = torch.zeros(folds, inner_folds + 1, len(positive), dtype=torch.bool)
        train[:, :, own] = torch.from_numpy(np.concatenate([~test[:, None, own] & ~inner, ~test[:, None, own]], axis=1))
        labellings = with_shuffled(positive, codes, own, train, controls, seed)
        start = 0
        for features in given.chunks():
            until = start + len(features)
            logits, loss = source_scores(features, labellings, tests, train, strengths)
            scores[number, :, start:until], inner_loss[number, start:until] = logits.movedim(0, 1), loss
            start = until
    table, choices = [], []
    codes = torch.from_numpy(given.groups)
    for target, test_name in enumerate(names):
        rows = torch.from_numpy(domain == target)
        case = _Case(positive[rows], codes[rows].unique(return_inverse=True)[1], tests[:, rows], bootstraps, seed)
        for source, train_name in enumerate(names):
            of_pair = {"train": train_name, "test": test_name}
            stretch = cross_validation_stretch(folds) if source == target else 1.0
            here = scores[source, 0][:, rows]
            columns = case.columns(here, stretch)
            by_luck = fold_auroc(scores[source, 1:][..., rows], case.positive, case.test)
            columns |= {"control_auroc": by_luck.mean(dim=0), "control_reach": (by_luck - 0.5).abs().amax(dim=0)}
            where = {
                "site": [str(probe) for probe in probes],
                "layer": pd.array([probe.layer for probe in probes], dtype="Int64"),
                "head": pd.array([probe.head for probe in probes], dtype="Int64"),
            }
            frame = pd.DataFrame(of_pair | where | {name: column.numpy() for name, column in columns.items()})
            n_train = int((domain == source).sum() * (folds - 1) / folds)
            table.append(frame.assign(train_rows=n_train, test_rows=int(rows.sum())))
            best = int(columns["auroc"].argmax())
            rules = {
                "source": inner_loss[source].argmin(dim=0),
                "target": torch.stack(
                    [fold_auroc(here, case.positive, others).argmax() for others in _others(case.test)]
                ),
                "hindsight": torch.full((folds,), best),
            }
            for rule, chosen in rules.items():
                composed = here[chosen[case.test.int().argmax(dim=0)], torch.arange(here.shape[1])]
                values = {name: column.item() for name, column in case.columns(composed[None], stretch).items()}
                choices.append(of_pair | {"rule": rule} | _named(chosen, probes) | values)
    place = {name: number for number, name in enumerate(names)}
    in_order = {"by": "train", "key": lambda column: column.map(place), "kind": "stable", "ignore_index": True}
    return Transfer(
        table=pd.concat(table).sort_values(**in_order),
        choices=pd.DataFrame(choices).sort_values(**in_order),
        scores=scores[:, 0],
        domains=names,
        sites=tuple(str(probe) for probe in probes),
        domain_of_row=torch.from_numpy(domain),
        positive=positive,
        groups=codes,
        test=tests,
    )


@dataclass(frozen=True)
class _Case:
    """Rows of one test domain, and how its scores are resampled."""

    positive: Bool[Tensor, " example"]
    groups: Int64[Tensor, " example"]
    test: Bool[Tensor, "fold example"]
    draws: int
    seed: int

    def columns(self, scores: Float64[Tensor, "site example"], stretch: float) -> dict[str, Tensor]:
        options = {"draws": self.draws, "seed": self.seed}
        of_auroc = percentile_intervals(
            fold_auroc(scores, self.positive, self.test),
            bootstrap_auroc(scores, self.positive, self.groups, self.test, **options),
            stretch=stretch,
        )
        of_accuracy = percentile_intervals(
            accuracy(scores, self.positive),
            bootstrap_accuracy((scores > 0) == self.positive, self.groups, **options),
            stretch=stretch,
        )
        named = {"auroc": of_auroc, "accuracy": of_accuracy}
        arms = {"": "estimate", "_low": "low", "_high": "high"}
        return {f"{name}{arm}": getattr(values, field) for name, values in named.items() for arm, field in arms.items()}


def _domains(
    domains, positive: np.ndarray, groups: np.ndarray, folds: int
) -> tuple[Int64[np.ndarray, " example"], tuple[str, ...]]:
    codes, names = pd.factorize(row_keys(domains, len(positive), "domains"))
    if (codes < 0).any():
        raise ValueError(f"Row {int((codes < 0).argmax())} has no domain. Name it, or leave the row out.")
    if len(names) < 2:
        raise ValueError(f"All rows are of the domain {names[0]!r}; transfer needs two or more.")
    for code, name in enumerate(names):
        for label in (True, False):
            held = len(np.unique(groups[(codes == code) & (positive == label)]))
            if held < folds:
                raise ValueError(
                    f"Domain {str(name)!r} has its {'positive' if label else 'negative'} rows in {held} groups, fewer "
                    f"than the {folds} folds. Ask for fewer folds, join domains, or add groups."
                )
    return codes.astype(np.int64), tuple(str(name) for name in names)


def _others(test: Bool[Tensor, "fold example"]) -> list[Bool[Tensor, "others example"]]:
    """For every fold the masks of all others."""
    return [test[torch.arange(len(test)) != fold] for fold in range(len(test))]


def _named(chosen: Int64[Tensor, " fold"], probes: list[Site]) -> dict:
    picked = [probes[number] for number in chosen.tolist()]
    layers = [probe.layer for probe in picked if probe.layer is not None]
    names = pd.Series([str(probe) for probe in picked])
    return {"site": names.mode()[0], "layer": float(np.mean(layers)) if layers else float("nan")}

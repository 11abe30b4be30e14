"""How many bits it takes to send the labels to someone who has the features: the online code (Voita & Titov 2020).

Groups are shuffled, rows of a group kept together, and cut at 0.1, 0.2, 0.4, ..., 50, 100 % of the groups. Labels of
the first block are sent as they are; those of every next block by the probabilities of a probe fitted on all before:

    L = t_1 log2 K + sum_k sum_{i in block k} -log2 p_{<k}(y_i | x_i)      bits.

The probe is a logistic regression (K > 2: one against the rest, probabilities divided by their sum). Which strength C
is settled by the labels sent so far alone, through the mixture of all S strengths tried, the prior of each 1/S:

    L = t_1 log2 K - log2 [ 1/S sum_s 2^(-L_s) ],

L_s the code of strength s: at most log2 S bits above the best of them, which is chosen by no one. Mean of several
shuffles. A short code says that the label is easy to extract from few rows, where accuracy only says that it can be.

All terms are bits. (The paper's notebook adds bits to natural logarithms; sheet section 22.2 [U] takes its published
online codes for such sums, so ours are not comparable with them.) With right class shares and no information the code
costs n H bits, H the entropy of the labels, and somewhat more, because the shares must be learned: compare with the
code of shuffled labels, not with 1.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from microtome.capture.activations import Activations
from microtome.probes.control_task import shuffled_labels
from microtome.probes.labelled_rows import column_of, labelled_rows
from microtome.probes.logistic_solver import WIDE, default_strengths, fit_logistic
from microtome.probes.table_html import table_html
from microtome.probes.target import Kind, target_of

BOUNDARIES = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.0625, 0.125, 0.25, 0.5, 1.0)
_TOLERANCE = 1e-5
_SHUFFLES_TRIED = 20


@dataclass(frozen=True, eq=False)
class DescriptionLength:
    """Code lengths of some sites under some labellings.

    table: one row per site and labelling ("labels", "shuffled", names of `controls`): bits (mean over shuffles),
    bits_spread (their standard deviation), compression (n H / bits: against sending labels by their shares alone),
    uniform_compression (n log2 K / bits, as the paper reports it), bits_per_row.
    """

    table: pd.DataFrame
    bits: Float64[Tensor, "site labelling shuffle"]

    def __repr__(self) -> str:
        real = self.table[self.table["labelling"] == "labels"]
        best = real.loc[real["compression"].idxmax()]
        controls = ", ".join(name for name in dict.fromkeys(self.table["labelling"]) if name != "labels")
        return (
            f"DescriptionLength({len(real)} sites, most compressed {best['site']} {best['compression']:.2f} times, "
            f"{best['bits_per_row']:.3f} bits per row; controls: {controls or 'none'})"
        )

    def _repr_html_(self) -> str:
        return table_html(repr(self), self.table)


def description_length(
    activations: Activations | Mapping,
    labels: str | Sequence | np.ndarray | pd.Series | Tensor,
    *,
    groups: str | Sequence | np.ndarray | pd.Series | Tensor,
    sites: Iterable | None = None,
    controls: Mapping | None = None,
    target: Kind | None = None,
    strengths: Sequence[float] | None = None,
    shuffles: int = 5,
    seed: int = 0,
) -> DescriptionLength:
    """Online code of the labels, of the same labels shuffled by group, and of control labellings, at every site.

    Args:
        activations, labels, groups, sites: as for `sweep`; two classes or several.
        controls: labels by name of the same classes, such as {"control task": control_task(tokens, labels)}.
        target: "classes" if whole numbers are to be classes.
        strengths: values of C to mix; `default_strengths` of the width if None.
        shuffles: orders of the groups to average over.

    Raises ValueError for numbers as target, a labelling called as one of ours, fewer than one shuffle, and labels so
    rare that less than half of the groups holds all of them; and as `sweep` for its arguments.
    """
    given = labelled_rows(activations, labels, groups=groups, sites=sites, target=target)
    if given.target.kind == "numbers":
        raise ValueError("labels are numbers, whose code length depends on their unit. Make them classes: labels > 0.")
    real = given.target.values.numpy()
    labellings = {"labels": real, "shuffled": shuffled_labels(real, given.groups, seed=seed)}
    for name, values in (controls or {}).items():
        if name in labellings:
            raise ValueError(f"A control labelling is called {name!r}, which is one of ours. Give it another name.")
        made = target_of(column_of(values, given.rows, name), n_rows=len(real), kind=given.target.kind)
        labellings[name] = made.values.numpy()
    stacked = torch.from_numpy(np.stack(list(labellings.values())))
    # controls apart: their rare classes must not make the first block of the labels longer
    apart = [stacked[:2], *(one[None] for one in stacked[2:])]
    options = {"shuffles": shuffles, "seed": seed}
    lengths = torch.cat(
        [
            torch.cat([code_lengths(features, some, given.groups, strengths, **options) for some in apart], dim=1)
            for features in given.chunks()
        ]
    )
    rows = []
    n_classes = len(given.target.classes)
    for site, of_site in zip(given.probes, lengths, strict=True):
        for name, of_labels in zip(labellings, of_site, strict=True):
            bits = of_labels.mean().item()
            shares = np.bincount(labellings[name].astype(np.int64)) / len(real)
            entropy = -sum(share * math.log2(share) for share in shares if share > 0)
            rows.append(
                {
                    "site": str(site),
                    "labelling": name,
                    "bits": bits,
                    "bits_spread": of_labels.std(unbiased=shuffles > 1).item(),
                    "compression": len(real) * entropy / bits,
                    "uniform_compression": len(real) * math.log2(n_classes) / bits,
                    "bits_per_row": bits / len(real),
                }
            )
    return DescriptionLength(table=pd.DataFrame(rows), bits=lengths)


def code_lengths(
    features: Float[Tensor, "site example feature"],
    labellings: Bool[Tensor, "labelling example"] | Int64[Tensor, "labelling example"],
    groups: Int64[np.ndarray, " example"],
    strengths: Sequence[float] | None = None,
    *,
    shuffles: int = 5,
    boundaries: Sequence[float] = BOUNDARIES,
    seed: int = 0,
) -> Float64[Tensor, "site labelling shuffle"]:
    """Bits of each labelling at each site in each order of the groups. Labels are bool, or class numbers 0..K-1.

    The first block grows, boundary by boundary, until it holds every class of every labelling. Raises ValueError as
    `description_length`, and what `fit_logistic` raises.
    """
    if shuffles < 1:
        raise ValueError(f"shuffles={shuffles}; give 1 or more, 5 say.")
    n_classes = 2 if labellings.dtype == torch.bool else int(labellings.max()) + 1
    strengths = list(strengths or default_strengths(features.shape[2]))
    rng = np.random.default_rng(seed)
    bits = torch.empty(len(features), len(labellings), shuffles, dtype=torch.float64)
    for shuffle in range(shuffles):
        ends = _blocks(labellings.numpy(), groups, boundaries, n_classes, rng)
        prefixes = torch.from_numpy(ends)
        coded = prefixes[1:] & ~prefixes[:-1]
        # the few rows of early blocks want the solver's rotated path; one narrow mask would send all masks there
        narrow = prefixes[:-1].sum(dim=1) * WIDE < features.shape[2]
        total = torch.zeros(len(features), len(labellings), len(strengths), dtype=torch.float64)
        for some in (narrow, ~narrow):
            if some.any():
                total += _block_bits(features, labellings, prefixes[:-1][some], coded[some], strengths, n_classes)
        mixed = -torch.logsumexp(-total * math.log(2), dim=-1) / math.log(2) + math.log2(len(strengths))
        bits[..., shuffle] = int(prefixes[0].sum()) * math.log2(n_classes) + mixed
    return bits


def _block_bits(
    features: Tensor, labellings: Tensor, train: Tensor, coded: Tensor, strengths: list[float], n_classes: int
) -> Float64[Tensor, "site labelling strength"]:
    """Bits of all coded blocks together, block b by the probes fitted on `train[b]`."""
    if labellings.dtype == torch.bool:
        label_sets = labellings
    else:
        label_sets = (labellings[:, None] == torch.arange(n_classes)[:, None]).flatten(0, 1)
    fits = fit_logistic(features, label_sets, train, strengths, tolerance=_TOLERANCE)
    logits = fits.decision(features)  # [site, label set, block, strength, example]
    total = torch.zeros(len(features), len(labellings), len(strengths), dtype=torch.float64)
    for block, rows in enumerate(coded):
        scores = logits[:, :, block, :, rows]
        if labellings.dtype == torch.bool:
            signed = torch.where(labellings[:, None, rows], scores, -scores)
            total -= torch.nn.functional.logsigmoid(signed).sum(dim=-1)
            continue
        by_class = torch.nn.functional.logsigmoid(scores.unflatten(1, (len(labellings), n_classes)))
        by_class = by_class - by_class.logsumexp(dim=2, keepdim=True)
        at = labellings[None, :, None, None, rows].expand(*by_class[:, :, :1].shape)
        total -= by_class.gather(2, at)[:, :, 0].sum(dim=-1)
    return total / math.log(2)


def _blocks(
    labellings: np.ndarray,
    groups: Int64[np.ndarray, " example"],
    boundaries: Sequence[float],
    n_classes: int,
    rng: np.random.Generator,
) -> Bool[np.ndarray, "block example"]:
    """Rows up to each boundary of one order of the groups; the first holds every class of every labelling."""
    n_groups = int(groups.max()) + 1
    for _ in range(_SHUFFLES_TRIED):
        place = rng.permutation(n_groups)[groups]
        ends = sorted({max(1, math.ceil(share * n_groups - 1e-9)) for share in boundaries})
        rows = place < np.array(ends)[:, None]
        held = np.stack([(rows & (labels == k)).any(axis=1) for labels in labellings for k in range(n_classes)])
        usable = held.all(axis=0) & (rows.sum(axis=1) > 1)
        first = int(usable.argmax())
        if usable[first] and first < len(ends) - 1:
            return rows[first:]
    raise ValueError(
        f"In {_SHUFFLES_TRIED} orders of {n_groups} groups the last block but one never held all {n_classes} classes "
        "of every labelling. Too few groups carry a class: join rare classes, or add groups."
    )

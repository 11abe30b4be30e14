"""Directions that tell two sets of texts apart, at many sites at once: mean difference and its relatives.

    mean        e_k = mean z_k over wanted texts - mean over unwanted texts, float64 sums
    whitened    S_w^-1 e_k, S_w the covariance within classes, shrunken towards its mean variance (Ledoit and Wolf 2004)
    pca         first principal component of the paired differences z+ - z-, uncentred
    logistic    weights of a logistic probe

Strength 1 is the gap between the classes for all of them: a unit vector u is scaled by u . e_k, so that methods compare
at equal displacement. Kept beside: raw norm |e_k| and offset u . mean(unwanted). Centred PCA of differences, as some
libraries compute it, removes the mean that carries the signal; it is not offered.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from microtome.capture.activations import Activations
from microtome.capture.collect import capture
from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.interventions.artefact import Artefact, made_on
from microtome.interventions.positions import Positions
from microtome.probes.folds import grouped_folds
from microtome.probes.groups import group_codes
from microtome.probes.logistic import LogisticProbe

Method = Literal["mean", "whitened", "pca", "logistic"]
METHODS = ("mean", "whitened", "pca", "logistic")
LEAST_GAP = 1e-6  # of the vectors' size: below it two sets of texts read the same there


@dataclass(frozen=True, eq=False)
class ContrastRows:
    """Activations of two sets of texts.

    Attributes:
        activations: rows by site, [row, d], float32.
        wanted: which rows are of the wanted set.
        extraction: at which tokens they were read.
        pairs: number of the pair of each row, where texts are paired; each wanted with one unwanted.
    """

    activations: dict[str, Float[Tensor, "row d"]]
    wanted: Bool[Tensor, " row"]
    extraction: str
    pairs: Sequence[int] | None = None

    @property
    def sites(self) -> tuple[str, ...]:
        """In order."""
        return tuple(self.activations)

    @property
    def counts(self) -> tuple[int, int]:
        """Wanted and unwanted rows."""
        return int(self.wanted.sum()), int((~self.wanted).sum())

    def differences(self, site: str) -> Float[Tensor, "pair d"]:
        """Wanted minus unwanted of every pair; pairs at random (by order) where none were given."""
        x = self.activations[site].double()
        if self.pairs is None:
            n = min(self.counts)
            return x[self.wanted][:n] - x[~self.wanted][:n]
        numbers = torch.as_tensor(np.asarray(self.pairs))
        sides = []
        for side in (self.wanted, ~self.wanted):
            order = numbers[side].argsort()
            sides.append((numbers[side][order], x[side][order]))
        if not torch.equal(sides[0][0], sides[1][0]):
            raise ValueError("pairs: every number needs one wanted and one unwanted text.")
        if len(sides[0][0].unique()) < len(sides[0][0]):
            raise ValueError("pairs: a number stands for two pairs. Give every pair its own.")
        return sides[0][1] - sides[1][1]


def contrast_rows(
    model: LoadedModel,
    wanted: Sequence[Any],
    unwanted: Sequence[Any],
    sites: Sequence[str] | str = "resid_post",
    positions: Any = "last",
    *,
    paired: bool = False,
    progress: bool = False,
    **options: Any,
) -> ContrastRows:
    """Activations of both sets in one pass.

    Args:
        wanted, unwanted: texts (strings, message lists, token ids) that show the behaviour and that do not.
        positions: which token speaks for a text, as in `capture`; a list has the wanted texts' first.
        paired: the i-th wanted belongs to the i-th unwanted text.
        options: of `capture`.

    Raises:
        ValueError: an empty set, sets that are equal, pairs of unequal number.

    Warns:
        UserWarning: texts that are in both sets, which draw the direction to zero.
    """
    wanted, unwanted = list(wanted), list(unwanted)
    if not wanted or not unwanted:
        raise ValueError(f"{len(wanted)} wanted and {len(unwanted)} unwanted texts: a contrast needs both.")
    if sorted(map(repr, wanted)) == sorted(map(repr, unwanted)):
        raise ValueError("The wanted and the unwanted texts are the same: there is no contrast. Give two sets.")
    if common := set(map(repr, wanted)) & set(map(repr, unwanted)):
        warnings.warn(
            f"{len(common)} texts are in both sets, such as {min(common):.60}: they pull the difference towards zero.",
            stacklevel=2,
        )
    if paired and len(wanted) != len(unwanted):
        raise ValueError(
            f"{len(wanted)} wanted and {len(unwanted)} unwanted texts cannot be paired: give as many each."
        )
    acts = capture(model, [*wanted, *unwanted], sites, positions, progress=progress, **options)
    if acts.rows["text"].tolist() != list(range(len(wanted) + len(unwanted))):
        raise ValueError(
            f"positions={positions!r:.40} keep {len(acts.rows)} rows of {len(wanted) + len(unwanted)} texts: give one "
            "position per text, such as 'last' or 'mean'."
        )
    is_wanted = torch.from_numpy(acts.rows["text"].to_numpy() < len(wanted))
    numbers = [*range(len(wanted)), *range(len(unwanted))] if paired else None
    said = positions if isinstance(positions, str | int) else "per text"
    return ContrastRows(_flat(acts), is_wanted, str(said), numbers)


def rows_of(acts: Activations, label: str = "label", *, extraction: str = "last") -> ContrastRows:
    """From activations with a row per text and a column of labels (True is wanted).

    Raises ValueError for another number of classes than two, and for several rows of one text.
    """
    if acts.rows["text"].duplicated().any():
        raise ValueError("Several rows of one text: a contrast counts texts. Capture one position, or 'mean'.")
    labels = acts.rows[label].to_numpy()
    if len(pd.unique(labels)) != 2:
        raise ValueError(f"{label} has {len(pd.unique(labels))} classes: a contrast is between two.")
    wanted = labels == max(pd.unique(labels))
    return ContrastRows(_flat(acts), torch.from_numpy(np.asarray(wanted, dtype=bool)), extraction)


def _flat(acts: Activations) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for site in acts.sites:
        value = acts[site]
        if value.ndim == 2:
            found[str(site)] = value.float()
        else:
            found |= {f"{site}.{head}": value[:, head].float() for head in range(value.shape[1])}
    return found


def contrast(
    model: LoadedModel,
    rows: ContrastRows,
    method: Method = "mean",
    *,
    sites: Sequence[str] | None = None,
    names: tuple[str, str] = ("wanted", "unwanted"),
    positions: Positions = "generated",
    seed: int | None = None,
) -> Artefact:
    """A vector for every site, pointing to the wanted class; strength 1 is the gap between the class means.

    Args:
        model: that the rows are of.
        sites: some of those of the rows; all by default.
        names: of the wanted and the unwanted class.
        positions: at which tokens it is to act.

    Raises:
        ValueError: an unknown method; a site at which the two classes read the same.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r}: give one of {', '.join(METHODS)}.")
    if not all(rows.counts):
        raise ValueError(
            f"{rows.counts[0]} wanted and {rows.counts[1]} unwanted rows are one class: give rows of both."
        )
    chosen = [str(Site.parse(site)) for site in sites] if sites is not None else list(rows.sites)
    vectors, norms, offsets = [], [], []
    for site in chosen:
        unit, gap, offset, norm = _direction(rows, site, method)
        vectors.append(unit * gap)
        norms.append(norm)
        offsets.append(offset)
    return Artefact(
        "add",
        tuple(chosen),
        {"vector": torch.stack(vectors).float()},
        method=method,
        positive=names[0],
        negative=names[1],
        extraction=rows.extraction,
        positions=positions,
        raw_norm=torch.tensor(norms).float(),
        offset=torch.tensor(offsets).float(),
        counts=rows.counts,
        facts=made_on(model, seed=seed, unit="class gap"),
    )


def _direction(rows: ContrastRows, site: str, method: Method) -> tuple[Tensor, float, float, float]:
    """Unit vector, gap of the means along it, mean of the unwanted along it, and length of the mean difference."""
    x = rows.activations[site].double()
    plus, minus = x[rows.wanted], x[~rows.wanted]
    difference = plus.mean(0) - minus.mean(0)
    norm = float(difference.norm())
    if norm <= LEAST_GAP * float(x.norm(dim=1).mean()):
        raise ValueError(
            f"{site}: the two sets read the same there (difference {norm:.2g}). Read another token or site; the last "
            "token of a chat template is the same in every text until attention has brought it something."
        )
    if method == "mean":
        direction = difference
    elif method == "whitened":
        from sklearn.covariance import ledoit_wolf  # late: importing it draws from Python's random generator

        within = torch.cat([plus - plus.mean(0), minus - minus.mean(0)]).numpy()
        covariance = torch.from_numpy(ledoit_wolf(within, assume_centered=True)[0])
        direction = torch.linalg.solve(covariance, difference)
    elif method == "pca":
        each = rows.differences(site)
        direction = torch.linalg.svd(each, full_matrices=False).Vh[0]
        direction = direction if float(each.mean(0) @ direction) >= 0 else -direction
    else:
        probe = LogisticProbe(C=0.01).fit(x.numpy(), rows.wanted.numpy())
        direction = torch.from_numpy(probe.coef_[0]).double()
    unit = direction / direction.norm()
    gap = float(unit @ difference)
    if not gap > LEAST_GAP * norm:
        raise ValueError(
            f"{site}: the classes' means do not differ along the {method} direction (gap {gap:.2g} of {norm:.2g}). "
            "Take method='mean', or pairs that vary in less than what is wanted."
        )
    return unit, gap, float(minus.mean(0) @ unit), norm


def separation(
    rows: ContrastRows, *, groups: Sequence[object] | None = None, folds: int = 5, seed: int = 0
) -> pd.DataFrame:
    """How well the mean difference separates, by site: gap, d_prime, stability.

    d_prime is the gap of the projections' means over their pooled standard deviation, on rows that had no part in the
    direction (folds); stability is the least cosine between the direction of all rows and that without one fold. Below
    a d_prime of 1 a direction does not tell single texts apart.

    Args:
        groups: of each row; rows of a group are in one fold. Each row by itself if left out.

    Raises:
        ValueError: fewer rows or groups of a class than folds.
    """
    n = len(rows.wanted)
    codes = group_codes(range(n) if groups is None else list(groups), n_rows=n)
    test = torch.from_numpy(grouped_folds(rows.wanted.numpy().astype(int), codes, folds=folds, seed=seed))
    place = test.int().argmax(0)
    found = []
    for site, value in rows.activations.items():
        x = value.double()
        whole = x[rows.wanted].mean(0) - x[~rows.wanted].mean(0)
        projections, cosines = torch.zeros(len(x), dtype=torch.float64), []
        for fold in range(folds):
            kept = place != fold
            ends = x[kept & rows.wanted].mean(0), x[kept & ~rows.wanted].mean(0)
            part = ends[0] - ends[1]
            size = part.norm().clamp_min(1e-30)
            # from the middle of the classes: folds' directions differ, and what all texts share would spread them
            projections[~kept] = ((x[~kept] - (ends[0] + ends[1]) / 2) @ part) / size
            cosines.append(float((part @ whole) / (size * whole.norm().clamp_min(1e-30))))
        plus, minus = projections[rows.wanted], projections[~rows.wanted]
        spread = float(((plus.var() + minus.var()) / 2).sqrt())
        gap = float(plus.mean() - minus.mean())
        found.append(
            {
                "site": site,
                "norm": float(whole.norm()),
                "gap": gap,
                "d_prime": gap / spread if spread else float("nan"),
                "stability": min(cosines),
            }
        )
    return pd.DataFrame(found)


def direction_cosines(artefacts: Sequence[Artefact], site: str) -> pd.DataFrame:
    """Cosines between what several methods found at one site."""
    units = torch.stack([a.vector(site) / a.vector(site).norm() for a in artefacts])
    names = [a.method for a in artefacts]
    return pd.DataFrame((units @ units.T).numpy(), index=names, columns=names)

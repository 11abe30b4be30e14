"""CCS beside what it must beat: PCA of the differences and random directions, at every site, on held-out pairs.

In every outer fold each finder gets the training pairs, both sides centred by their training means, and, to fix its
sign, their labels:

    ccs      `fit_ccs`                                       score  p+ - p-
    pca      first principal axis v of x+ - x-               score  v . (x+ - x-)
    random   100 directions, drawn once                      score  likewise

Accuracy takes score 0 as threshold, AUROC counts pairs of one fold (`fold_auroc`). A random direction whose sign was
fixed on training labels is what any finder gets for nothing: where it does as well as CCS, the sides differ along many
directions and CCS has found nothing special (Burns et al. 2023 compare with PCA of the differences, "CRC-TPC").

Beware: labels enter through the sign alone, and still a sign fixed on many labels is a probe with one bit of training.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from microtome.capture.activations import Activations
from microtome.probes.ccs_fits import fit_ccs
from microtome.probes.folds import grouped_folds
from microtome.probes.groups import group_codes
from microtome.probes.metrics import accuracy, fold_auroc
from microtome.probes.site_blocks import SiteBlock, as_activations, site_blocks
from microtome.probes.target import target_of

RANDOM_DIRECTIONS = 100


def ccs_report(
    positive_side: Activations | Mapping,
    negative_side: Activations | Mapping,
    labels: Sequence | np.ndarray | pd.Series | Tensor,
    *,
    groups: str | Sequence | np.ndarray | pd.Series | Tensor,
    sites: Iterable | None = None,
    folds: int = 5,
    restarts: int = 10,
    steps: int = 1000,
    learning_rate: int | float = 1e-3,
    divide: bool = False,
    seed: int = 0,
) -> pd.DataFrame:
    """One row per site or head: site; accuracy and auroc of ccs, pca and random (the mean of the random directions, and
    random_accuracy_high and random_auroc_high, which 5 % of them exceed); ccs_loss, mean over folds.

    Args:
        positive_side, negative_side: activations of statements and of their negations, pair by pair, the same sites.
        labels: two values per pair, the larger where the positive side is the true one.
        groups: one key per pair, or "rows" to declare pairs independent.
        sites, folds, seed: as in `sweep`; the others as in `fit_ccs`.

    Raises ValueError for sides of different sites, widths or numbers of rows, and as `fit_ccs`, `target_of`,
    `group_codes`, `grouped_folds` and `site_blocks`.
    """
    ours, theirs = (site_blocks(as_activations(side), sites) for side in (positive_side, negative_side))
    shapes = [[(block.probes, tuple(block.values.shape)) for block in blocks] for blocks in (ours, theirs)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"The sides differ in sites, widths or rows: {_said(ours)} against {_said(theirs)}. Capture the statements "
            "and their negations with the same sites, in the same order."
        )
    n_pairs = ours[0].features.shape[1]
    target = target_of(labels, n_rows=n_pairs, kind="binary")
    codes = group_codes(groups, n_rows=n_pairs)
    seeds = [int(word) % 2**31 for word in np.random.SeedSequence(seed).generate_state(3)]
    test = torch.from_numpy(grouped_folds(target.codes, codes, folds=folds, seed=seeds[0]))
    parts = []
    for one, other in zip(ours, theirs, strict=True):
        sides = (one.features, other.features)
        fits = fit_ccs(
            *sides,
            ~test,
            target.values,
            restarts=restarts,
            steps=steps,
            learning_rate=learning_rate,
            divide=divide,
            seed=seeds[1],
        )
        of_folds = fits.scores(*sides)
        ccs = torch.where(test, of_folds, 0.0).sum(1)
        differences = sides[0].double() - sides[1].double()
        generator = torch.Generator().manual_seed(seeds[2])
        drawn = torch.randn(one.width, RANDOM_DIRECTIONS, generator=generator, dtype=torch.float64)
        pca, random = linear_scores(differences, drawn, target.values, test)
        table = {"site": [str(probe) for probe in one.probes]}
        for name, metric in (("accuracy", _accuracy), ("auroc", fold_auroc)):
            table |= {f"ccs_{name}": metric(ccs, target.values, test), f"pca_{name}": metric(pca, target.values, test)}
            luck = metric(random, target.values, test)
            table |= {f"random_{name}": luck.mean(1), f"random_{name}_high": luck.quantile(0.95, dim=1)}
        table["ccs_loss"] = fits.loss.mean(1)
        parts.append(pd.DataFrame({name: np.asarray(values) for name, values in table.items()}))
    return pd.concat(parts, ignore_index=True)


def linear_scores(
    differences: Float64[Tensor, "site pair feature"],
    drawn: Float64[Tensor, "feature direction"],
    positive: Bool[Tensor, " pair"],
    test: Bool[Tensor, "fold pair"],
) -> tuple[Float64[Tensor, "site pair"], Float64[Tensor, "site direction pair"]]:
    """Held-out scores along the first principal axis and along every drawn direction, signs fixed in training."""
    pca = torch.empty(differences.shape[:2], dtype=torch.float64)
    random = torch.empty(len(differences), drawn.shape[1], differences.shape[1], dtype=torch.float64)
    for rows in test:
        centred = differences - differences[:, ~rows].mean(1, keepdim=True)
        axis = torch.linalg.svd(centred[:, ~rows], full_matrices=False).Vh[:, 0]
        scores = centred @ torch.cat([axis[..., None], drawn.expand(len(axis), -1, -1)], -1)
        is_right = ((scores[:, ~rows] > 0) == positive[~rows, None]).double().mean(1)
        scores = (scores * torch.where(is_right >= 0.5, 1.0, -1.0)[:, None]).mT
        pca[:, rows], random[..., rows] = scores[:, 0][:, rows], scores[:, 1:][..., rows]
    return pca, random


def _accuracy(scores: Float[Tensor, "..."], positive: Tensor, _test: Tensor) -> Tensor:
    return accuracy(scores, positive)


def _said(blocks: list[SiteBlock]) -> str:
    names = [str(probe) for probe in chain.from_iterable(block.probes for block in blocks)]
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''} {[tuple(b.values.shape) for b in blocks[:3]]}"

"""How many dimensions a layer uses: spectra of the rows at every site, to be read beside the probe curve.

With q the eigenvalues of the covariance divided by their sum, sigma the singular values of the rows as they are, and u
the rows at length 1:

    effective_rank  exp(-sum q log q)            (Roy & Vetterli 2007, of the covariance)
    participation   1 / sum q^2
    stable_rank     sum q / max q                (squared Frobenius norm over squared spectral norm, of centred rows)
    rankme          exp(-sum p log p), p = sigma / sum sigma + 1e-7   (Garrido et al. 2023, eq. 3; their epsilon is
                    quoted from memory), of singular values and not their squares, so it is larger than the others
    anisotropy      mean of u_i . u_j over all pairs i != j: (|sum u|^2 - n) / (n (n - 1)); _centred: after the mean row
                    was taken off (Ethayarajh 2019)

All pairs are counted, none drawn; the smaller Gram matrix, n x n or d x d, is decomposed in float64.

Beware: every rank here grows with the number of rows n (white noise of 256 dimensions has effective rank 30 at n = 32,
100 at 128, 200 at 512, 240 at 2048): compare layers and models at equal n (`rows=`). First tokens (attention sinks)
with norms a hundred times all others make a spectrum of one direction: where the table has positions, the numbers
without them stand beside.
"""

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from microtome.probes.site_blocks import as_activations, site_blocks

MEASURES = ("effective_rank", "participation", "stable_rank", "rankme", "anisotropy", "anisotropy_centred")
EPSILON = 1e-7
CHUNK_BYTES = 2**28


def spectrum(
    activations,
    *,
    sites=None,
    rows: int | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """One line per site (and head): site, kind, layer, head, width, n, and the measures that the module defines.

    Where the rows have positions, and first ones (position 0) among others, each measure has a second column,
    `<measure>_without_first`, on the n_without_first rows that are no first token.

    Args:
        activations: Activations, or a mapping of names to arrays `[row, d]` or `[row, head, d]`.
        sites: names; None for all.
        rows: measure on this many rows, drawn without replacement and the same for all sites; None for all. With first
            tokens among them, both columns are drawn to this number.
        seed: of that draw.

    Raises ValueError for fewer than two rows, more rows asked for than there are, and what `site_blocks` refuses.
    """
    activations = as_activations(activations)
    is_first = np.zeros(activations.n_rows, dtype=bool)
    if "position" in activations.rows:
        is_first = activations.rows["position"].to_numpy() == 0
    kept = {"": np.arange(activations.n_rows)}
    if is_first.any() and not is_first.all():
        kept["_without_first"] = np.flatnonzero(~is_first)
    chosen = {suffix: _drawn(these, rows, seed) for suffix, these in kept.items()}
    lines = []
    for block in site_blocks(activations, sites):
        features = block.features
        measured = {suffix: spectrum_measures(features[:, these]) for suffix, these in chosen.items()}
        for number, site in enumerate(block.probes):
            line = {"site": str(site), "kind": site.kind, "layer": site.layer, "head": site.head, "width": block.width}
            for suffix, values in measured.items():
                line[f"n{suffix}"] = len(chosen[suffix])
                line |= {f"{name}{suffix}": float(values[name][number]) for name in MEASURES}
            lines.append(line)
    return pd.DataFrame(lines).astype({"layer": "Int64", "head": "Int64"})


def spectrum_measures(features: Float[Tensor, "site example feature"]) -> dict[str, Float64[Tensor, " site"]]:
    """Every measure of `MEASURES` at every site, from the rows as they are.

    Raises ValueError for fewer than two rows, NaN and infinity. Rows that are all the same have rank 0 (1 for rankme).
    """
    n = features.shape[1]
    if n < 2:
        raise ValueError(f"features have {n} row(s); a spectrum needs at least 2.")
    if not features.isfinite().all():
        raise ValueError("features hold NaN or infinity. Drop those rows, or fix the capture.")
    together = max(1, CHUNK_BYTES // (24 * features[0].numel()))
    parts = [_measures(some.double()) for some in features.split(together)]
    return {name: torch.cat([part[name] for part in parts]) for name in MEASURES}


def entropy_rank(weights: Float64[Tensor, "*site value"]) -> Float64[Tensor, "*site"]:
    """exp(-sum q log q) of weights that sum to 1; 0 where they are all 0."""
    rank = torch.special.entr(weights).sum(-1).exp()
    return torch.where((weights > 0).any(-1), rank, 0.0)


def _measures(rows: Float64[Tensor, "site example feature"]) -> dict[str, Tensor]:
    centred = rows - rows.mean(1, keepdim=True)
    # what rounding leaves of rows that are all the same
    centred = torch.where(centred.abs() > 1e-14 * rows.abs().amax((1, 2), keepdim=True), centred, 0.0)
    values = _eigenvalues(centred)
    share = values / _nonzero(values.sum(-1, keepdim=True))
    sizes = _eigenvalues(rows).sqrt()
    sizes = sizes / _nonzero(sizes.sum(-1, keepdim=True)) + EPSILON
    return {
        "effective_rank": entropy_rank(share),
        "participation": torch.where(values.sum(-1) > 0, 1 / _nonzero(share.square().sum(-1)), 0.0),
        "stable_rank": torch.where(values.sum(-1) > 0, 1 / _nonzero(share.amax(-1)), 0.0),
        "rankme": entropy_rank(sizes),
        "anisotropy": _mean_cosine(rows),
        "anisotropy_centred": _mean_cosine(centred),
    }


def _eigenvalues(rows: Float64[Tensor, "site example feature"]) -> Float64[Tensor, "site value"]:
    """Squared singular values; those that the Gram matrix cannot tell from 0 are 0."""
    gram = rows @ rows.mT if rows.shape[1] < rows.shape[2] else rows.mT @ rows
    values = torch.linalg.eigvalsh(gram)
    return torch.where(values > len(gram[0]) * 2.3e-16 * values[:, -1:], values, 0.0)


def _mean_cosine(rows: Float64[Tensor, "site example feature"]) -> Float64[Tensor, " site"]:
    """Over all pairs of different rows; a row of zeros has cosine 0 with every other."""
    norm = rows.norm(dim=2, keepdim=True)
    unit, n = rows / _nonzero(norm), rows.shape[1]
    return (unit.sum(1).square().sum(1) - (norm > 0).sum((1, 2))) / (n * (n - 1))


def _nonzero(values: Tensor) -> Tensor:
    return torch.where(values > 0, values, 1.0)


def _drawn(these: np.ndarray, rows: int | None, seed: int) -> np.ndarray:
    if len(these) < 2:
        raise ValueError(f"{len(these)} row(s) to measure on; a spectrum needs at least 2.")
    if rows is None:
        return these
    if not 2 <= rows <= len(these):
        raise ValueError(f"rows={rows}; give a number from 2 to {len(these)}, the rows there are (first tokens aside).")
    return np.sort(np.random.default_rng(seed).choice(these, rows, replace=False))

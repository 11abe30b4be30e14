"""Which probes a sweep fits: one per site, one per head where a site has heads, checked before any work is done.

A block is a captured tensor, `[row, d]` or `[row, head, d]`, seen as `[probe, row, d]`; nothing on the CPU is copied,
and what lies in a store is read when its turn comes, a block at a time, or in chunks of rows where a block is larger
than memory should hold (`is_large`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from microtome.capture.activation_checks import check_finite
from microtome.capture.activations import Activations
from microtome.capture.sites import Site
from microtome.capture.stored_tensor import StoredTensor, in_memory

LARGE = 2**31  # bytes of a block from which it is not read at once
CHUNK = 2**26


@dataclass(frozen=True)
class SiteBlock:
    """Probes of one captured tensor. `probes[i]` names `features[i]`, in the units of the model."""

    probes: tuple[Site, ...]
    values: Tensor | StoredTensor

    @property
    def width(self) -> int:
        """Features of each probe."""
        return self.values.shape[-1]

    @property
    def features(self) -> Float[Tensor, "probe example feature"]:
        """The rows, read now if they are on disk."""
        return _by_probe(in_memory(self.values))

    @property
    def is_large(self) -> bool:
        """Whether the rows are worked on in chunks: probes from moments can be, others need them in memory."""
        return self.values.nbytes > LARGE

    def chunks(self) -> Iterator[Float[Tensor, "probe some feature"]]:
        """The rows in consecutive chunks of at most 64 MB, read one at a time."""
        rows = max(1, CHUNK // max(1, self.values.nbytes // max(1, len(self.values))))
        for start in range(0, len(self.values), rows):
            yield _by_probe(in_memory(self.values[start : start + rows]))


def _by_probe(tensor: Tensor) -> Float[Tensor, "probe example feature"]:
    tensor = tensor.detach().cpu()
    return tensor.transpose(0, 1) if tensor.dim() == 3 else tensor[None]


def as_activations(activations) -> Activations:
    """Activations as they are, or from arrays as `Activations.from_arrays` reads them.

    A mapping holds an array for each name; one array `[row, d]` or `[row, head, d]`, or a table of numbers, becomes the
    site "features".
    """
    if isinstance(activations, Activations):
        return activations
    if isinstance(activations, Mapping):
        return Activations.from_arrays(activations)
    if isinstance(activations, pd.DataFrame):
        activations = _numbers_of(activations)
    if isinstance(activations, np.ndarray | Tensor):
        return Activations.from_arrays({"features": activations})
    raise TypeError(
        f"activations is a {type(activations).__name__}. Pass Activations, an array [row, d] or [row, head, d], a "
        "table of numbers, or a mapping of names to arrays, such as {'resid_post.3': array}."
    )


def _numbers_of(table: pd.DataFrame) -> np.ndarray:
    others = [str(name) for name in table if not pd.api.types.is_numeric_dtype(table[name])]
    if others:
        raise TypeError(
            f"columns {others[:5]} of the table hold no numbers. Pass the feature columns only: table[FEATURES]."
        )
    return table.to_numpy(dtype=np.float64)


def site_blocks(activations: Activations, sites: Iterable | None = None) -> list[SiteBlock]:
    """Blocks of the named sites, or of all. A name may be a captured site, one head of it, or a kind ("z").

    Raises KeyError for a name that was not captured (near matches are listed); ValueError for a probe named twice, no
    sites, NaN or infinity (naming site and row), and a site whose features are the same in every row.
    """
    blocks = []
    for site, tensor in _chosen(activations, sites):
        has_heads = tensor.dim() == 3
        probes = tuple(replace(site, head=head) for head in range(tensor.shape[1])) if has_heads else (site,)
        block = SiteBlock(probes=probes, values=tensor)
        _check(site, block, activations.rows)
        blocks.append(block)
    if not blocks:
        raise ValueError("No sites to probe: sites is empty. Pass names, or None for every captured site.")
    return blocks


def _chosen(activations: Activations, sites: Iterable | None) -> Iterable[tuple[Site, Tensor | StoredTensor]]:
    return (activations if sites is None else activations.only(sites)).tensors.items()


def _check(site: Site, block: SiteBlock, rows: pd.DataFrame) -> None:
    """Raise ValueError for NaN, infinity, and a probe whose features never change."""
    first, is_constant, start = None, torch.ones(len(block.probes), dtype=torch.bool), 0
    for features in block.chunks():
        check_finite(site, features.transpose(0, 1), rows, start=start)
        first = features[:, :1].clone() if first is None else first
        is_constant &= torch.stack([(probe == row).all() for probe, row in zip(features, first, strict=True)])
        start += features.shape[1]
    if is_constant.any():
        names = [str(probe) for probe, constant in zip(block.probes, is_constant, strict=True) if constant]
        raise ValueError(
            f"{', '.join(names[:3])}{' and more' if len(names) > 3 else ''}: every row has the same features, so no "
            "probe can tell rows apart. Check the position that was captured (a BOS token is the same in every text), "
            "or leave the site out with sites=."
        )

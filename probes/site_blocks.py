"""Which probes a sweep fits: one per site, one per head where a site has heads, checked before any work is done.

A block is a captured tensor, `[row, d]` or `[row, head, d]`, seen as `[probe, row, d]`; nothing on the CPU is copied,
and what lies in a store is read when its turn comes, a block at a time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from microtome.capture.activation_checks import check_finite
from microtome.capture.activations import Activations
from microtome.capture.sites import Site
from microtome.capture.stored_tensor import StoredTensor, in_memory


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
        tensor = in_memory(self.values).detach().cpu()
        return tensor.transpose(0, 1) if tensor.dim() == 3 else tensor[None]


def as_activations(activations) -> Activations:
    """Activations as they are, or from a mapping of names to arrays, as `Activations.from_arrays` reads them."""
    if isinstance(activations, Activations):
        return activations
    if isinstance(activations, Mapping):
        return Activations.from_arrays(activations)
    raise TypeError(
        f"activations is a {type(activations).__name__}. Pass Activations, or a mapping of names to arrays [row, d] or "
        "[row, head, d], such as {'resid_post.3': array}."
    )


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
        features = block.features
        check_finite(site, features.transpose(0, 1), activations.rows)
        _refuse_constant(probes, features)
        blocks.append(block)
    if not blocks:
        raise ValueError("No sites to probe: sites is empty. Pass names, or None for every captured site.")
    return blocks


def _chosen(activations: Activations, sites: Iterable | None) -> Iterable[tuple[Site, Tensor | StoredTensor]]:
    return (activations if sites is None else activations.only(sites)).tensors.items()


def _refuse_constant(probes: tuple[Site, ...], features: Float[Tensor, "probe example feature"]) -> None:
    is_constant = torch.stack([(probe == probe[:1]).all() for probe in features])
    if is_constant.any():
        names = [str(probe) for probe, constant in zip(probes, is_constant, strict=True) if constant]
        raise ValueError(
            f"{', '.join(names[:3])}{' and more' if len(names) > 3 else ''}: every row has the same features, so no "
            "probe can tell rows apart. Check the position that was captured (a BOS token is the same in every text), "
            "or leave the site out with sites=."
        )

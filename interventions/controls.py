"""Conditions that say whether a direction matters: the same push along other directions, elsewhere, or in words.

    random        directions drawn on the sphere, of the same length at every site
    covariance    directions drawn from the covariance of activations (harder: they lie where the stream varies)
    sign flip     the opposite direction
    wrong layer   the same vectors elsewhere

Labels are shuffled by fitting anew (`shuffled_labels`), and a prompt asks in words (`asked`).
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from microtome.interventions.artefact import Artefact

_MAIN = {"add": "vector", "project": "basis", "feedback": "read"}


def random_directions(artefact: Artefact, draws: int, *, seed: int = 0) -> list[Artefact]:
    """Artefacts with vectors drawn uniformly on the sphere, of the same norm at each site.

    Raises ValueError for an operation that is no vector (affine, rotate).
    """
    name = _main(artefact)
    norms = artefact.tensors[name].norm(dim=-1, keepdim=True)
    found = []
    for draw in range(draws):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + draw)
        noise = torch.randn(artefact.tensors[name].shape, generator=generator)
        found.append(_with(artefact, name, noise / noise.norm(dim=-1, keepdim=True) * norms, f"random {draw}"))
    return found


def covariance_directions(
    artefact: Artefact, activations: Sequence[Float[Tensor, "row d"]], draws: int, *, seed: int = 0
) -> list[Artefact]:
    """As `random_directions`, drawn from N(0, covariance of the activations) of each site.

    activations: rows of each site, in the artefact's order. Drawn as random mixtures of centred rows, which have that
    covariance exactly.
    """
    name = _main(artefact)
    if len(activations) != len(artefact.sites):
        raise ValueError(f"{len(activations)} sets of activations for {len(artefact.sites)} sites: give one each.")
    norms = artefact.tensors[name].norm(dim=-1, keepdim=True)
    found = []
    for draw in range(draws):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + draw)
        rows = []
        for x in activations:
            centred = x.double() - x.double().mean(0)
            rows.append(torch.randn(len(x), generator=generator, dtype=torch.float64) @ centred)
        noise = torch.stack(rows).float().view_as(artefact.tensors[name])
        found.append(_with(artefact, name, noise / noise.norm(dim=-1, keepdim=True) * norms, f"covariance {draw}"))
    return found


def sign_flip(artefact: Artefact) -> Artefact:
    """The opposite direction."""
    name = _main(artefact)
    return _with(artefact, name, -artefact.tensors[name], "sign flip")


def shuffled_labels(labels: Sequence[bool] | np.ndarray, groups: Sequence[object], *, seed: int = 0) -> np.ndarray:
    """Labels exchanged between groups, so that neither shares nor ties within groups change where groups are pure.

    Groups of both classes are shuffled within themselves as well.
    """
    generator = np.random.default_rng(seed)
    held = np.asarray(labels).copy()
    _, place = np.unique(np.asarray(groups, dtype=object).astype(str), return_inverse=True)
    sizes = np.bincount(place)
    for size in np.unique(sizes):
        same = np.flatnonzero(sizes == size)
        rows = np.stack([np.flatnonzero(place == group) for group in same])
        held[rows] = generator.permuted(np.asarray(labels)[rows[generator.permutation(len(rows))]], axis=1)
    return held


def asked(prompts: Sequence[str], instruction: str) -> list[str]:
    """Prompts with an instruction before them: what asking costs and achieves."""
    return [f"{instruction.strip()} {prompt}" for prompt in prompts]


def _main(artefact: Artefact) -> str:
    if artefact.operation not in _MAIN:
        raise ValueError(f"{artefact} is no direction: controls of direction are for {', '.join(_MAIN)}.")
    return _MAIN[artefact.operation]


def _with(artefact: Artefact, name: str, value: Tensor, method: str) -> Artefact:
    return artefact.with_tensors(f"{artefact.method} {method}".strip(), **{name: value})

"""Conditions that say whether a direction matters: the same push along other directions, elsewhere, or in words.

    random        directions drawn on the sphere, of the same length at every site; sites with one vector share the draw
    covariance    directions drawn from the covariance of activations (harder: they lie where the stream varies)
    sign flip     the opposite direction
    wrong layer   the same vectors elsewhere

Labels are shuffled by fitting anew (`shuffled_labels`), and a prompt asks in words (`asked`).
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from microtome.interventions.artefact import Artefact

# what is pushed along; of feedback, the reading stays, so that the push is as large and goes elsewhere
_MAIN = {"add": "vector", "project": "basis", "feedback": "write"}


def random_directions(artefact: Artefact, draws: int, *, seed: int = 0) -> list[Artefact]:
    """Artefacts with vectors drawn uniformly on the sphere, of the same norm at each site.

    Raises ValueError for an operation that is no vector (affine, rotate), fewer than one draw.
    """
    name = _main(artefact)
    shared = _shared(artefact.tensors[name])

    def noise(generator: torch.Generator) -> Tensor:
        return torch.randn(artefact.tensors[name].shape, generator=generator)[shared]

    return [_drawn(artefact, name, noise, seed, draw, "random") for draw in _numbers(draws)]


def covariance_directions(
    artefact: Artefact, activations: Sequence[Float[Tensor, "row d"]], draws: int, *, seed: int = 0
) -> list[Artefact]:
    """As `random_directions`, drawn from N(0, covariance of the activations) of each site.

    activations: rows of each site, in the artefact's order. Drawn as random mixtures of centred rows, which have that
    covariance exactly.

    Raises ValueError for another number of sites, another width, rows that do not vary.
    """
    name = _main(artefact)
    value = artefact.tensors[name]
    if len(activations) != len(artefact.sites):
        raise ValueError(f"{len(activations)} sets of activations for {len(artefact.sites)} sites: give one each.")
    centred = [x.double() - x.double().mean(0) for x in activations]
    for site, x in zip(artefact.sites, centred, strict=True):
        if x.shape[1] != value.shape[-1] or not bool(x.any()):
            raise ValueError(
                f"{site}: activations {tuple(x.shape)} for vectors of {value.shape[-1]}: give rows of that site, "
                "several that differ."
            )
    shared = _shared(value)

    def noise(generator: torch.Generator) -> Tensor:
        count = value[0].numel() // value.shape[-1]
        rows = [torch.randn(count, len(x), generator=generator, dtype=torch.float64) @ x for x in centred]
        return torch.stack(rows).float().view_as(value)[shared]

    return [_drawn(artefact, name, noise, seed, draw, "covariance") for draw in _numbers(draws)]


def _shared(value: Tensor) -> Tensor:
    """For each site, the first one that has the same vector: a direction taken out everywhere is drawn once."""
    rows = value.flatten(1)
    return (rows[:, None] == rows[None]).all(-1).int().argmax(1)


def _numbers(draws: int) -> range:
    if draws < 1:
        raise ValueError(f"draws={draws}: give at least one.")
    return range(draws)


def _drawn(
    artefact: Artefact, name: str, noise: Callable[[torch.Generator], Tensor], seed: int, draw: int, what: str
) -> Artefact:
    norms = artefact.tensors[name].norm(dim=-1, keepdim=True)
    found = noise(torch.Generator().manual_seed(seed * 1_000_003 + draw))
    return _with(artefact, name, found / found.norm(dim=-1, keepdim=True) * norms, f"{what} {draw}")


def sign_flip(artefact: Artefact) -> Artefact:
    """The opposite direction. Raises ValueError for what has none: a direction taken out is gone either way."""
    name = _main(artefact)
    if artefact.operation == "project" and not {"values"} & {*artefact.tensors, *artefact.options}:
        raise ValueError(f"{artefact}: taking out a direction has no sign to flip.")
    return _with(artefact, name, -artefact.tensors[name], "sign flip")


def shuffled_labels(labels: Sequence[bool] | np.ndarray, groups: Sequence[object], *, seed: int = 0) -> np.ndarray:
    """Labels exchanged between groups, so that neither shares nor ties within groups change where groups are pure.

    Groups of both classes are shuffled within themselves as well. Labels move between groups of equal size.

    Raises ValueError where no label can move: all groups of one class each, and no two of equal size that differ.
    """
    generator = np.random.default_rng(seed)
    held = np.asarray(labels).copy()
    _, place = np.unique(np.asarray(groups, dtype=object).astype(str), return_inverse=True)
    sizes = np.bincount(place)
    can_move = False
    for size in np.unique(sizes):
        same = np.flatnonzero(sizes == size)
        rows = np.stack([np.flatnonzero(place == group) for group in same])
        can_move |= len(np.unique(np.asarray(labels)[rows])) > 1
        held[rows] = generator.permuted(np.asarray(labels)[rows[generator.permutation(len(rows))]], axis=1)
    if not can_move:
        raise ValueError(
            f"{len(sizes)} groups of one class each, none as large as one of the other class: labels cannot be "
            "exchanged. Take as many texts of each group."
        )
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

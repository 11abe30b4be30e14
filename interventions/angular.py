"""Angular steering: turn activations within one plane, their norm and all else untouched (Vu and Nguyen 2025).

    b1   the candidate direction (difference of means at one site) with the highest mean cosine to the others
    b2   first principal component of the stacked unit candidates, made orthogonal to b1
    x    <- x - P x + |P x| (cos theta b1 + sin theta b2),        adaptive: only where b1 . x > 0

At theta = 0 the part in the plane points to the wanted class. The sign of b2 is fixed by the candidates: the mean of
their coordinates along it is positive. The published edit is at the outputs of norms, which sublayers read; this one
is at sites of the stream, and so changes what is handed on as well. Strength scales the turn: at w the angle goes the
share w of the way to theta, so that 0 is the unsteered model and 1 the published edit.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from microtome.capture.models import LoadedModel
from microtome.interventions.artefact import Artefact, made_on
from microtome.interventions.contrast import ContrastRows
from microtome.interventions.positions import Positions

LEAST_SINE = 1e-6  # of the angle between candidates; below it their plane would be one of rounding


def steering_plane(candidates: Float[Tensor, "candidate d"]) -> tuple[Float[Tensor, "2 d"], int]:
    """b1 and b2, and the number of the candidate that b1 is.

    Raises ValueError for fewer than two candidates, one that is zero, or ones that all lie on one line.
    """
    if len(candidates) < 2:
        raise ValueError(f"{len(candidates)} candidate: a plane needs two directions at least. Give more sites.")
    units = candidates.double()
    sizes = units.norm(dim=1, keepdim=True)
    if not bool(torch.isfinite(units).all() and (sizes > 0).all()):
        raise ValueError("A candidate is zero or not finite: the two sets read the same there. Give other sites.")
    units = units / sizes
    cosines = units @ units.T
    chosen = int((cosines.sum(1) - 1).argmax())
    first = units[chosen]
    outside = units - (units @ first)[:, None] * first
    component = torch.linalg.svd(units - units.mean(0), full_matrices=False).Vh[0]
    second = component - (component @ first) * first
    if float(outside.norm(dim=1).max()) < LEAST_SINE or float(second.norm()) < LEAST_SINE:
        raise ValueError("All candidates lie on one line: there is no plane. Give directions of several depths.")
    second = second / second.norm()
    if float((units @ second).mean()) < 0:
        second = -second
    return torch.stack([first, second]).float(), chosen


def angular(
    model: LoadedModel,
    rows: ContrastRows,
    sites: Sequence[str],
    angle: float = 0.0,
    *,
    adaptive: bool = True,
    relative: bool = False,
    names: tuple[str, str] = ("wanted", "unwanted"),
    positions: Positions = "all",
) -> Artefact:
    """One plane of all the rows' sites, turned to an angle (degrees) at some sites.

    Args:
        rows: of several depths; each gives a candidate.
        sites: where it acts.
        angle: degrees from b1 towards b2; 180 points away from the wanted class.
        adaptive: only tokens with b1 . x > 0.
        relative: turn by the angle in place of to it.

    Raises:
        ValueError: what `steering_plane` refuses.
    """
    candidates = torch.stack(
        [(x[rows.wanted].double().mean(0) - x[~rows.wanted].double().mean(0)) for x in rows.activations.values()]
    )
    plane, chosen = steering_plane(candidates)
    return Artefact(
        "rotate",
        tuple(sites),
        {"plane": plane.expand(len(sites), 2, -1).clone()},
        {"angle": math.radians(angle), "mode": "by" if relative else "to", "adaptive": adaptive},
        method="angular adaptive" if adaptive else "angular",
        positive=names[0],
        negative=names[1],
        extraction=rows.extraction,
        positions=positions,
        counts=rows.counts,
        facts=made_on(model, plane_of=rows.sites[chosen], degrees=angle),
    )


def angle_sweep(artefact: Artefact, angles: Sequence[float | int]) -> dict[float, Artefact]:
    """The same plane at other angles (degrees), by angle; the published sweep is `range(0, 360, 10)`.

    Raises ValueError for an artefact that does not rotate, and for no angles.
    """
    if artefact.operation != "rotate":
        raise ValueError(f"{artefact} does not rotate. Give one of `angular`.")
    if not len(angles):
        raise ValueError("No angles: give at least one, in degrees.")
    return {
        float(angle): replace(
            artefact,
            options={**artefact.options, "angle": math.radians(angle)},
            facts={**artefact.facts, "degrees": float(angle)},
        )
        for angle in angles
    }

"""Steering as control over depth: proportional, integral and derivative action on a feature's gap.

    gap_k = setpoint_k - v_k . x_k          u_k = (K_p gap_k + K_i sum_{j <= k} gap_j + K_d (gap_k - gap_{k-1})) v_k

x_k is the stream leaving block k in the running, already steered forward (closed loop), v_k the unit direction there.
The setpoint is measured: offset_k + level n_k, offset_k the unwanted texts' mean projection and n_k the gap of the
classes, so that level 0 is a typical unwanted and 1 a typical wanted text; `from_zero` takes level n_k as published.
The sum is over the layers of one forward, by token, clamped to `windup` setpoints' gaps, and starts anew in the next.

`open_loop` is PID-AcT (Nguyen et al. 2025): the same law on mean differences measured layer by layer on the model
steered so far; a constant vector per layer results.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from microtome.capture.collect import capture
from microtome.capture.live_taps import EditContext
from microtome.capture.models import LoadedModel
from microtome.interventions.artefact import Artefact, made_on
from microtome.interventions.operations import Add
from microtome.interventions.positions import Positions
from microtome.interventions.site_order import require_order
from microtome.interventions.steering import Intervention, Steering, Strength


@dataclass(frozen=True, eq=False)
class Controller:
    """Gains that several layers share; what they add up lives in the running forward.

    Attributes:
        kp, ki, kd: of the gap, its sum over layers and its change.
        windup: largest |sum|, in units of the layer's class gap.
        one_sided: readings beyond the setpoint are left alone.
    """

    kp: float
    ki: float = 0.0
    kd: float = 0.0
    windup: float = 10.0
    one_sided: bool = False

    def __post_init__(self):
        if not all(map(math.isfinite, (self.kp, self.ki, self.kd))) or not self.windup > 0:
            raise ValueError(f"{self}: give gains that are finite numbers, and a windup above 0.")

    def at(self, direction: Float[Tensor, " d"], setpoint: float, gap: float) -> "ControlledLayer":
        """The operation of one layer. gap: distance of the classes there, the unit of `windup`.

        Raises ValueError for a direction of zero, a setpoint that is no number, a gap that is not above 0.
        """
        size = float(direction.norm())
        if not (math.isfinite(size) and size > 0 and math.isfinite(setpoint) and gap > 0):
            raise ValueError(
                f"direction of length {size:g}, setpoint={setpoint:g}, gap={gap:g}: give a direction that is not zero, "
                "a number, and a gap above 0. A direction of zero is that of two equal sets of texts."
            )
        return ControlledLayer(self, direction / size, setpoint, gap)


@dataclass(frozen=True, eq=False)
class ControlledLayer:
    """The law at one layer. Attributes: controller, direction (unit), setpoint, gap (of the classes)."""

    controller: Controller
    direction: Float[Tensor, " d"]
    setpoint: float
    gap: float

    @property
    def width(self) -> int:
        """Channels."""
        return len(self.direction)

    @property
    def directions(self) -> Tensor:
        """For the ledger."""
        return self.direction[None]

    def delta(self, x: Tensor, weight: Tensor, at: EditContext | None) -> Tensor:
        """u at every token; 0 where weight is 0."""
        law, direction = self.controller, self.direction.to(x)
        gap = self.setpoint - x @ direction
        if law.one_sided:
            gap = gap.clamp_min(0)
        push = law.kp * gap
        if law.ki or law.kd:
            call = None if at is None else at.call
            if call is None:
                raise ValueError("A controller with memory acts through Steering, which knows the running forward.")
            total, last = call.scratch.get(law, (torch.zeros_like(gap), gap))
            total = (total + gap).clamp(-law.windup * self.gap, law.windup * self.gap)
            call.scratch[law] = (total, gap)
            push = push + law.ki * total + law.kd * (gap - last)
        return weight * push[..., None] * direction


def controlled(
    model: LoadedModel,
    means: Artefact,
    *,
    kp: float = 0.5,
    ki: float = 0.0,
    kd: float = 0.0,
    level: float = 1.0,
    windup: float = 10.0,
    one_sided: bool = False,
    from_zero: bool = False,
    positions: Positions | None = None,
    strength: Strength = 1.0,
) -> Steering:
    """Closed-loop steering of all sites of a contrast's artefact (`contrast(..., "mean")`, several layers).

    Args:
        means: vectors of length n_k with their offsets.
        level: 0 is a typical unwanted, 1 a typical wanted text.
        from_zero: the published setpoint, level n_k, without the offset.
        strength: multiplies what is added.

    Raises:
        ValueError: an artefact without offsets, another model, sites that are not in order of depth, gains or a level
            that are no numbers.
    """
    if means.operation != "add" or means.offset is None:
        raise ValueError(f"{means} has no offsets: make it with contrast(..., method='mean').")
    require_order(means.sites)
    if not math.isfinite(level):
        raise ValueError(f"level={level}: give a number; 0 is a typical unwanted and 1 a typical wanted text.")
    means.steering(model)  # refuses another model, site or width
    law = Controller(kp, ki, kd, windup, one_sided)
    name = "PID" if kd else "PI" if ki else "P"
    found = []
    for number, site in enumerate(means.sites):
        vector = means.tensors["vector"][number]
        gap = float(vector.norm())
        setpoint = level * gap + (0.0 if from_zero else float(means.offset[number]))
        where = means.positions if positions is None else positions
        found.append(Intervention(site, law.at(vector, setpoint, gap), where, strength, name=name))
    return Steering(found)


def open_loop(
    model: LoadedModel,
    wanted: Sequence[Any],
    unwanted: Sequence[Any],
    sites: Sequence[str],
    *,
    kp: float = 1.0,
    ki: float = 0.3,
    kd: float = 0.01,
    extraction: Any = "last",
    names: tuple[str, str] = ("wanted", "unwanted"),
    positions: Positions = "generated",
    progress: bool = True,
    **options: Any,
) -> Artefact:
    """PID-AcT: r(k) = mean of wanted - mean of unwanted texts, the latter steered at the layers before k.

    One pass over the unwanted texts per site. The default gains are those of the paper's jailbreaks.

    Raises ValueError for no texts of a side, and for sites that are not in order of depth.
    """
    if not len(wanted) or not len(unwanted):
        raise ValueError(f"{len(wanted)} wanted and {len(unwanted)} unwanted texts: a difference needs both.")
    places = require_order(sites)
    aims = capture(model, list(wanted), places, extraction, progress=False, **options)
    vectors: list[Tensor] = []
    total: Tensor | None = None
    last: Tensor | None = None
    for site in tqdm(places, desc="layers", disable=not progress):
        done = [Intervention(p, Add(v), positions) for p, v in zip(places, vectors, strict=False) if bool(v.any())]
        edits = Steering(done).edits(model) if done else {}
        held = capture(model, list(unwanted), [site], extraction, edits=edits, progress=False, **options)
        gap = aims[site].double().mean(0) - held[site].double().mean(0)
        total = gap if total is None else total + gap
        change = torch.zeros_like(gap) if last is None else gap - last
        vectors.append((kp * gap + ki * total + kd * change).float())
        last = gap
    return Artefact(
        "add",
        places,
        {"vector": torch.stack(vectors)},
        method="PID-AcT",
        positive=names[0],
        negative=names[1],
        extraction=str(extraction),
        positions=positions,
        counts=(len(wanted), len(unwanted)),
        facts=made_on(model, kp=kp, ki=ki, kd=kd),
    )

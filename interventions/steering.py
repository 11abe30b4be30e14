"""Edits put together: what is done, where in the model, at which tokens, how strongly, and on what condition.

    x <- x + delta(x, strength[text] mask[token] gate[text])

Interventions of one site act in the order given, each on what the ones before it left. `Steering.edits()` is what
`taps`, `capture`, `next_token_kl` and `text_nll` take; `generate` and `steered` do the rest themselves.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from microtome.capture.anatomy import Anatomy
from microtome.capture.dissect import dissect
from microtome.capture.forward_call import ForwardCall
from microtome.capture.live_taps import EditContext
from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.capture.tap_plan import Edit, SiteName
from microtome.capture.taps import Tape, taps
from microtome.interventions.ledger import Ledger
from microtome.interventions.operations import Operation
from microtome.interventions.positions import Positions, checked_positions, position_mask

Strength = float | int | Sequence[float] | Float[Tensor, " text"]


@runtime_checkable
class Gate(Protocol):
    """Decides by text whether interventions act; asked in a generation's first forward, and kept.

    Attributes:
        site: where it looks.
    """

    @property
    def site(self) -> str: ...

    def decide(self, value: Float[Tensor, "batch token d"], at: EditContext) -> Float[Tensor, " batch"]:
        """1 acts, 0 does not; between them the strength is scaled."""
        ...


@dataclass(frozen=True, eq=False)
class Intervention:
    """One edit.

    Attributes:
        site: a single site ("resid_post.12", "z.3.5") or a kind that stands for all layers ("resid_post").
        operation: what is done to the vector.
        positions: at which tokens (`microtome.interventions.positions`).
        strength: 0 changes nothing, to the bit; a number, or one for each text.
        gate: by text, whether it acts.
        name: for the ledger.
    """

    site: SiteName
    operation: Operation
    positions: Positions = "all"
    strength: Strength = 1.0
    gate: Gate | None = None
    name: str = ""

    def __post_init__(self):
        if not isinstance(self.operation, Operation):
            raise TypeError(f"operation={self.operation!r:.80}: give Add, Project, Affine, Rotate, Swap, Feedback, ...")
        object.__setattr__(self, "site", Site.parse(self.site))
        object.__setattr__(self, "positions", checked_positions(self.positions))
        object.__setattr__(self, "strength", checked_strength(self.strength))
        if not self.name:
            object.__setattr__(self, "name", type(self.operation).__name__.lower())


def checked_strength(strength: object) -> float | tuple[float, ...]:
    """A finite number, or one for each text. Raises ValueError or TypeError."""
    if (
        isinstance(strength, bool)
        or not isinstance(strength, int | float | Tensor | Sequence)
        or isinstance(strength, str)
    ):
        raise TypeError(f"strength={strength!r:.60}: give a number, or one for each text.")
    numbers = torch.as_tensor(strength, dtype=torch.float64)
    if numbers.ndim > 1 or not numbers.numel() or not bool(torch.isfinite(numbers).all()):
        raise ValueError(f"strength={strength!r:.60}: give a finite number, or one for each text.")
    return float(numbers) if numbers.ndim == 0 else tuple(numbers.tolist())


@dataclass(frozen=True, eq=False)
class Steering:
    """Interventions that act together, in the order given."""

    interventions: tuple[Intervention, ...]

    def __init__(self, interventions: Intervention | Iterable[Intervention]):
        held = (interventions,) if isinstance(interventions, Intervention) else tuple(interventions)
        if not held:
            raise ValueError("No interventions: there is nothing to do. Give at least one.")
        if wrong := [one for one in held if not isinstance(one, Intervention)]:
            raise TypeError(f"{wrong[0]!r:.80} is no Intervention.")
        object.__setattr__(self, "interventions", held)

    def __iter__(self) -> Iterator[Intervention]:
        return iter(self.interventions)

    def __len__(self) -> int:
        return len(self.interventions)

    def __add__(self, other: "Steering") -> "Steering":
        """Both, those of the first acting before those of the second."""
        return Steering([*self.interventions, *other.interventions])

    def times(self, strength: Strength) -> "Steering":
        """The same with every strength multiplied, by one number or one for each text."""
        factor = checked_strength(strength)
        return Steering([replace(one, strength=_product(one.strength, factor)) for one in self])

    def at(self, positions: Positions) -> "Steering":
        """The same at other tokens."""
        return Steering([replace(one, positions=positions) for one in self])

    def edits(self, model: nn.Module | LoadedModel | Anatomy, ledger: Ledger | None = None) -> dict[Site, Edit]:
        """Edits by site, for `taps` and whatever takes edits.

        Args:
            model: or its anatomy: sites it does not offer are refused, and vectors of another width.
            ledger: is told what every intervention did.

        Raises:
            KeyError, IndexError: a site the model does not offer.
            ValueError: a vector that does not fit its site, a gate whose site comes after what it decides.
        """
        anatomy = model if isinstance(model, Anatomy) else anatomy_of(model)
        at_site: dict[Site, list[Intervention]] = {}
        for one in self.interventions:
            for site in anatomy.expand(one.site):
                _require_width(one, site, anatomy)
                at_site.setdefault(site, []).append(one)
        gates = {one.gate: anatomy.expand(one.gate.site) for one in self if one.gate is not None}
        asked: dict[Site, list[Gate]] = {}
        for gate, sites in gates.items():
            if len(sites) != 1:
                raise ValueError(f"A gate looks at one site; {gate.site!r} stands for {len(sites)}.")
            asked.setdefault(sites[0], []).append(gate)
        order = {site: number for number, site in enumerate([*asked, *at_site])}
        edits: dict[Site, Edit] = {}
        for site in sorted({*asked, *at_site}, key=lambda site: order[site]):
            edits[site] = Edit(_AtSite(site, tuple(at_site.get(site, ())), tuple(asked.get(site, ())), ledger))
        return edits


def anatomy_of(model: nn.Module | LoadedModel) -> Anatomy:
    """The parts of the model, found once."""
    return dissect(model.module if isinstance(model, LoadedModel) else model)


def _require_width(one: Intervention, site: Site, anatomy: Anatomy) -> None:
    width, wanted = one.operation.width, width_of(site, anatomy)
    if width is not None and wanted is not None and width != wanted:
        raise ValueError(
            f"{one.name} has {width} channels, {site} has {wanted}: it was made at another site or for another model."
        )


def width_of(site: Site, anatomy: Anatomy) -> int | None:
    """Channels of a site's vectors, or of one of its heads'; None where the anatomy does not say."""
    return anatomy.tap(site).width or None


def _product(own: Strength, factor: Strength) -> Strength:
    a, b = torch.as_tensor(own, dtype=torch.float64), torch.as_tensor(factor, dtype=torch.float64)
    if a.ndim and b.ndim and len(a) != len(b):
        raise ValueError(f"Strengths of {len(a)} and {len(b)} texts: give as many of each, or one number.")
    return checked_strength(a * b)


@dataclass(frozen=True, eq=False)
class _AtSite:
    """The function of one site: its interventions one after the other."""

    site: Site
    interventions: tuple[Intervention, ...]
    gates: tuple[Gate, ...]
    ledger: Ledger | None

    def __call__(self, value: Tensor, at: EditContext) -> Tensor:
        call = at.call
        if call is None:
            raise ValueError(f"{self.site}: the model's own forward was not called, so that positions are not known.")
        x = value if value.dtype in (torch.float32, torch.float64) else value.float()
        for gate in self.gates:
            if gate not in call.state:
                call.state[gate] = gate.decide(x.detach(), at)
        total: Tensor | None = None
        for one in self.interventions:
            weight, mask = _weight(one, call, x)
            now = x if total is None else x + total
            delta = one.operation.delta(now, weight, at)
            if delta.shape != x.shape:
                raise ValueError(f"{one.name} gave {tuple(delta.shape)} at {self.site}; expected {tuple(x.shape)}.")
            if self.ledger is not None:
                self.ledger.add(self.site, one.name, call, now, delta, mask, one.operation.directions)
            total = delta if total is None else total + delta
        if total is None:
            return value.new_zeros((1,) * value.ndim)
        return total if total.dtype == value.dtype else total.to(value.dtype)


def _weight(one: Intervention, call: ForwardCall, x: Tensor) -> tuple[Tensor, Tensor]:
    """Strength at each token, [batch, token, 1 ...], and where the intervention acts; made once per forward."""
    key = (one.positions, one.strength, one.gate, x.ndim, x.dtype)
    if key in call.scratch:
        return call.scratch[key]
    if call.shape != tuple(x.shape[:2]):
        raise ValueError(f"{one.site} has {tuple(x.shape[:2])} rows and tokens, the forward {call.shape}.")
    mask = position_mask(one.positions, call).to(x.device)
    strength: Tensor = torch.as_tensor(one.strength, dtype=x.dtype, device=x.device)
    if strength.ndim:
        texts = call.texts.to(x.device)
        if int(texts.max()) >= len(strength):
            raise ValueError(
                f"{one.name} has strengths of {len(strength)} texts, and text {int(texts.max())} runs: give one each."
            )
        strength = strength[texts][:, None]
    weight = mask * strength
    if one.gate is not None:
        if one.gate not in call.state:
            raise ValueError(f"The gate at {one.gate.site} comes after {one.site}, which it is to decide.")
        weight = weight * call.state[one.gate].to(weight)[:, None]
        mask = mask & (call.state[one.gate].to(mask.device) != 0)[:, None]
    weight = weight.view(*weight.shape, *[1] * (x.ndim - 2))
    call.scratch[key] = weight, mask
    return weight, mask


@contextmanager
def steered(
    model: nn.Module | LoadedModel,
    steering: Steering,
    reads: Iterable[SiteName] | SiteName = (),
    *,
    anatomy: Anatomy | None = None,
) -> Iterator[tuple[Tape, Ledger]]:
    """Steer every forward of the model inside the `with`, and read sites: yields the tape and the ledger.

    Raises:
        TapNeverFired: at the end, an edit whose site no forward reached.
        NeverActed: at the end, an intervention whose positions no token met.
    """
    anatomy = anatomy_of(model) if anatomy is None else anatomy
    ledger = Ledger.of(steering)
    with taps(model, reads, steering.edits(anatomy, ledger), anatomy=anatomy) as tape:
        yield tape, ledger
    ledger.require_acted()

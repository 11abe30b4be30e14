"""A steering vector as it is kept: what is done with it, where, for which model, and where it came from.

A vector alone does not say whether it is to be added or projected out, at which site, with which sign, or how long it
was before it was normalised; an `Artefact` does, and refuses another model, site or width. On disk it is a folder of
 `artefact.safetensors` (float32) and `artefact.json`.
"""

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.interventions.operations import Add, Affine, Feedback, Operation, Project, Rotate
from microtome.interventions.positions import ByText, Positions, Tokens, checked_positions
from microtome.interventions.steering import Gate, Intervention, Steering, Strength, checked_strength
from microtome.lenses.described_tensors import read_described, write_described
from microtome.lenses.made_for import facts_of, require_same_weights

FORMAT = 1
FILE, DESCRIPTION = "artefact.safetensors", "artefact.json"
OPERATIONS: dict[str, type] = {"add": Add, "project": Project, "affine": Affine, "rotate": Rotate, "feedback": Feedback}


@dataclass(frozen=True, eq=False)
class Artefact:
    """Vectors by site, and all that is needed to use them again.

    Attributes:
        operation: "add", "project", "affine", "rotate" or "feedback".
        sites: where each acts.
        tensors: by name of the operation's field, `[site, ...]`, float32; what strength 1 does.
        options: the operation's other fields.
        method: how they were found.
        positive, negative: what the two sets of texts showed; vectors point to `positive`.
        extraction: at which tokens they were read.
        positions: at which tokens they are meant to act.
        raw_norm: length of the difference of means, by site, before any scaling.
        offset: mean projection of the `negative` texts on the unit vector, by site.
        counts: texts of the two sets.
        facts: of the model (name, weight_sha256), its chat template (template_sha256), and whatever else was noted.
    """

    operation: str
    sites: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    method: str = ""
    positive: str = "positive"
    negative: str = "negative"
    extraction: str = "last"
    positions: Positions = "all"
    raw_norm: Float[Tensor, " site"] | None = None
    offset: Float[Tensor, " site"] | None = None
    counts: tuple[int, int] = (0, 0)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if self.operation not in OPERATIONS:
            raise ValueError(f"operation={self.operation!r}: give one of {', '.join(OPERATIONS)}.")
        object.__setattr__(self, "sites", tuple(str(Site.parse(site)) for site in self.sites))
        object.__setattr__(self, "tensors", {k: v.detach().float().cpu() for k, v in self.tensors.items()})
        object.__setattr__(self, "positions", checked_positions(self.positions))
        if not self.sites or any(len(value) != len(self.sites) for value in self.tensors.values()):
            sizes = {name: len(value) for name, value in self.tensors.items()}
            raise ValueError(f"{len(self.sites)} sites and tensors of {sizes}: give one entry per site, at least one.")
        if twice := [site for site in dict.fromkeys(self.sites) if self.sites.count(site) > 1]:
            raise ValueError(f"{twice[0]} is listed twice: give each site once.")
        self._require_fields()
        for name in ("raw_norm", "offset"):
            value = getattr(self, name)
            if value is not None and len(value) != len(self.sites):
                raise ValueError(f"{name} has {len(value)} entries for {len(self.sites)} sites.")

    def _require_fields(self) -> None:
        known = {one.name: one for one in fields(OPERATIONS[self.operation])}
        held = [*self.tensors, *self.options]
        needed = [name for name, one in known.items() if one.default is MISSING and one.default_factory is MISSING]
        if not set(needed) <= set(held) <= set(known):
            raise ValueError(
                f"{self.operation!r} needs {', '.join(needed)} and may have {', '.join(known)}; this one has "
                f"{', '.join(held)}."
            )

    def __repr__(self) -> str:
        several = f"{len(self.sites)} sites, {self.sites[0]} to {self.sites[-1]}"
        where = self.sites[0] if len(self.sites) == 1 else several
        way = f"{self.negative} to {self.positive}"
        return f"Artefact({self.method or self.operation}: {way}, {self.operation} at {where})"

    @property
    def layers(self) -> tuple[int | None, ...]:
        """The layer of each site."""
        return tuple(Site.parse(site).layer for site in self.sites)

    def vector(self, site: str | None = None) -> Float[Tensor, " d"]:
        """The vector of one site (of the only one, if there is one).

        Raises KeyError for a site it does not have, ValueError where there are several and none is named.
        """
        if site is None and len(self.sites) > 1:
            raise ValueError(f"{self} has {len(self.sites)} vectors: name a site, such as {self.sites[0]!r}.")
        name = {"add": "vector", "project": "basis", "feedback": "read", "rotate": "plane", "affine": "bias"}
        return self.tensors[name[self.operation]][self._number(site or self.sites[0])]

    def operation_at(self, site: str) -> Operation:
        """What is done at one site."""
        number = self._number(site)
        return OPERATIONS[self.operation](**{k: v[number] for k, v in self.tensors.items()}, **self.options)

    def _number(self, site: str) -> int:
        name = str(Site.parse(site))
        if name not in self.sites:
            raise KeyError(
                f"{self.method or 'This artefact'} was made at {', '.join(self.sites[:4])}"
                f"{', ...' if len(self.sites) > 4 else ''}; it has nothing for {name}. `moved` takes it elsewhere."
            )
        return self.sites.index(name)

    def only(self, sites: Sequence[str] | str) -> "Artefact":
        """The part of some sites. Raises KeyError for one it does not have."""
        numbers = [self._number(site) for site in ([sites] if isinstance(sites, str) else sites)]
        return replace(
            self,
            sites=tuple(self.sites[n] for n in numbers),
            tensors={k: v[numbers] for k, v in self.tensors.items()},
            raw_norm=None if self.raw_norm is None else self.raw_norm[numbers],
            offset=None if self.offset is None else self.offset[numbers],
        )

    def moved(self, sites: Sequence[str] | str) -> "Artefact":
        """The same vectors at other sites, said so in `facts`: the control of the wrong layer."""
        sites = (sites,) if isinstance(sites, str) else tuple(sites)
        return replace(self, sites=sites, facts={**self.facts, "moved_from": list(self.sites)})

    def with_tensors(self, method: str, **tensors: Tensor) -> "Artefact":
        """The same with other tensors and another name: how controls are made."""
        return replace(self, method=method, tensors={**self.tensors, **tensors})

    def steering(
        self,
        model: LoadedModel | nn.Module,
        *,
        strength: Strength = 1.0,
        positions: Positions | None = None,
        gate: Gate | None = None,
    ) -> Steering:
        """What `generate` and the evaluation take: one intervention per site.

        Args:
            model: the one it was made for; others are refused.
            strength: a number, or one for each text. Maps ("affine") are meant for 0, nothing, to 1, the whole map;
                beyond, a warning says that channels are sent past what they were fitted on.
            positions: where it acts; as `self.positions` if not given.

        Raises:
            ValueError: another model, another width.
            KeyError, IndexError: a site the model does not offer.
        """
        require_same_weights(self.facts, model, repr(self))
        where = self.positions if positions is None else positions
        name = self.method or self.operation
        if self.operation == "affine" and any(not 0 <= one <= 1 for one in _numbers(strength)):
            warnings.warn(
                f"{self}: strength {strength!r:.40} is outside 0 to 1. A map is whole at 1; beyond, channels go past "
                "what they were fitted on.",
                stacklevel=2,
            )
        steering = Steering(
            Intervention(site, self.operation_at(site), where, strength, gate, name) for site in self.sites
        )
        steering.edits(model)  # refuses sites and widths now
        return steering

    def to_frame(self) -> pd.DataFrame:
        """site, raw_norm, offset, norm of what strength 1 adds or reads."""
        main = next(iter(self.tensors.values())).flatten(1)
        return pd.DataFrame(
            {
                "site": self.sites,
                "norm": main.norm(dim=1).numpy(),
                "raw_norm": torch.full((len(self.sites),), torch.nan) if self.raw_norm is None else self.raw_norm,
                "offset": torch.full((len(self.sites),), torch.nan) if self.offset is None else self.offset,
            }
        )

    def save(self, folder: str | Path) -> None:
        """Write it to a folder; both files are replaced whole or not at all."""
        folder = Path(folder).expanduser()
        extra = {k: v for k, v in (("raw_norm", self.raw_norm), ("offset", self.offset)) if v is not None}
        tensors = {f"operation.{k}": v for k, v in self.tensors.items()} | {k: v.float() for k, v in extra.items()}
        said = {
            "operation": self.operation,
            "sites": list(self.sites),
            "options": dict(self.options),
            "method": self.method,
            "positive": self.positive,
            "negative": self.negative,
            "extraction": self.extraction,
            "positions": _positions_said(self.positions),
            "counts": list(self.counts),
            "facts": dict(self.facts),
        }
        write_described(folder / FILE, folder / DESCRIPTION, tensors, said, number=FORMAT)

    @classmethod
    def load(cls, folder: str | Path) -> "Artefact":
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: no such folder or files.
            ValueError: damaged files, another format.
        """
        folder = Path(folder).expanduser()
        needs = ["operation", "sites", "options", "method", "positive", "negative", "extraction", "positions", "counts"]
        tensors, said = read_described(
            folder / FILE, folder / DESCRIPTION, number=FORMAT, needs=[*needs, "facts"], again="Save it again."
        )
        named = {k.removeprefix("operation."): v for k, v in tensors.items() if k.startswith("operation.")}
        said["positions"] = _positions_read(said["positions"])
        said["sites"], said["counts"] = tuple(said["sites"]), tuple(said["counts"])
        return cls(tensors=named, raw_norm=tensors.get("raw_norm"), offset=tensors.get("offset"), **said)


def _numbers(strength: Strength) -> tuple[float, ...]:
    held = checked_strength(strength)
    return held if isinstance(held, tuple) else (held,)


def _positions_said(positions: Positions) -> Any:
    if isinstance(positions, Tokens):
        return {"tokens": list(positions.ids), "text": positions.text}
    return {"by_text": [list(one) for one in positions.numbers]} if isinstance(positions, ByText) else positions


def _positions_read(said: Any) -> Positions:
    if isinstance(said, dict) and "by_text" in said:
        return ByText(said["by_text"])
    return Tokens(tuple(said["tokens"]), said["text"]) if isinstance(said, dict) else said


def made_on(model: LoadedModel | nn.Module, **more: Any) -> dict[str, Any]:
    """Facts of the model for an artefact: name, weight_sha256, template_sha256, dtype, and what else is given."""
    module = model.module if isinstance(model, LoadedModel) else model
    template = getattr(model.tokenizer, "chat_template", None) if isinstance(model, LoadedModel) else None
    hashed = None if not template else hashlib.sha256(str(template).encode()).hexdigest()
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    return {**facts_of(model), "template_sha256": hashed, "dtype": dtype, **more}

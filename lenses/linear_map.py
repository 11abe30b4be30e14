"""An affine map between two sites, y = x W + c for rows x, with where it came from; saved as safetensors and JSON.

A translator of a lens, a shortcut between depths and a transport operator are all one of these. It keeps the width of
the input and of the output, so a map from a head's output to the stream is no special case.

Files of `save(folder / name)`: `name.safetensors` (weight, intercept) and `name.json` (kind, strength, facts, hash of
the first). Each is replaced whole or not at all; the JSON comes last, and a pair that does not belong together is
refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from microtome.lenses.described_tensors import read_described, write_described
from microtome.lenses.short_repr import short_repr

_FORMAT = 1
_SAID = ("kind", "source", "target", "strength", "rank", "facts")


@dataclass(frozen=True, eq=False)
class LinearMap:
    """y = x W + c.

    Attributes:
        weight: W, for row vectors: input channels first.
        intercept: c.
        kind: how it was made ("ridge", "identity", "reduced rank", ...).
        source, target: names of the sites, "" where unknown.
        strength: penalty ρ in units of the mean source variance, None where there is none.
        rank: of the weight where it was limited, None otherwise.
        facts: anything else worth keeping: count of rows, model, split, tokens. JSON values.
    """

    weight: Float[Tensor, "d_in d_out"]
    intercept: Float[Tensor, " d_out"]
    kind: str = ""
    source: str = ""
    target: str = ""
    strength: float | None = None
    rank: int | None = None
    facts: Mapping[str, object] = field(default_factory=dict)

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or self.intercept.shape != self.weight.shape[1:]:
            raise ValueError(
                f"a weight {tuple(self.weight.shape)} does not go with an intercept {tuple(self.intercept.shape)}. "
                "Expected [d_in, d_out] and [d_out]."
            )

    @property
    def d_in(self) -> int:
        """Width of x."""
        return self.weight.shape[0]

    @property
    def d_out(self) -> int:
        """Width of y."""
        return self.weight.shape[1]

    @property
    def description(self) -> dict[str, object]:
        """Every field but the tensors, for JSON."""
        names = ("kind", "source", "target", "strength", "rank")
        return {name: getattr(self, name) for name in names} | {"facts": dict(self.facts)}

    def __call__(self, x: Float[Tensor, "*any width"]) -> Float[Tensor, "*any d_out"]:
        """x W + c in x's dtype and on its device.

        Raises:
            ValueError: x is of another width, or of whole numbers.
        """
        if not x.is_floating_point():
            raise ValueError(f"x is {x.dtype}, in which a weight would be cut to whole numbers. Give floating point.")
        if x.shape[-1] != self.d_in:
            raise ValueError(f"x has {x.shape[-1]} channels; the map {self.kind} reads {self.d_in} ({self.source}).")
        return x @ self.weight.to(x) + self.intercept.to(x)

    def to(self, like: Tensor | torch.dtype | torch.device) -> "LinearMap":
        """The same map in another dtype or on another device."""
        return LinearMap(
            self.weight.to(like),
            self.intercept.to(like),
            self.kind,
            self.source,
            self.target,
            self.strength,
            self.rank,
            self.facts,
        )

    def then(self, other: "LinearMap") -> "LinearMap":
        """This map followed by another: (x W + c) W' + c'.

        Raises:
            ValueError: the second does not read what the first writes.
        """
        if self.d_out != other.d_in:
            raise ValueError(f"the first map writes {self.d_out} channels, the second reads {other.d_in}.")
        weight = self.weight @ other.weight.to(self.weight)
        intercept = self.intercept @ other.weight.to(self.weight) + other.intercept.to(self.weight)
        return LinearMap(weight, intercept, f"{self.kind}, then {other.kind}", self.source, other.target)

    def save(self, path: str | Path) -> None:
        """Write `path`.safetensors and `path`.json; the folder is made.

        Raises:
            TypeError: a fact that JSON cannot hold.
        """
        tensors = {"weight": self.weight, "intercept": self.intercept}
        write_described(*_files(path), tensors, self.description, number=_FORMAT)

    @classmethod
    def load(cls, path: str | Path) -> "LinearMap":
        """Read what `save` wrote, on the CPU.

        Raises:
            FileNotFoundError: one of the two files is missing.
            ValueError: the files do not belong together, or are of another format.
        """
        tensors, said = read_described(*_files(path), number=_FORMAT, needs=_SAID)
        return cls(tensors["weight"], tensors["intercept"], **{name: said[name] for name in _SAID})


def identity_map(width: int, source: str = "", target: str = "") -> LinearMap:
    """y = x, float64."""
    eye = torch.eye(width, dtype=torch.float64)
    return LinearMap(eye, torch.zeros(width, dtype=torch.float64), "identity", source, target)


def _files(path: str | Path) -> tuple[Path, Path]:
    path = Path(path)
    return path.with_name(f"{path.name}.safetensors"), path.with_name(f"{path.name}.json")

"""A transport operator: the affine map of any rank that carries one site's value to another, and where it belongs.

    y_hat[j] = x[i] U V + c,     i = the source token of j by the operator's route (`routes`)

The weight is kept as its factors U [d_in, rank], V [rank, d_out] where the rank is limited: 2 d rank numbers and
operations, not d^2. It knows the model it was fitted on (hash of the weights), its sites and its route, and acts at no
other. Files of `save(folder / name)`: `name.safetensors` and then `name.json`, each replaced whole or not at all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.lenses.described_tensors import read_described, write_described
from microtome.lenses.linear_map import LinearMap
from microtome.lenses.made_for import require_same_weights
from microtome.lenses.short_repr import short_repr
from microtome.lenses.transport.routes import Route

_FORMAT = 1
_TEXTS = ("kind", "source", "target", "strength", "rank", "stratum")
_OF_ANY_MAP = ("kind", "source", "target", "strength", "rank", "facts")


@dataclass(frozen=True, eq=False)
class TransportOperator:
    """y_hat = x U V + c between two sites.

    Attributes:
        left: U; the whole weight where `right` is None.
        right: V.
        intercept: c.
        source, target: names of the sites, such as "resid_post.5".
        route: which token x is taken from.
        kind: how it was made ("ridge", "reduced rank, whitened", "identity", ...).
        strength: ρ of its ridge penalty, None where there is none.
        rank: where it was limited, else None.
        stratum: tokens it was fitted on: "rest", "sinks" or "all".
        facts: model and weight_sha256 where known, counts of rows, shard; JSON values.
    """

    left: Float[Tensor, "d_in inner"]
    right: Float[Tensor, "inner d_out"] | None
    intercept: Float[Tensor, " d_out"]
    source: str
    target: str
    route: Route = field(default_factory=Route)
    kind: str = ""
    strength: float | None = None
    rank: int | None = None
    stratum: str = "rest"
    facts: Mapping[str, object] = field(default_factory=dict)

    __repr__ = short_repr

    @property
    def d_in(self) -> int:
        """Width of x."""
        return self.left.shape[0]

    @property
    def d_out(self) -> int:
        """Width of y."""
        return self.intercept.shape[0]

    @property
    def weight(self) -> Float[Tensor, "d_in d_out"]:
        """U V."""
        return self.left if self.right is None else self.left @ self.right

    @property
    def map(self) -> LinearMap:
        """The same as a `LinearMap`, for scores."""
        return LinearMap(
            self.weight, self.intercept, self.kind, self.source, self.target, self.strength, self.rank, self.facts
        )

    def __call__(self, x: Shaped[Tensor, "*any width"]) -> Float[Tensor, "*any d_out"]:
        """x U V + c in x's dtype and on its device.

        Raises:
            ValueError: x is of another width.
            TypeError: x holds whole numbers, in whose dtype the weight would be cut off.
        """
        if not x.is_floating_point():
            raise TypeError(
                f"x is {x.dtype}; the operator from {self.source} reads floating-point values. Give x.float()."
            )
        if x.shape[-1] != self.d_in:
            raise ValueError(f"x has {x.shape[-1]} channels; the operator from {self.source} reads {self.d_in}.")
        inner = x @ self.left.to(x)
        return (inner if self.right is None else inner @ self.right.to(x)) + self.intercept.to(x)

    def to(self, like: torch.dtype | torch.device) -> "TransportOperator":
        """The same in another dtype or on another device."""
        right = None if self.right is None else self.right.to(like)
        return replace(self, left=self.left.to(like), right=right, intercept=self.intercept.to(like))

    def require_model(self, model: LoadedModel | nn.Module) -> None:
        """Raise ValueError if this was fitted on other weights than the model's."""
        require_same_weights(self.facts, model, f"the operator {self.source} to {self.target}")

    def require_sites(self, source: str | Site, target: str | Site) -> None:
        """Raise ValueError if these are not the sites it was fitted between."""
        if (str(Site.parse(source)), str(Site.parse(target))) != (self.source, self.target):
            raise ValueError(
                f"the operator carries {self.source} to {self.target}, not {source} to {target}. Fit one for these."
            )

    def save(self, path: str | Path) -> None:
        """Write `path`.safetensors and `path`.json; the folder is made.

        Raises:
            TypeError: a fact that JSON cannot hold.
        """
        said = {name: getattr(self, name) for name in _TEXTS} | {"route": str(self.route), "facts": dict(self.facts)}
        parts = {"left": self.left, "right": self.right, "intercept": self.intercept}
        tensors = {name: part for name, part in parts.items() if part is not None}
        write_described(*_files(path), tensors, said, number=_FORMAT)

    @classmethod
    def load(cls, path: str | Path) -> "TransportOperator":
        """Read what `save` wrote, on the CPU.

        Raises:
            FileNotFoundError: one of the two files is missing.
            ValueError: the files do not belong together, or are of another format.
        """
        file, description = _files(path)
        tensors, said = read_described(file, description, number=_FORMAT, needs=_OF_ANY_MAP)
        if not {"route", "stratum"} <= said.keys():
            raise ValueError(f"{description} is no transport operator: it says no route, or no stratum.")
        return cls(
            tensors["left"],
            tensors.get("right"),
            tensors["intercept"],
            route=Route.parse(said["route"]),
            facts=said["facts"],
            **{name: said[name] for name in _TEXTS},
        )


def operator_of(found: LinearMap, *, route: Route | str = "same", stratum: str = "rest") -> TransportOperator:
    """Any affine map between two named sites as an operator.

    Raises:
        ValueError: the map names no sites.
    """
    if not found.source or not found.target:
        raise ValueError(f"the map {found.kind!r} does not say its sites. Give LinearMap(..., source=, target=).")
    return TransportOperator(
        found.weight,
        None,
        found.intercept,
        str(Site.parse(found.source)),
        str(Site.parse(found.target)),
        Route.parse(route),
        found.kind,
        found.strength,
        found.rank,
        stratum,
        found.facts,
    )


def _files(path: str | Path) -> tuple[Path, Path]:
    path = Path(path)
    return path.with_name(f"{path.name}.safetensors"), path.with_name(f"{path.name}.json")

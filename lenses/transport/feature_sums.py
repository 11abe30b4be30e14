"""What R2 along many directions needs of one pass, by document: for operators, copies and nulls at once.

    a = (y - p).u,   a - a_hat = (y - y_hat).u,   a - (x - p).u = (y - x).u;      u of unit length, p a point near y

The errors are projected, not the values, so that large means cost no digits; one product of [row, d] x [d, direction]
each, 2 d F operations per token. Nothing of the size tokens x directions outlives a block of rows.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from microtome.lenses.transport.active_sums import ActiveSums
from microtome.lenses.transport.document_sums import DocumentSums
from microtome.lenses.transport.operator import TransportOperator
from microtome.lenses.transport.routes import Route
from microtome.lenses.transport.transport_rows import TransportRows

_CELLS = 2**22  # rows x directions at once
Place = tuple[str, Route]
Encoder = Callable[[Tensor], Tensor]


class FeatureSums:
    """An accumulator: `update` changes it.

    Attributes:
        by_document: keys ("count" | "sum" | "square", target, route), ("identity", source, target, route),
            ("operator" | "null", number): sums of a, of a^2, of squared errors.
        copies: by (source, target, route), sums of b, b^2 and a b over all rows, b = (x - p_x).u.
        squares: by (target, route), sum of y^2 by channel, which says what rounding amounts to.
        active: sums over the rows where the target's dictionary fires, by operator.
        eps: relative rounding of the values.
    """

    def __init__(
        self,
        operators: Sequence[TransportOperator],
        nulls: Sequence[TransportOperator | None],
        directions: Mapping[str, Float[Tensor, "direction width"]],
        means: Mapping[str, Float[Tensor, " width"]],
        documents: int,
        encoders: Mapping[str, Encoder] | None = None,
    ) -> None:
        """directions: unit rows by target. means: of y in the fit shard, where known."""
        self.operators, self.nulls = tuple(operators), tuple(nulls)
        self.directions, self.means = directions, means
        self.by_document = DocumentSums(documents)
        self.copies: dict[tuple[str, str, Route], Float64[Tensor, "3 direction"]] = {}
        self.squares: dict[Place, Float64[Tensor, " width"]] = {}
        self.active: dict[int, ActiveSums] = {}
        self.eps = torch.finfo(torch.float32).eps
        self.encoders = encoders or {}
        self._centres: dict[str, Tensor] = {}
        self._ready: dict[tuple[str, int], TransportOperator] = {}
        self._axes: dict[str, Tensor] = {}
        self._groups: dict[Place, list[int]] = {}
        for number, operator in enumerate(operators):
            self._groups.setdefault((operator.target, operator.route), []).append(number)

    def update(self, rows: TransportRows) -> None:
        """Count in a batch.

        Raises:
            ValueError: an operator of another width than its site has here; NaN or infinity in it or in values.
        """
        for (target, route), numbers in self._groups.items():
            to, source = rows.pairs(route)
            block = max(1, _CELLS // len(self.directions[target]))
            for start in range(0, len(to), block):
                some = slice(start, start + block)
                self._block(rows, target, route, numbers, to[some], source[some])

    def _block(
        self, rows: TransportRows, target: str, route: Route, numbers: list[int], to: Tensor, source: Tensor
    ) -> None:
        y = _taken(rows.values[target], to, target)
        document, axes, key = rows.document[to], self._axes_like(target, y), (target, route)
        centre = self._centre(target, y)
        a = (y - centre) @ axes
        self.by_document.add(("count", *key), torch.ones_like(a[:, :1]), document)
        self.by_document.add(("sum", *key), a, document)
        self.by_document.add(("square", *key), a.square(), document)
        self.squares[key] = self.squares.get(key, 0) + y.square().sum(0).to("cpu", torch.float64)
        self.eps = torch.finfo(y.dtype).eps
        encode = self.encoders.get(target)
        z = None if encode is None else encode(y)
        if z is not None and z.shape != a.shape:
            raise ValueError(
                f"encode gives {tuple(z.shape)} for {len(a)} rows of {target} and {a.shape[1]} directions; expected "
                "one activation per row and direction. Give the decoder's rows as the directions."
            )
        by_source: dict[str, list[int]] = {}
        for number in numbers:
            by_source.setdefault(self.operators[number].source, []).append(number)
        for name, those in by_source.items():
            x = _taken(rows.values[name], source, name)
            if x.shape[1] == y.shape[1]:
                self._copy((name, *key), x, a, centre, axes, document)
            for number in those:
                y_hat = self._operator("operator", number, x, y)(x)
                missed = (y - y_hat) @ axes
                self.by_document.add(("operator", number), missed.square(), document)
                if z is not None and encode is not None:
                    self.active.setdefault(number, ActiveSums()).add(a, missed, centre @ axes, z, encode(y_hat))
                if self.nulls[number] is not None:
                    missed = (y - self._operator("null", number, x, y)(x)) @ axes
                    self.by_document.add(("null", number), missed.square(), document)

    def _copy(
        self,
        key: tuple[str, str, Route],
        x: Tensor,
        a: Tensor,
        centre: Tensor,
        axes: Tensor,
        document: Tensor,
    ) -> None:
        near = self._centre(f"{key[0]} as a source", x)
        b = (x - near) @ axes
        self.by_document.add(("identity", *key), (a - b - (near - centre) @ axes).square(), document)
        parts = torch.stack([part.sum(0) for part in (b, b.square(), a * b)])
        self.copies[key] = self.copies.get(key, 0) + parts.to("cpu", torch.float64)

    def _centre(self, name: str, rows: Tensor) -> Tensor:
        if name not in self._centres:
            known = self.means.get(name)
            self._centres[name] = rows.mean(0) if known is None else known.to(rows)
        return self._centres[name]

    def _axes_like(self, target: str, rows: Tensor) -> Tensor:
        if target not in self._axes:
            self._axes[target] = self.directions[target].to(rows).T.contiguous()
            if len(self._axes[target]) != rows.shape[1]:
                raise ValueError(
                    f"directions for {target} have {len(self._axes[target])} channels, not {rows.shape[1]}."
                )
        return self._axes[target]

    def _operator(self, kind: str, number: int, x: Tensor, y: Tensor) -> TransportOperator:
        if (kind, number) not in self._ready:
            found = self.operators[number] if kind == "operator" else self.nulls[number]
            assert found is not None
            if (found.d_in, found.d_out) != (x.shape[1], y.shape[1]):
                raise ValueError(
                    f"the {kind} {found.source} to {found.target} is {found.d_in} to {found.d_out} channels wide; in "
                    f"this model these sites are {x.shape[1]} and {y.shape[1]}. Fit it on this model."
                )
            ready = found.to(x.device).to(x.dtype)
            parts = [part for part in (ready.left, ready.right, ready.intercept) if part is not None]
            if not all(bool(torch.isfinite(part).all()) for part in parts):
                raise ValueError(f"the {kind} {found.source} to {found.target} holds NaN or infinity. Fit it anew.")
            self._ready[kind, number] = ready
        return self._ready[kind, number]


def _taken(values: Tensor, rows: Tensor, name: str) -> Tensor:
    """In float32, or float64 where the model computes so."""
    found = values[rows.to(values.device)]
    if not bool(torch.isfinite(found).all()):
        raise ValueError(f"{name} holds NaN or infinity in these texts. Load the model in float32, or leave them out.")
    return found if found.dtype == torch.float64 else found.float()

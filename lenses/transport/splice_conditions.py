"""What is written where an operator could be: the operator, and the controls that say how much its effect means.

    operator    x U V + c                    shuffled    an operator fitted on targets of other documents
    identity    x, the source as it is       mean        mean of the target over the fit shard
    zero        0                            intercept   c, the operator of x = 0: the published "null"

x is the source of the same forward, by the operator's route. The identity tells what the operator adds to what the
stream carries by itself; the last four are nulls, from which `recovered` is reckoned. Further operators by name (other
ranks) are written as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from microtome.lenses.pair_splits import SHARDS, MomentSource
from microtome.lenses.short_repr import short_repr
from microtome.lenses.transport.fit import transport_operator
from microtome.lenses.transport.operator import TransportOperator
from microtome.lenses.transport.splice import Transport

CONDITIONS = ("operator", "identity", "shuffled", "mean", "intercept", "zero")
NULLS = ("mean", "zero", "intercept", "shuffled")
CLEAN = "clean"


@dataclass(frozen=True, eq=False)
class Splice:
    """An operator with what it is compared to.

    Attributes:
        operator: under test.
        shuffled: fitted on shuffled pairing, of the same sites and route; None leaves this condition out.
        mean: of the target; None leaves it out.
        others: further operators of the same sites and route, by name.
    """

    operator: TransportOperator
    shuffled: TransportOperator | None = None
    mean: Float[Tensor, " d_out"] | None = None
    others: Mapping[str, TransportOperator] = field(default_factory=dict)

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if taken := [name for name in self.others if name in (*CONDITIONS, CLEAN)]:
            raise ValueError(f"an operator cannot be called {taken[0]!r}, which is a condition. Give another name.")
        controls = {"the shuffled operator": self.shuffled} | {f"operator {n!r}": o for n, o in self.others.items()}
        for name, other in controls.items():
            if other is None:
                continue
            if (other.source, other.target, str(other.route)) != self.key:
                raise ValueError(
                    f"{name} carries {other.source} to {other.target} (route {other.route}), the one under test "
                    f"{self.key[0]} to {self.key[1]} (route {self.key[2]}). Compare operators of one pair."
                )
            if (other.d_in, other.d_out) != (self.operator.d_in, self.operator.d_out):
                raise ValueError(
                    f"{name} is {other.d_in} x {other.d_out}, the one under test {self.operator.d_in} x "
                    f"{self.operator.d_out}."
                )
        if self.mean is not None and self.mean.shape != (self.operator.d_out,):
            raise ValueError(
                f"the mean has {self.mean.numel()} channels, {self.operator.target} {self.operator.d_out}: give the "
                "mean of the target."
            )

    @property
    def key(self) -> tuple[str, str, str]:
        """Source, target, route."""
        return self.operator.source, self.operator.target, str(self.operator.route)

    @property
    def conditions(self) -> tuple[str, ...]:
        """What can be written, in order."""
        lacking = {
            "identity": self.operator.d_in != self.operator.d_out,
            "shuffled": self.shuffled is None,
            "mean": self.mean is None,
        }
        return ("operator", *self.others, *(name for name in CONDITIONS[1:] if not lacking.get(name, False)))

    def writer(self, condition: str) -> Transport:
        """The function from x to what is written.

        Raises:
            ValueError: a condition that is not there, with the reason.
        """
        if condition not in self.conditions:
            raise ValueError(f"condition {condition!r} of {self.key[0]} to {self.key[1]}: {self._why_not(condition)}")
        if condition == "identity":
            return lambda x: x
        if condition == "zero":
            return lambda x: x.new_zeros(len(x), self.operator.d_out)
        if condition in ("mean", "intercept"):
            row = self.mean if condition == "mean" else self.operator.intercept
            assert row is not None
            return lambda x: row.to(x).expand(len(x), -1)
        named = {"operator": self.operator, "shuffled": self.shuffled, **self.others}[condition]
        assert named is not None
        return named

    def to(self, like: torch.dtype | torch.device) -> "Splice":
        """The same in another dtype or on another device."""
        return replace(
            self,
            operator=self.operator.to(like),
            shuffled=None if self.shuffled is None else self.shuffled.to(like),
            mean=None if self.mean is None else self.mean.to(like),
            others={name: other.to(like) for name, other in self.others.items()},
        )

    def _why_not(self, condition: str) -> str:
        if condition == "identity":
            return (
                f"a source of {self.operator.d_in} channels cannot be copied to a target of {self.operator.d_out}. "
                "Leave it out."
            )
        if condition in ("shuffled", "mean"):
            return f"give Splice(operator, {condition}=...)."
        return f"there is none of this name. There are {', '.join(self.conditions)}."


def splice_from_moments(
    moments: MomentSource,
    source: Any,
    target: Any,
    *,
    rank: int | None = None,
    ranks: Sequence[int] = (),
    stratum: str = "rest",
    shards: Sequence[Any] = SHARDS,
) -> Splice:
    """The operator of a pair (`transport_operator`, raw metric), with mean, shuffled operator (of moments made with
    `shuffled=True`) and operators of other ranks ("rank 8", ...), all fitted on the same tokens; route "same".

    Args:
        moments: `lenses.moments.Moments`.
        rank: of the operator; full if None.
        ranks: of `others`. A map of limited rank minimises the squared error here, which is what a splice meets; the
            whitened one would spend rank on channels of little variance.
        stratum: tokens it is fitted on. shards: as of `transport_operator`.

    Raises:
        ValueError: fewer than two rows, a rank above the channels.
    """
    options = {"metric": "raw", "stratum": stratum, "shards": shards}
    found = transport_operator(moments, source, target, rank=rank, **options)
    shuffled = None
    if getattr(moments, "is_shuffled", False):
        shuffled = transport_operator(moments, source, target, rank=rank, shuffled=True, **options)
    mean = moments.pair(source, target, shard=shards[0], stratum=stratum).mean_y
    others = {f"rank {k}": transport_operator(moments, source, target, rank=k, **options) for k in ranks}
    return Splice(found, shuffled, mean, others)

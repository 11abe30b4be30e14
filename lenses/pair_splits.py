"""The moments of one pair of sites in the three shards: fit, validation and test, separate by document.

A map is fitted on the first, its strength chosen on the second, and every number that is reported comes from the third.
The last two are centred at the means of the first, so that the error of an intercept counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from microtome.lenses.pair_moments import NoRows, PairMoments

SHARDS = ("fit", "validation", "test")


@runtime_checkable
class MomentSource(Protocol):
    """What gives the moments of pairs of sites: `lenses.moments.Moments`, or anything with these two names."""

    @property
    def sites(self) -> Sequence[Any]:
        """Sites there are, as `Site`s or strings."""
        ...

    def pair(self, source: Any, target: Any, shard: Any = "fit", stratum: Any = "rest") -> PairMoments:
        """Moments of two of them in a shard ("fit", "validation", "test") and a stratum ("rest", "sinks", "all")."""
        ...


@dataclass(frozen=True, eq=False)
class PairSplits:
    """One pair of sites, each shard about its own means.

    Attributes:
        fit: what maps are fitted on.
        validation: what their strength is chosen on; None to choose it by generalised cross-validation.
        test: what scores are computed on.
    """

    fit: PairMoments
    validation: PairMoments | None
    test: PairMoments

    def __post_init__(self) -> None:
        for name, part in (("validation", self.validation), ("test", self.test)):
            if part is not None and part.xy.shape != self.fit.xy.shape:
                raise ValueError(
                    f"fit has {tuple(self.fit.xy.shape)} channels and {name} {tuple(part.xy.shape)}. All shards must "
                    "be of the same pair of sites."
                )

    def reversed(self) -> "PairSplits":
        """Source and target exchanged."""
        return self._each("reversed")

    def increment(self) -> "PairSplits":
        """The target replaced by what was added to the source."""
        return self._each("increment")

    def joined(self) -> "PairSplits":
        """Fit and validation together as the fit shard, for a map whose strength is chosen."""
        return self if self.validation is None else PairSplits(self.fit + self.validation, None, self.test)

    def _each(self, method: str) -> "PairSplits":
        parts = (self.fit, self.validation, self.test)
        return PairSplits(*(None if part is None else getattr(part, method)() for part in parts))

    @classmethod
    def from_rows(
        cls,
        x: Float[Tensor, "token d_in"],
        y: Float[Tensor, "same_token d_out"],
        shares: tuple[int | float, int | float, int | float] = (0.6, 0.2, 0.2),
    ) -> "PairSplits":
        """Of rows in memory: the first share is fit, then validation, then test. Sort the rows by document first.

        Raises:
            ValueError: shares that are negative or all 0, and what `PairMoments.from_rows` raises.
        """
        if min(shares) < 0 or not sum(shares):
            raise ValueError(f"shares={shares}; give three numbers of 0 or more, such as (0.6, 0.2, 0.2).")
        ends = [round(len(x) * sum(shares[: i + 1]) / sum(shares)) for i in range(3)]
        parts = [
            PairMoments.from_rows(x[begin:end], y[begin:end]) for begin, end in zip([0, *ends[:2]], ends, strict=True)
        ]
        return cls(parts[0], parts[1] if shares[1] else None, parts[2])


def pair_splits(
    moments: MomentSource,
    source: Any,
    target: Any,
    stratum: str = "rest",
    *,
    shards: Sequence[Any] = SHARDS,
    shuffled: bool = False,
) -> PairSplits:
    """The three shards of a pair; a validation shard without rows becomes None.

    Args:
        stratum: which tokens: "rest" (neither sinks nor BOS), "sinks" or "all".
        shards: names of fit, validation (or None) and test; with folds, several names in place of one:
            `(moments.training("fold0"), None, "fold0")`.
        shuffled: y of another document at the same position, the control that has to explain nothing.

    Raises:
        ValueError: the fit or the test shard has fewer than two rows in this stratum, or no three shards.
        KeyError: whatever the moments raise for a site they do not hold.
    """
    if len(shards) != 3:
        raise ValueError(f"shards={shards}; give the names of fit, validation and test.")
    options = {"stratum": stratum} | ({"shuffled": True} if shuffled else {})
    fit, test = (moments.pair(source, target, shard=shards[i], **options) for i in (0, 2))
    try:
        validation = None if shards[1] is None else moments.pair(source, target, shard=shards[1], **options)
    except NoRows:
        validation = None
    for name, part in (("fit", fit), ("test", test)):
        if part.count < 2:
            raise ValueError(
                f"{source} -> {target}: the {name} shard has {part.count} rows of stratum {stratum!r}. Give more "
                "documents, or another stratum."
            )
    return PairSplits(fit, validation if validation is not None and validation.count else None, test)


def pairs_held(moments: MomentSource, pairs: Sequence[tuple[Any, Any]] | None = None) -> list[tuple[Any, Any]]:
    """The pairs whose moments are there, of those given or of every ordered pair of sites, sites with themselves
    included. Banded moments hold fewer, and say which (`Moments.held_pairs`)."""
    wanted = [(a, b) for a in moments.sites for b in moments.sites] if pairs is None else list(pairs)
    if not hasattr(moments, "held_pairs"):
        return wanted
    held = {(str(a), str(b)) for a, b in moments.held_pairs()}
    return [(a, b) for a, b in wanted if (str(a), str(b)) in held]

"""Counts, means and cross-products of pairs of rows (x, y): all that a linear map between two sites needs.

    mx = mean of x,   xx = sum of (x - mx)^T (x - mx),   xy = sum of (x - mx)^T (y - my),   yy likewise;     x, y rows

Everything is float64 and about the means of the same rows, so that a channel of mean 500 and deviation 1 loses nothing
(uncentred float32 sums lose it all). Moments of two sets add, and take away, with the exact correction for the
distance of their means (Chan, Golub, LeVeque 1983):

    A + B:   xy = xy_A + xy_B + n_A n_B / (n_A + n_B) (mx_A - mx_B)^T (my_A - my_B)

Sums of float32 products (`lenses.moments`) carry rounding of some 1e-7 of sqrt(S_ii S_jj): a direction in which the
rows do not vary at all has a variance of that size there. `noise_x` and `noise_y` say how much, and `is_measured`
which directions of a decomposition stand above it.

Beware: moments about other means (`about`) measure errors of a map fitted elsewhere, intercept error included. They are
no moments of their own mean any more, so they do not add.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from microtome.lenses.short_repr import short_repr


class NoRows(ValueError):
    """A shard has no rows of a stratum, which a caller may be able to do without."""


@dataclass(frozen=True, eq=False)
class PairMoments:
    """Of the rows (x_t, y_t) of one set, float64.

    Attributes:
        count: number of rows.
        mean_x, mean_y: what the sums are about; the rows' own means unless `about` moved them.
        xx, xy, yy: sums of products of the centred rows (sums, not averages).
        is_recentred: the sums are about other points than the rows' means.
        noise_x, noise_y: of each channel, the sum of squares that rounding of the products may amount to; None for
            products in float64.
    """

    count: int
    mean_x: Float64[Tensor, " d_in"]
    mean_y: Float64[Tensor, " d_out"]
    xx: Float64[Tensor, "d_in d_in"]
    xy: Float64[Tensor, "d_in d_out"]
    yy: Float64[Tensor, "d_out d_out"]
    is_recentred: bool = False
    noise_x: Float64[Tensor, " d_in"] | None = None
    noise_y: Float64[Tensor, " d_out"] | None = None

    __repr__ = short_repr

    @property
    def d_in(self) -> int:
        """Width of x."""
        return self.xy.shape[0]

    @property
    def d_out(self) -> int:
        """Width of y."""
        return self.xy.shape[1]

    @classmethod
    def from_rows(cls, x: Float[Tensor, "token d_in"], y: Float[Tensor, "same_token d_out"]) -> "PairMoments":
        """Moments of rows in memory; no rows give count 0 and zeros.

        Raises:
            ValueError: x and y have other numbers of rows, or hold NaN or infinity.
        """
        if len(x) != len(y):
            raise ValueError(f"x has {len(x)} rows and y {len(y)}. Row t of both must be the same token.")
        for name, rows in (("x", x), ("y", y)):
            if not bool(torch.isfinite(rows).all()):
                raise ValueError(f"{name} holds NaN or infinity. Drop those rows, or look for the site that made them.")
        x, y = x.double(), y.double()
        count = len(x)
        mean_x, mean_y = x.sum(0) / max(count, 1), y.sum(0) / max(count, 1)
        x, y = x - mean_x, y - mean_y
        return cls(count, mean_x, mean_y, x.T @ x, x.T @ y, y.T @ y)

    def about(self, mean_x: Float64[Tensor, " width_x"], mean_y: Float64[Tensor, " width_y"]) -> "PairMoments":
        """The same rows, sums about other points: sum (x - mean_x)^T (y - mean_y).

        Raises:
            ValueError: means of other widths, or moments that are about other means already.
        """
        shift_x, shift_y = self._own(mean_x, mean_y)
        return PairMoments(
            self.count,
            mean_x,
            mean_y,
            self.xx + self.count * torch.outer(shift_x, shift_x),
            self.xy + self.count * torch.outer(shift_x, shift_y),
            self.yy + self.count * torch.outer(shift_y, shift_y),
            is_recentred=True,
            noise_x=self.noise_x,
            noise_y=self.noise_y,
        )

    def __add__(self, other: "PairMoments") -> "PairMoments":
        """Of both sets of rows together."""
        self._check(other, "add")
        count = self.count + other.count
        if not count:
            return self
        share = other.count / count
        return self._joined(
            other, count, self.mean_x.lerp(other.mean_x, share), self.mean_y.lerp(other.mean_y, share), 1
        )

    def __sub__(self, other: "PairMoments") -> "PairMoments":
        """Of the rows of this set that are not in `other`, which is a part of it (a fold).

        Raises:
            ValueError: `other` has more rows than this set.
        """
        self._check(other, "take away")
        count = self.count - other.count
        if count < 0:
            raise ValueError(f"{other.count} rows cannot be taken from {self.count}. The part goes on the right.")
        if not count:
            zero = [torch.zeros_like(each) for each in (self.mean_x, self.mean_y, self.xx, self.xy, self.yy)]
            return PairMoments(0, *zero)
        share = -other.count / count
        rest = replace(
            self,
            count=count,
            mean_x=self.mean_x.lerp(other.mean_x, share),
            mean_y=self.mean_y.lerp(other.mean_y, share),
        )
        return rest._joined(other, self.count, rest.mean_x, rest.mean_y, -1)

    def reversed(self) -> "PairMoments":
        """x and y exchanged."""
        return PairMoments(
            self.count,
            self.mean_y,
            self.mean_x,
            self.yy,
            self.xy.T.contiguous(),
            self.xx,
            self.is_recentred,
            self.noise_y,
            self.noise_x,
        )

    def increment(self) -> "PairMoments":
        """Of (x, y - x): what is added between two depths of one stream.

        Raises:
            ValueError: x and y are of different width.
        """
        if self.d_in != self.d_out:
            raise ValueError(f"x has {self.d_in} channels and y {self.d_out}; y - x needs one stream at both ends.")
        return PairMoments(
            self.count,
            self.mean_x,
            self.mean_y - self.mean_x,
            self.xx,
            self.xy - self.xx,
            self.yy - self.xy - self.xy.T + self.xx,
            self.is_recentred,
            self.noise_x,
            _noise_of_difference(self.noise_x, self.noise_y),
        )

    def _own(self, mean_x: Tensor, mean_y: Tensor) -> tuple[Tensor, Tensor]:
        if self.is_recentred:
            raise ValueError("these moments are about other means already. Recentre the moments they came from.")
        if mean_x.shape != self.mean_x.shape or mean_y.shape != self.mean_y.shape:
            raise ValueError(
                f"means of width {len(mean_x)} and {len(mean_y)} for moments of {self.d_in} and {self.d_out} channels."
            )
        return self.mean_x - mean_x, self.mean_y - mean_y

    def _check(self, other: "PairMoments", verb: str) -> None:
        if self.is_recentred or other.is_recentred:
            raise ValueError(f"cannot {verb} moments about other means than their own. Do it before `about`.")
        if self.xy.shape != other.xy.shape:
            raise ValueError(f"cannot {verb} moments {tuple(other.xy.shape)} and {tuple(self.xy.shape)}: other sites.")

    def _joined(self, other: "PairMoments", joint: int, mean_x: Tensor, mean_y: Tensor, sign: int) -> "PairMoments":
        """Sums plus or less those of `other`; joint: rows of the larger set, the union."""
        smaller = self.count * other.count / joint
        dx, dy = self.mean_x - other.mean_x, self.mean_y - other.mean_y
        count = self.count + other.count if sign > 0 else self.count
        return PairMoments(
            count,
            mean_x,
            mean_y,
            self.xx + sign * (other.xx + smaller * torch.outer(dx, dx)),
            self.xy + sign * (other.xy + smaller * torch.outer(dx, dy)),
            self.yy + sign * (other.yy + smaller * torch.outer(dy, dy)),
            noise_x=_sum(self.noise_x, other.noise_x),
            noise_y=_sum(self.noise_y, other.noise_y),
        )


def is_measured(
    variances: Float64[Tensor, " direction"],
    axes: Float64[Tensor, "width direction"],
    noise: Float64[Tensor, " width"] | None,
    floor: int | float | Float64[Tensor, ""],
) -> Bool[Tensor, " direction"]:
    """Which eigenvectors of a matrix of sums of squares have more than rounding: above `floor` (a sum of squares), and
    above the noise of the channels that they mix, sum_i v_i^2 noise_i."""
    is_kept = variances > floor
    return is_kept if noise is None else is_kept & (variances > axes.square().T @ noise.to(axes))


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other


def _noise_of_difference(noise_x: Tensor | None, noise_y: Tensor | None) -> Tensor | None:
    """Of y - x: the four sums that make it up, errors added."""
    if noise_x is None or noise_y is None:
        return _sum(noise_x, noise_y)
    return (noise_x.sqrt() + noise_y.sqrt()).square()

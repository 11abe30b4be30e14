"""What an erasure is: x' = x - A B (x - m) at one site or at many, applied to rows or as an edit of a running model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from microtome.capture.sites import Site


@dataclass(frozen=True, eq=False)
class Erasure:
    """x -> -A B (x - m) at one site: called with a site's value it returns the delta, so it is an edit of `taps`.

    Attributes:
        mean: m, in the units of the features.
        left: A; columns of zeros where the rank is smaller.
        right: B.
    """

    mean: Float64[Tensor, " feature"]
    left: Float64[Tensor, "feature rank"]
    right: Float64[Tensor, "rank feature"]

    def __repr__(self) -> str:
        return f"Erasure({len(self.mean)} features, rank {self.rank})"

    @property
    def rank(self) -> int:
        """Dimensions that are taken out."""
        return int((self.left != 0).any(0).sum())

    @property
    def matrix(self) -> Float64[Tensor, "feature feature"]:
        """I - A B."""
        return torch.eye(len(self.mean), dtype=torch.float64) - self.left @ self.right

    def __call__(self, value: Tensor) -> Tensor:
        """The delta for activations `[..., feature]`, in their dtype and on their device.

        Raises ValueError for another width, and for the value of all heads at once (name the head in the edit).
        """
        if value.shape[-1] != len(self.mean):
            raise ValueError(
                f"This eraser was fitted on {len(self.mean)} features; the edited value has {value.shape[-1]} "
                f"(shape {tuple(value.shape)}). Edit the site that it was fitted on."
            )
        if value.ndim == 4:
            raise ValueError(
                f"The edited value has all heads (shape {tuple(value.shape)}), and this eraser was fitted on one. "
                "Name the head: edits={'z.5.3': eraser.edit()}."
            )
        exact = torch.float64 if value.dtype == torch.float64 else torch.float32
        mean, left, right = (part.to(value.device, exact) for part in (self.mean, self.left, self.right))
        return -((value.to(exact) - mean) @ right.mT @ left.mT).to(value.dtype)


@dataclass(frozen=True, eq=False)
class Erasures:
    """One erasure per site, as one batch."""

    mean: Float64[Tensor, "site feature"]
    left: Float64[Tensor, "site feature rank"]
    right: Float64[Tensor, "site rank feature"]

    def __repr__(self) -> str:
        ranks = (self.left != 0).any(dim=1).sum(dim=1)
        low, high = (int(ranks.min()), int(ranks.max())) if len(self) else (0, 0)
        rank = f"rank {low}" if low == high else f"ranks {low} to {high}"
        return f"Erasures({len(self)} sites, {self.mean.shape[1]} features, {rank})"

    def __len__(self) -> int:
        return len(self.mean)

    def __getitem__(self, site: int) -> Erasure:
        return Erasure(self.mean[site], self.left[site], self.right[site])

    def apply(self, features: Float[Tensor, "site example feature"]) -> Float[Tensor, "site example feature"]:
        """Erased rows, in the dtype of the features."""
        centred = features.double() - self.mean[:, None]
        return (features - centred @ self.right.mT @ self.left.mT).to(features.dtype)

    def edits(self, sites: Sequence[Site | str]) -> dict[Site, Erasure]:
        """By site, for `taps(model, edits=...)`. Raises ValueError unless there is a name for every site."""
        if len(sites) != len(self):
            raise ValueError(f"{len(sites)} names for {len(self)} sites; give one for each, in order.")
        return {Site.parse(site): self[number] for number, site in enumerate(sites)}

"""A low-rank weight update read as a probe and a push: W + s B A is a classifier A of the input and a writer B.

    output += s sum_j b_j (a_j . input)

For rank one, a is a direction that is read (its score is a probe of the module's input, with an AUROC of its own) and b
one that is written: a steering vector whose strength the input decides. For a higher rank, s B A = U S V' is taken
apart by singular values.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from microtome.capture.live_taps import EditContext
from microtome.capture.sites import Site
from microtome.interventions.operations import Add, Function
from microtome.interventions.steering import Intervention, Steering
from microtome.lenses.short_repr import short_repr


@dataclass(frozen=True, eq=False)
class LoraSplit:
    """Directions of one update.

    Attributes:
        read: unit vectors in the module's input, largest singular value first.
        write: what is added to its output per unit read; |write| is the singular value.
    """

    read: Float[Tensor, "rank d_in"]
    write: Float[Tensor, "rank d_out"]

    __repr__ = short_repr

    @classmethod
    def of(cls, down: Tensor, up: Tensor, scaling: float = 1.0) -> "LoraSplit":
        """From the two matrices of a LoRA update: A [rank, d_in], B [d_out, rank]; delta W = scaling B A.

        Raises ValueError for ranks that differ, or an update that is zero.
        """
        if down.shape[0] != up.shape[1]:
            raise ValueError(f"A has rank {down.shape[0]}, B {up.shape[1]}: they are of two updates.")
        u, s, v = torch.linalg.svd(scaling * up.detach().double() @ down.detach().double(), full_matrices=False)
        rank = min(down.shape[0], int((s > 1e-9 * s[0].clamp_min(1e-300)).sum()))
        if float(s[0]) == 0:
            raise ValueError("The update is zero (B starts at zero): train it first.")
        sign = torch.sign((u[:, :rank] * u[:, :rank].abs().amax(0).eq(u[:, :rank].abs())).sum(0))
        sign = torch.where(sign == 0, 1.0, sign)
        return cls((v[:rank] * sign[:, None]).float(), (u[:, :rank] * sign * s[:rank]).T.float())

    def scores(self, x: Float[Tensor, "*row d_in"], direction: int = 0) -> Float[Tensor, "*row"]:
        """The classifier: read . x."""
        return x.float() @ self.read[direction]

    def auroc(self, x: Float[Tensor, "row d_in"], labels: np.ndarray, direction: int = 0) -> float:
        """How well the classifier tells two classes of rows apart."""
        from sklearn.metrics import roc_auc_score

        return float(roc_auc_score(np.asarray(labels, dtype=bool), self.scores(x, direction).numpy()))

    def edit(self, read_site: str, write_site: str) -> Steering:
        """The update as an edit: read at the module's input (mlp_act, z), write at its output (mlp_out, attn_out).

        At strength 1 the model is the one with the update merged, where nothing stands between the module's output and
        the site that is written.
        """
        held = _Carried(self.read, self.write)
        return Steering(
            [
                Intervention(Site.parse(read_site), Function(held.note), "all", name="read"),
                Intervention(Site.parse(write_site), Function(held.write_out), "all", name="write"),
            ]
        )

    def vector(self, score: float = 1.0, direction: int = 0) -> Add:
        """The writer alone, as what one adds where the classifier would have scored `score`."""
        return Add(score * self.write[direction])


class _Carried:
    """Takes what is read from one site of a forward to another."""

    def __init__(self, read: Tensor, write: Tensor):
        self.read, self.write = read, write

    def note(self, x: Tensor, at: EditContext) -> Tensor:
        assert at.call is not None
        at.call.scratch[self] = x.flatten(2) @ self.read.to(x).T
        return torch.zeros_like(x)

    def write_out(self, x: Tensor, at: EditContext) -> Tensor:
        assert at.call is not None
        if self not in at.call.scratch:
            raise ValueError(f"{at.site} is written before the input of the update was read: give the sites in order.")
        return at.call.scratch[self].to(x) @ self.write.to(x)

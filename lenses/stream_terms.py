"""What adds to the last residual stream, seen from its end: each contribution and the direction that reads it there.

Going back from the end of the last block, x -> f x turns a direction w into f w, x -> x + f c adds the term c . (f w),
x -> x + v the constant v . w. Behind a contribution is the last linear map of its branch, from heads' z or an MLP's
neurons, and for some families a norm (Gemma 2): with its scale kept, that too is a step back of w
(`microtome.lenses.frozen_norm`), so that with w' = W w

    attention . w = sum_h z_h . w'_h + constants,     mlp . w = sum_i c_i w'_i + constants

and no write of a head or neuron is ever made.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from microtome.capture.anatomy import TERM_OF_ROLE, Anatomy, Block, coefficient
from microtome.capture.layouts import affine_weight
from microtome.capture.sites import Site
from microtome.lenses.frozen_norm import FrozenNorm, frozen_norm


@dataclass(frozen=True, eq=False)
class LastMap:
    """The last linear map of a branch and the norm behind it.

    Attributes:
        weight: `[d_in, d_model]`, in the model's dtype, possibly its own storage: read it, never write it.
        bias: `[d_model]`, zeros where there is none.
        post_norm: None where the map's output is the contribution.
        path: of the map's module.
    """

    weight: Tensor
    bias: Float64[Tensor, " d_model"]
    post_norm: FrozenNorm | None
    path: str

    def written(self, inputs: Float64[Tensor, "row d_in"]) -> Float64[Tensor, "row d_model"]:
        """The map's output, before the norm."""
        return inputs @ double(self.weight) + self.bias

    def back(
        self, direction: Float64[Tensor, "row d_model"], inputs: Float64[Tensor, "row d_in"]
    ) -> tuple[Float64[Tensor, "row d_in"], Float64[Tensor, " row"], Float64[Tensor, " row"]]:
        """The direction before the map; what the map's bias and the norm's shift give along it."""
        shift = torch.zeros(len(direction), dtype=torch.float64)
        if self.post_norm is not None:
            shift = direction @ self.post_norm.shift
            direction = self.post_norm.back(direction, self.post_norm.scale(self.written(inputs)))
        return direction @ double(self.weight).T, direction @ self.bias, shift

    def folded(self, writes: Float[Tensor, "*any d_model"]) -> Float[Tensor, "*any d_model"]:
        """Writes as they enter the stream, up to a positive factor; in their dtype."""
        return writes if self.post_norm is None else self.post_norm.folded(writes)


@dataclass(frozen=True, eq=False)
class StreamTerm:
    """A contribution to the stream."""

    site: Site
    role: str
    block: Block
    projection: str | None
    point: str


@dataclass(frozen=True, eq=False)
class BackStep:
    """One step from the end of the stream towards its start: a term, or a factor or constant of the trunk."""

    factor: float | Tensor
    term: StreamTerm | None = None
    is_shift: bool = False
    layer: int | None = None


def back_steps(module: nn.Module, anatomy: Anatomy) -> list[BackStep]:
    """All steps of the main stack, last first.

    Raises:
        ValueError: a block whose trunk could not be followed, a norm on the trunk, or two terms of one role in a block.
    """
    steps: list[BackStep] = []
    for block in reversed(anatomy.main):
        if not block.hops:
            raise ValueError(f"The stream could not be followed through {block.path}, so a logit cannot be split.")
        for hop in reversed(block.hops):
            if hop.step == "norm":
                raise ValueError(
                    f"The norm {hop.module!r} is on the trunk: the stream of this {anatomy.model_class} is no sum of "
                    "contributions, so a logit has no direct parts. This holds for models that norm after adding "
                    "(BERT, the first OPT-350m); take a pre-norm model."
                )
            factor = coefficient(module, hop.factor, hop.vectors)
            factor = double(factor) if isinstance(factor, Tensor) else factor
            if hop.step != "add":
                steps.append(BackStep(factor, is_shift=hop.step == "shift", layer=block.layer))
                continue
            contribution = block.contributions[hop.contribution]
            projection = None if contribution.projection is None else contribution.projection.module
            term = StreamTerm(
                block.site(TERM_OF_ROLE[contribution.role]),
                contribution.role,
                block,
                projection,
                contribution.point.module,
            )
            steps.append(BackStep(factor, term, layer=block.layer))
    sites = [step.term.site for step in steps if step.term]
    if len(set(sites)) < len(sites):
        raise ValueError("A block adds two contributions of one role, which have no site each: it cannot be split.")
    return steps


@torch.no_grad()
def last_map(module: nn.Module, path: str, contribution: str, width: int) -> LastMap:
    """The linear map at `path` and what is between its output and the contribution's module output.

    A norm is looked for where the contribution is another module's output than one around the map.
    """
    projection = module.get_submodule(path)
    parameter = next(projection.parameters())
    dtype = parameter.dtype if parameter.is_floating_point() else torch.float32
    d_in = next(
        (n for name in ("in_features",) if (n := getattr(projection, name, None))), parameter.shape[0]
    )  # transformers' Conv1D has its input first
    empty = torch.zeros(1, 1, d_in, dtype=dtype, device=parameter.device)
    post_norm = None
    if not f"{path}.".startswith(f"{contribution}."):
        after = module.get_submodule(contribution)
        if not isinstance(after, nn.Dropout | nn.Identity):
            post_norm = frozen_norm(after, width)
    return LastMap(affine_weight(projection, empty).detach(), double(projection.forward(empty))[0, 0], post_norm, path)


def double(value: Tensor) -> Tensor:
    """In float64 on the CPU, without a graph."""
    return value.detach().double().cpu()

"""A norm as a linear map once its scale is kept at its real value: what makes a logit a sum over parts of the stream.

    n(x) = g (x - mean(x)) / s + b,     s = sqrt(mean((x - mean(x))^2) + eps)          LayerNorm
    n(x) = g x / s + b,                 s = sqrt(mean(x^2) + eps)                      RMSNorm (b is zero)

With s = s(x) of the whole, parts that sum to x give g part / s (centred first for LayerNorm), and these sum to
n(x) - b exactly. Which of the two a module is, with its g, b and eps, is read off what it does and then checked on
vectors that were not used for it: a class that stores g - 1 (Gemma) needs no case of its own.

Beware: the scale is itself a function of all parts. Keeping it answers "how is this logit made up", not "what would the
logit be without this part".
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from microtome.lenses.short_repr import short_repr

LIMIT = 1e-4
HALF_LIMIT = 2e-2


@dataclass(frozen=True, eq=False)
class FrozenNorm:
    """What a norm module does, float64 on the CPU.

    Attributes:
        gain: g, b is `shift`.
        shift: what the module adds after the gain; zeros where it adds nothing.
        eps: what it adds under the root.
        is_centred: whether the mean over coordinates is taken away first (LayerNorm).
        error: largest difference between formula and module over the largest value, on fresh random vectors.
    """

    gain: Float64[Tensor, " d_model"]
    shift: Float64[Tensor, " d_model"]
    eps: float
    is_centred: bool
    error: float = 0.0

    __repr__ = short_repr

    def centred(self, x: Float[Tensor, "*any d_model"]) -> Float64[Tensor, "*any d_model"]:
        """x without its mean over coordinates for LayerNorm, x itself for RMSNorm."""
        x = _double(x)
        return x - x.mean(-1, keepdim=True) if self.is_centred else x

    def scale(self, x: Float[Tensor, "*any d_model"]) -> Float64[Tensor, " *any"]:
        """s(x), the number by which the module divides."""
        return (self.centred(x).square().mean(-1) + self.eps).sqrt()

    def of_parts(
        self, parts: Float[Tensor, "*any d_model"], scale: Float64[Tensor, "..."]
    ) -> Float64[Tensor, "*any d_model"]:
        """g part / s; over parts that sum to x, with s = scale(x), these sum to n(x) - b. scale broadcasts."""
        return self.centred(parts) * self.gain / scale[..., None]

    def back(
        self, direction: Float[Tensor, "*any d_model"], scale: Float64[Tensor, "..."]
    ) -> Float64[Tensor, "*any d_model"]:
        """The w with `part . w = of_parts(part) . direction` for every part: the direction seen before the norm."""
        return self.centred(_double(direction) * self.gain) / scale[..., None]

    def folded(self, direction: Float[Tensor, "*any d_model"]) -> Float[Tensor, "*any d_model"]:
        """g times the centred vector, without dividing: what a write says in words, up to a positive factor.

        In the input's dtype and on its device (a half is computed in float32), so that many rows cost little.
        """
        wide = torch.promote_types(direction.dtype, torch.float32)
        x = direction.to(wide)
        x = x - x.mean(-1, keepdim=True) if self.is_centred else x
        return (x * self.gain.to(x)).to(direction.dtype)

    def __call__(self, x: Float[Tensor, "*any d_model"]) -> Float64[Tensor, "*any d_model"]:
        """n(x) by the formula."""
        return self.of_parts(x, self.scale(x)) + self.shift


@torch.no_grad()
def frozen_norm(module: nn.Module | None, width: int) -> FrozenNorm:
    """Read a norm off its module, and check it there; None, no norm, folds to the identity and has no scale.

    Raises:
        ValueError: the module is neither of the two norms; the error's size is said.
    """
    if module is None:
        one = torch.ones(width, dtype=torch.float64)
        return FrozenNorm(one, torch.zeros_like(one), 0.0, False)
    parameter = next((p for p in module.parameters() if p.dtype.is_floating_point), None)
    dtype = torch.float32 if parameter is None else parameter.dtype
    device = torch.device("cpu") if parameter is None else parameter.device

    def run(x: Float64[Tensor, "*any d_model"]) -> Float64[Tensor, "*any d_model"]:
        out = module.forward(x.to(device, dtype)[None])
        if not isinstance(out, Tensor) or out.shape != (1, *x.shape):
            raise ValueError(f"{type(module).__name__} is no norm: it does not give one vector of {width} for each.")
        return _double(out[0])

    generator = torch.Generator().manual_seed(0)
    # +1 and -1, as many of each as can be, so that mean and scale are the same for both kinds and exact in half
    # precision
    signs = torch.ones(8, width, dtype=torch.float64)
    for row in signs:
        row[torch.randperm(width, generator=generator)[: width // 2]] = -1.0
    above, below = run(signs), run(-signs)
    shift = ((above + below) / 2).mean(0)
    shift = torch.where(shift.abs() <= 4 * torch.finfo(dtype).eps * (above - below).abs().amax(0), 0.0, shift)
    # a common addition to all coordinates changes nothing for LayerNorm
    moved = run(signs + 4.0)
    is_centred = float((moved - above).abs().max()) < 1e-2 * float(above.abs().max())
    bare = FrozenNorm(torch.ones(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64), 0.0, is_centred)
    plain, written = bare.centred(signs), (above - below) / 2
    variance = float(plain.square().mean())
    eps = _epsilon(run, signs, written, shift, variance)
    gain = (written / plain).mean(0) * (variance + eps) ** 0.5
    found = FrozenNorm(gain, shift, eps, is_centred)
    limit = HALF_LIMIT if dtype in (torch.float16, torch.bfloat16) else LIMIT
    error = max(_error(run, found, size, generator) for size in (max(eps, 1e-12) ** 0.5, 1.0, 30.0))
    if not error <= limit:
        raise ValueError(
            f"{type(module).__name__} is neither RMSNorm nor LayerNorm: g x / s + b misses what it does by {error:.1e} "
            f"of its largest value (limit {limit:.0e}). One part's share of its output cannot be told; read the whole "
            "(norm='own')."
        )
    return FrozenNorm(gain, shift, eps, is_centred, error)


def _epsilon(run: Callable, signs: Tensor, written: Tensor, shift: Tensor, variance: float) -> float:
    """eps from vectors so small that it counts.

    Of x and t x the module writes g x / sqrt(v + eps) and g t x / sqrt(t^2 v + eps), whatever g is.
    """
    for power in range(1, 10):
        size = 10.0 ** (-power)
        small = run(size * signs) - shift
        ratio = float((written * small).sum() / small.square().sum().clamp(min=1e-300))
        quotient = (ratio * size) ** 2  # (t^2 v + eps) / (v + eps)
        if quotient > 2 * size**2:
            return variance * (quotient - size**2) / max(1 - quotient, 1e-12)
    return 0.0


def _error(run: Callable, norm: FrozenNorm, size: float, generator: torch.Generator) -> float:
    x = torch.randn(16, len(norm.gain), generator=generator, dtype=torch.float64)
    x = size * (x + torch.randn(16, 1, generator=generator, dtype=torch.float64))
    out = run(x)
    return float((norm(x) - out).abs().max() / out.abs().max().clamp(min=1e-30))


def _double(x: Float[Tensor, "..."]) -> Float64[Tensor, "..."]:
    return x.detach().double().cpu()

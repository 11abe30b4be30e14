"""One number that makes a probe's logits as sure as they should be: the temperature.

    T = 1 / beta,   beta = argmin_beta sum_i [ logsumexp_k(beta z_ik) - beta z_iy ]

(Guo et al. 2017, sec. 4.2), convex in beta: Newton's step, halved into the bracket where it leaves it, for all probes
at once. Two classes are the logits (0, z). Dividing by T > 0 changes no answer and no AUROC within a fold.

Beware: fit it on rows that neither trained the probe nor are reported. `temperature_scaled` takes the other folds'.
"""

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

COLDEST, HOTTEST = 1e-3, 1e3  # temperatures tried; separated rows want 0, scores that mislead want infinity
_MOST_STEPS = 100


def as_classes(
    logits: Float[Tensor, "probe example *output"],
    labels: Bool[Tensor, " _"] | Int64[Tensor, " _"],
) -> tuple[Float64[Tensor, "probe example class"], Int64[Tensor, " example"]]:
    """Logits with a class axis, and class numbers: two classes become (0, z).

    Raises ValueError for another number of rows than labels, logits that are not finite, and labels past the classes.
    """
    is_binary = labels.dtype == torch.bool
    logits = logits.double()
    logits = torch.stack([torch.zeros_like(logits), logits], dim=-1) if is_binary else logits
    if logits.dim() != 3 or logits.shape[-2] != len(labels):
        raise ValueError(
            f"{len(labels)} labels for logits {tuple(logits.shape)}. Bool labels go with [probe, example], class "
            "numbers with [probe, example, class]."
        )
    if not bool(logits.isfinite().all()):
        raise ValueError(f"{int((~logits.isfinite()).sum())} logits are NaN or infinite; scores must be finite.")
    if not bool(((labels >= 0) & (labels < logits.shape[-1])).all()):
        raise ValueError(f"labels go up to {int(labels.max())} for {logits.shape[-1]} classes; they are 0 to K - 1.")
    return logits, labels.long()


def fitted_temperature(
    logits: Float[Tensor, "probe example *output"],
    labels: Bool[Tensor, " _"] | Int64[Tensor, " _"],
) -> Float64[Tensor, " probe"]:
    """T of least log-loss on these rows, between 0.001 and 1,000; 1 for logits that are all the same."""
    z, labels = as_classes(logits, labels)
    answer = z.gather(-1, labels.expand(z.shape[:-1])[..., None])[..., 0]

    def slope_and_curvature(beta: Tensor) -> tuple[Tensor, Tensor]:
        p = (beta[..., None, None] * z).softmax(dim=-1)
        mean = (p * z).sum(dim=-1)
        variance = (p * (z - mean[..., None]).square()).sum(dim=-1)
        return (mean - answer).sum(dim=-1), variance.sum(dim=-1)

    low = torch.full(z.shape[:-2], 1 / HOTTEST, dtype=torch.float64)
    high = torch.full_like(low, 1 / COLDEST)
    at_low, at_high = slope_and_curvature(low)[0] >= 0, slope_and_curvature(high)[0] <= 0
    beta = torch.ones_like(low)
    for _ in range(_MOST_STEPS):
        slope, curvature = slope_and_curvature(beta)
        low, high = torch.where(slope < 0, beta, low), torch.where(slope > 0, beta, high)
        newton = beta - slope / curvature.clamp(min=1e-300)
        inside = (newton > low) & (newton < high)
        following = torch.where(inside, newton, (low * high).sqrt())
        following = torch.where(slope == 0, beta, following)
        moved = ((following - beta).abs() > 1e-12 * beta).any()
        beta = following
        if not moved:
            break
    beta = torch.where(at_low, 1 / HOTTEST, torch.where(at_high, 1 / COLDEST, beta))
    is_flat = (z == z[..., :1]).flatten(-2).all(dim=-1)
    return 1 / torch.where(is_flat, 1.0, beta)


def temperature_scaled(
    logits: Float[Tensor, "probe example *output"],
    labels: Bool[Tensor, " _"] | Int64[Tensor, " _"],
    test: Bool[Tensor, "fold example"],
) -> Float64[Tensor, "probe example *output"]:
    """Logits of each fold's test rows divided by the temperature of all other rows.

    Raises ValueError unless every row is tested once.
    """
    if not bool((test.sum(dim=0) == 1).all()):
        raise ValueError("test must hold every row in exactly one fold; pass the folds of the sweep.")
    scaled = logits.double().clone()
    is_binary = labels.dtype == torch.bool
    for rows in test:
        others = logits[..., ~rows] if is_binary else logits[..., ~rows, :]
        temperature = fitted_temperature(others, labels[~rows])
        if is_binary:
            scaled[..., rows] /= temperature[..., None]
        else:
            scaled[..., rows, :] /= temperature[..., None, None]
    return scaled

"""Tokens set apart from the others, each with one reason: the first of a text, special tokens, massive activations.

    massive:  max over channels of |r_t|  >  above   and   >  times x (median of |r| over channels and ordinary tokens)

at any of the residual sites looked at; `above` 100 and `times` 1000 as Sun et al. (2024, arXiv 2402.17762) have them
[from memory on the methods sheet, not checked]. Such tokens are near-constant vectors of huge norm: a share q of tokens
displaced by D adds q (1 - q) |D|^2 to the variance, which any map predicts for free. One per 256 tokens lifted an R2 of
0.25 to 0.95 (methods sheet 1.1). So they are a stratum, "sinks"; the others are "rest", both together "all".

The median is over tokens, not a token's own: a sink is large in many channels. SmolLM2, 24 windows of 256 tokens of the
Brown corpus without BOS (30 November 2026, float32, CPU): at position 0 max|r| is about 24,000 from resid_post.11 to
resid_post.27, 500 times the token's own median and 9,000 times that of ordinary tokens: all 24 are massive by this
rule, none by their own median. Elsewhere one token of 6,120 is, at resid_post.2. A second kind stays below: 158 tokens
(130 of " the", 28 of " "; 2.6 %) have 700 to 930 in channel 507 from resid_post.2 to resid_post.8; times=500 takes
them. Their norm is no outlier from resid_post.10 on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from microtome.capture.sites import Site

Stratum = Literal["rest", "sinks", "all"]
STRATA: tuple[Stratum, ...] = ("rest", "sinks", "all")
REASONS = ("rest", "first", "special", "massive")  # a token's reason is a number in this order; the first that holds
_RESIDUALS = ("resid_pre", "resid_mid", "resid_post")


@dataclass(frozen=True)
class TokenRule:
    """What makes a token a sink.

    Attributes:
        first: position 0 of a text.
        special: BOS and the like, anywhere.
        massive: look for massive activations.
        looked_at: names of the sites where; None for every residual site at hand (`moments_of`: of the model).
        above, times: thresholds of the module docstring, in activation units and as a ratio.
    """

    first: bool = True
    special: bool = True
    massive: bool = True
    looked_at: tuple[str, ...] | None = None
    above: int | float = 100.0
    times: int | float = 1000.0

    def __post_init__(self):
        if not (self.above >= 0 and self.times >= 0):
            raise ValueError(f"above={self.above}, times={self.times}: thresholds are 0 or more.")

    def described(self) -> dict[str, object]:
        """JSON-able."""
        return asdict(self) | {"looked_at": None if self.looked_at is None else list(self.looked_at)}

    def threshold(self, median: int | float) -> float:
        """max|r| above which a token is massive at a site of this median."""
        return max(self.above, self.times * median, 1e-300)

    def sites(self, names: Sequence[str]) -> tuple[str, ...]:
        """Where massive activations are looked for: the sites named by the rule, or the residuals of these."""
        if not self.massive:
            return ()
        return tuple(name for name in names if _is_residual(name)) if self.looked_at is None else self.looked_at

    def reasons(
        self,
        position: Int64[Tensor, " token"],
        is_special: Bool[Tensor, " token"],
        residuals: Mapping[str, Tensor],
        medians: Mapping[str, float | int],
    ) -> Int64[Tensor, " token"]:
        """The reason of each token, as a number of `REASONS`, 0 where there is none; on the CPU.

        Args:
            residuals: by name, `[token, d_model]`, of the sites looked at.
            medians: by name, what `times` multiplies (`ordinary_median`).
        """
        found = torch.zeros(len(position), dtype=torch.int64)
        if self.massive:
            for name, rows in residuals.items():
                is_massive = massive_tokens(rows, medians[name], above=self.above, times=self.times)
                found[is_massive.cpu()] = REASONS.index("massive")
        if self.special:
            found[is_special.cpu()] = REASONS.index("special")
        if self.first:
            found[position.cpu() == 0] = REASONS.index("first")
        return found


def massive_tokens(
    rows: Float[Tensor, "token d_model"],
    median: int | float,
    *,
    above: int | float = 100.0,
    times: int | float = 1000.0,
) -> Bool[Tensor, " token"]:
    """Where max|r| is above both thresholds; median: of |r| at ordinary tokens of this site."""
    if not rows.numel():
        return torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    largest = torch.maximum(rows.amax(1), -rows.amin(1))
    return (largest > above) & (largest > times * median)


def excess(
    residuals: Mapping[str, Tensor],
    medians: Mapping[str, float | int],
    rule: TokenRule,
) -> Float64[Tensor, " token"]:
    """max|r| over the threshold, the largest of all sites: above 1 is massive."""
    found = []
    for name, rows in residuals.items():
        largest = torch.maximum(rows.amax(1), -rows.amin(1)).double().cpu()
        found.append(largest / rule.threshold(medians[name]))
    return torch.stack(found).amax(0)


def ordinary_median(rows: Float[Tensor, "token d_model"], is_ordinary: Bool[Tensor, " token"]) -> float:
    """Median of |r| over the channels of ordinary tokens (not first, not special); of all where there are none."""
    chosen = rows[is_ordinary.to(rows.device)] if bool(is_ordinary.any()) else rows
    return float(chosen.abs().float().median()) if chosen.numel() else 0.0


def _is_residual(name: str) -> bool:
    try:
        return Site.parse(name.rpartition("/")[2]).kind in _RESIDUALS
    except ValueError:
        return False

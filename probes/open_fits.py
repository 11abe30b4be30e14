"""What of a block of fits [site, strength, task] is still being worked on, as solvers drop what is done."""

import torch
from jaxtyping import Bool
from torch import Tensor


def open_block(is_open: Bool[Tensor, "site strength task"]) -> tuple[Tensor, slice] | None:
    """Sites with open fits, and strengths from the first that has one; None if that is the whole block.

    Rows are copied when sites leave, so they leave once half of them are done.
    """
    sites = is_open.any(-1).any(-1).nonzero()[:, 0]
    if len(sites) > len(is_open) / 2:
        sites = torch.arange(len(is_open), device=is_open.device)
    first = int((~is_open.any(-1).any(0)).long().cumprod(0).sum())
    if first == 0 and len(sites) == len(is_open):
        return None
    return sites, slice(first, None)


def within(here: tuple[Tensor, slice], keep: tuple[Tensor, slice]) -> tuple[Tensor, slice]:
    """`keep` counts inside the block `here`; the same counted in the whole grid."""
    return here[0][keep[0]], slice(here[1].start + keep[1].start, None)

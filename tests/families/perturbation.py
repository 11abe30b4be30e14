"""Parameters moved off their start values, for every tiny model of the suite. Imports nothing of ours."""

import torch
from torch import nn


def perturb(model: nn.Module, seed: int) -> None:
    """Add noise of standard deviation 0.2 to every parameter, in place: attention is then far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))

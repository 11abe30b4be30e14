"""Small ReLU networks of many sites that take every step of training together.

Forward and backward are written out as batched products into buffers made once; Adam is torch's own, fused, over one
vector of all parameters. A step of one probe alone is too small to fill a processor: its time would go to the calls.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float32
from torch import Tensor


@dataclass(frozen=True)
class MlpSettings:
    """How networks are built and trained; the defaults are NL-ITI's."""

    hidden: tuple[int, ...] = (16,)  # units of each hidden layer
    epochs: int = 10
    batch: int = 32  # rows; all training rows where there are fewer
    learning_rate: int | float = 5e-4
    weight_decay: int | float = 1e-4  # times the parameter, added to its gradient

    def __post_init__(self) -> None:
        counts = (*self.hidden, self.epochs, self.batch)
        if not self.hidden or any(not isinstance(n, int) or n < 1 for n in counts):
            raise ValueError(
                f"hidden={self.hidden}, epochs={self.epochs}, batch={self.batch}: give whole numbers from 1 on, and at "
                "least one hidden layer, such as hidden=(16,). Without one the probe is linear: use fit_logistic."
            )
        if not 0 < self.learning_rate < math.inf or not 0 <= self.weight_decay < math.inf:
            raise ValueError(
                f"learning_rate={self.learning_rate}, weight_decay={self.weight_decay}; give finite numbers, the rate "
                "above 0 and the decay not below, such as 5e-4 and 1e-4."
            )


def start_values(sizes: Sequence[int], seed: int) -> tuple[list[Float32[Tensor, "..."]], list[Float32[Tensor, "..."]]]:
    """Weights `[inputs, outputs]` and biases `[outputs]` that every probe of these widths starts from."""
    generator = torch.Generator().manual_seed(seed)
    weights, biases = [], []
    for n_in, n_out in pairwise(sizes):
        weights.append((2 * torch.rand(n_in, n_out, generator=generator) - 1) / math.sqrt(n_in))
        biases.append((2 * torch.rand(n_out, generator=generator) - 1) / math.sqrt(n_in))
    return weights, biases


class Networks:
    """Networks of some sites with one parameter vector: as it is, as views by layer, and the gradient alike."""

    def __init__(self, n_sites: int, sizes: Sequence[int], seed: int, device: torch.device):
        shapes = [(n_sites, i, o) for i, o in pairwise(sizes)]
        shapes += [(n_sites, 1, o) for o in sizes[1:]]
        lengths = [math.prod(shape) for shape in shapes]
        self.parameters = torch.zeros(sum(lengths), device=device)
        self.parameters.grad = torch.zeros_like(self.parameters)

        def views(flat: Tensor) -> list[Tensor]:
            return [part.view(shape) for part, shape in zip(flat.split(lengths), shapes, strict=True)]

        n_layers = len(sizes) - 1
        self.tensors, gradients = views(self.parameters), views(self.parameters.grad)
        self.weights, self.biases = self.tensors[:n_layers], self.tensors[n_layers:]
        self.weight_gradients, self.bias_gradients = gradients[:n_layers], gradients[n_layers:]
        weights, biases = start_values(sizes, seed)
        for tensor, value in zip(self.tensors, [*weights, *biases], strict=True):
            tensor.copy_(value)

    def logits(self, rows: Float32[Tensor, "site example feature"]) -> Float32[Tensor, "site example output"]:
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            rows = torch.baddbmm(bias, rows, weight).clamp_min_(0)
        return torch.baddbmm(self.biases[-1], rows, self.weights[-1])

    def epochs(
        self, rows: Float32[Tensor, "example site feature"], target: Float32[Tensor, "example output"], settings, seed
    ) -> Iterator[int]:
        """Train; yields the number of each epoch when it is through."""
        n_rows, n_sites, width = rows.shape
        size = min(settings.batch, n_rows)
        adam = torch.optim.Adam(
            [self.parameters], lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
        )
        batch = rows.new_empty(size, n_sites, width)
        values = [batch.transpose(0, 1), *(rows.new_empty(n_sites, size, bias.shape[2]) for bias in self.biases)]
        slopes = [torch.empty_like(value) for value in values[1:-1]]
        is_active = [torch.empty_like(value) for value in values[1:-1]]
        is_binary = target.shape[1] == 1
        generator = torch.Generator().manual_seed(seed)
        for epoch in range(1, settings.epochs + 1):
            order = torch.randperm(n_rows, generator=generator).to(rows.device)
            for start in range(0, n_rows - size + 1, size):
                chosen = order[start : start + size]
                torch.index_select(rows, 0, chosen, out=batch)
                for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
                    torch.baddbmm(bias, values[layer], weight, out=values[layer + 1])
                    if layer < len(slopes):
                        values[layer + 1].clamp_min_(0)
                slope = values[-1]
                if is_binary:
                    slope.sigmoid_()
                else:
                    torch.softmax(slope, -1, out=slope)
                slope.sub_(target[chosen]).mul_(1 / size)
                for layer in reversed(range(len(self.weights))):
                    torch.bmm(values[layer].mT, slope, out=self.weight_gradients[layer])
                    torch.sum(slope, 1, keepdim=True, out=self.bias_gradients[layer])
                    if layer:
                        torch.bmm(slope, self.weights[layer].mT, out=slopes[layer - 1])
                        slope = slopes[layer - 1].mul_(torch.sign(values[layer], out=is_active[layer - 1]))
                adam.step()
            yield epoch

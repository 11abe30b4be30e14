"""Parts of logits as the lines of a table: collected layer by layer for the rows of a batch.

A batch has rows x parts values; a line is made of each, except of neurons, of which the largest are named and the rest
is one line per layer, so that the lines of a row always sum to its logit.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from microtome.lenses.attribution_rows import Places


class AttributionLines:
    """Collects parts of a batch's rows as columns."""

    def __init__(self, places: Places):
        self._places, self._frames, self._neurons = places, [], []

    def add(
        self, component: str, values: Float64[Tensor, "row ..."], layer: int | None = None, head: Any = None
    ) -> None:
        """One value per row, or one per row and head."""
        n, each = len(values), values[0].numel()
        self._frames.append(
            {
                "row": np.repeat(np.arange(n), each),
                "component": component,
                "layer": layer,
                "head": None if head is None else np.tile(head, n),
                "value": values.flatten().numpy(),
            }
        )

    def add_neurons(self, layer: int, values: Float64[Tensor, "row neuron"]) -> None:
        """Kept until all layers are there, so that the largest can be chosen among them."""
        self._neurons.append((layer, values))

    def add_sources(
        self, row: int, layer: int, values: Float64[Tensor, "head source"], tokens: tuple[str, ...]
    ) -> None:
        """A head's value by source token; tokens behind the row's own, of which nothing is read, are left out."""
        position = int(self._places.positions[row])
        kept = values if bool(values[:, position + 1 :].any()) else values[:, : position + 1]
        heads, sources = kept.shape
        self._frames.append(
            {
                "row": np.full(kept.numel(), row),
                "component": "attention",
                "layer": layer,
                "head": np.repeat(np.arange(heads), sources),
                "source": np.tile(np.arange(sources), heads),
                "source_token": list(tokens[:sources]) * heads,
                "value": kept.flatten().numpy(),
            }
        )

    def name_neurons(self, count: int) -> Iterator[dict]:
        """The largest neurons of every row, and the rest of each layer."""
        if not self._neurons:
            return
        layers = [layer for layer, _ in self._neurons]
        width = [values.shape[1] for _, values in self._neurons]
        layer_of, neuron_of = np.repeat(layers, width), np.concatenate([np.arange(w) for w in width])
        values = torch.cat([v for _, v in self._neurons], 1)
        largest = values.abs().topk(min(count, values.shape[1]), 1).indices
        rows = np.repeat(np.arange(len(values)), largest.shape[1])
        flat = largest.flatten().numpy()
        yield {
            "row": rows,
            "component": "neuron",
            "layer": layer_of[flat],
            "neuron": neuron_of[flat],
            "value": values.gather(1, largest).flatten().numpy(),
        }
        rest = values.scatter(1, largest, 0.0)
        for layer, part in zip(layers, rest.split(width, 1), strict=True):
            yield {
                "row": np.arange(len(values)),
                "component": "other neurons",
                "layer": layer,
                "value": part.sum(1).numpy(),
            }

    def table(self, largest_neurons: int) -> pd.DataFrame:
        """All parts: row, text, position, component, layer, head, neuron, source, source_token, value."""
        frames = [*self._frames, *self.name_neurons(largest_neurons)]
        columns = ["row", "component", "layer", "head", "neuron", "source", "source_token", "value"]
        whole = {
            name: np.concatenate(
                [np.broadcast_to(np.asarray(f.get(name), dtype=object), len(f["row"])) for f in frames]
            )
            for name in columns
        }
        table = pd.DataFrame(whole).astype(
            {"row": "int64", **dict.fromkeys(("layer", "head", "neuron", "source"), "Int64"), "value": "float64"}
        )
        table.insert(1, "text", self._places.texts[table["row"]])
        table.insert(2, "position", self._places.positions[table["row"]])
        return table

"""The rows of routes in one batch: which token is each one's source, and which rows are set apart.

A row is a target token j with its source i(j) by a route. It is a sink if its target is one, or any of its sources (a
near-constant vector of huge norm on either side predicts, or is predicted, for free); its reason is the target's where
that has one. Moments and held-out passes both judge rows here, so that an operator is scored on rows like its own.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Int64
from torch import Tensor

from microtome.lenses.corpus_pass import Chunk
from microtome.lenses.transport.routes import NO_SOURCE, Route, source_columns


def source_rows(route: Route, chunk: Chunk) -> Int64[Tensor, " token"]:
    """Number of each token's source among the rows of the chunk, -1 where it has none."""
    pattern = None if route.head is None else chunk.patterns[route.head].to(chunk.is_real.device)
    columns = source_columns(route, chunk.is_real, pattern, chunk.input_ids)[chunk.is_real]
    number = chunk.is_real.flatten().long().cumsum(0).view(chunk.is_real.shape) - 1
    batch_row = chunk.is_real.nonzero()[:, 0]
    return torch.where(columns == NO_SOURCE, NO_SOURCE, number[batch_row, columns.clamp_min(0)])


def row_reasons(
    reasons: Int64[Tensor, " token"], target: Int64[Tensor, " row"], sources: Iterable[Int64[Tensor, " row"]]
) -> Int64[Tensor, " row"]:
    """The reason of each row, of those of its tokens: the target's, else that of the first source that has one."""
    found = reasons[target]
    for source in sources:
        found = torch.where(found > 0, found, reasons[source])
    return found

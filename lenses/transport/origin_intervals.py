"""R2 of direction readouts on held-out texts, depth by depth, with intervals over documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor, nn

from microtome.capture.models import LoadedModel
from microtome.lenses.documents import document_draws
from microtome.lenses.linear_map import LinearMap
from microtome.lenses.pair_splits import MomentSource
from microtome.lenses.transport.document_sums import DocumentSums, r2_interval, ratio_interval
from microtome.lenses.transport.routes import Route
from microtome.lenses.transport.transport_rows import transport_pass


@dataclass(frozen=True, eq=False)
class OriginReadouts:
    """depths: site names, the target last. rows: unit directions. to, before: maps from every depth but the last to
    the directions' values at the target, and at the next depth."""

    depths: Sequence[str]
    rows: Float64[Tensor, "direction width"]
    to: Sequence[LinearMap]
    before: Sequence[LinearMap]


def origin_intervals(
    readouts: OriginReadouts,
    moments: MomentSource,
    model: LoadedModel | nn.Module,
    texts: Any,
    documents: Any,
    *,
    stratum: str,
    shards: Sequence[Any],
    draws: int,
    seed: int,
    **encoding: Any,
) -> dict[str, np.ndarray]:
    """By name `[depth, direction]`: carried_to_target, made_at, carried_from_previous, each with _low and _high,
    identity_to_target and variance; and "rows", their number. Readouts run in float64.

    Raises:
        ValueError: no token of the texts is in the stratum.
    """
    depths, rows = list(readouts.depths), readouts.rows
    job = transport_pass(
        model,
        texts,
        depths,
        documents=documents,
        stratum=stratum,
        rule=getattr(moments, "rule", None),
        medians=getattr(moments, "medians", None),
        **encoding,
    )
    means = [rows @ _fit_mean(moments, site, shards, stratum) for site in depths]
    sums = DocumentSums(job.documents)
    with torch.no_grad():
        for batch in job.batches():
            kept, _ = batch.pairs(Route())
            if len(kept):
                _add(sums, readouts, batch.values, kept, batch.document[kept], means)
    if "count" not in sums:
        raise ValueError(f"no token of these texts is in stratum {stratum!r}. Give longer texts, or another stratum.")
    some = sums["count"][:, 0] > 0
    count = sums["count"][some]
    weights = torch.from_numpy(document_draws(len(count), draws, seed))
    shape = len(depths), len(rows)
    found = {
        kind + end: np.full(shape, np.nan)
        for kind in ("carried_to_target", "made_at", "carried_from_previous")
        for end in ("", "_low", "_high")
    }
    found |= {"identity_to_target": np.full(shape, np.nan), "variance": np.full(shape, np.nan)}
    total = sums["square", len(depths) - 1][some]
    earlier = total  # nothing is explained before the first depth
    for place in range(len(depths)):
        square = sums["square", place][some]
        off = sums["sum", place].sum(0) / count.sum()
        found["variance"][place] = (square.sum(0) / count.sum() - off.square()).numpy()
        errors = sums["to", place][some] if place < len(depths) - 1 else torch.zeros_like(total)
        _put(found, "carried_to_target", place, errors, total, count, weights)
        gained = earlier - errors
        found["made_at"][place] = _ratio(gained, total).numpy()
        ends = ratio_interval(weights, gained, count, total, total, True, signed=True)
        found["made_at_low"][place], found["made_at_high"][place] = (end.numpy() for end in ends)
        earlier = errors
        if place:
            _put(found, "carried_from_previous", place, sums["before", place][some], square, count, weights)
        copied = sums["identity", place][some] if ("identity", place) in sums else torch.zeros_like(total)
        found["identity_to_target"][place] = (1 - _ratio(copied, total)).numpy()
    return found | {"rows": np.array(int(count.sum()))}


def _add(
    sums: DocumentSums,
    readouts: OriginReadouts,
    values: dict[str, Tensor],
    kept: Tensor,
    document: Tensor,
    means: Sequence[Tensor],
) -> None:
    taken = [values[site][kept.to(values[site].device)].to("cpu", torch.float64) for site in readouts.depths]
    read = [x @ readouts.rows.T for x in taken]
    sums.add("count", torch.ones(len(kept), 1, dtype=torch.float64), document)
    for place, (a, mean) in enumerate(zip(read, means, strict=True)):
        sums.add(("sum", place), a - mean, document)
        sums.add(("square", place), (a - mean).square(), document)
    for place, x in enumerate(taken[:-1]):
        sums.add(("to", place), (read[-1] - readouts.to[place](x)).square(), document)
        sums.add(("before", place + 1), (read[place + 1] - readouts.before[place](x)).square(), document)
        sums.add(("identity", place), (read[-1] - read[place]).square(), document)


def _put(
    found: dict[str, np.ndarray],
    kind: str,
    place: int,
    errors: Tensor,
    total: Tensor,
    count: Tensor,
    weights: Tensor,
) -> None:
    found[kind][place] = (1 - _ratio(errors, total)).numpy()
    low, high = r2_interval(weights, errors, count, total, total, True)
    found[f"{kind}_low"][place], found[f"{kind}_high"][place] = low.numpy(), high.numpy()


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    above, below = above.sum(0), below.sum(0)
    return torch.where(below > 0, above / below, torch.nan)


def _fit_mean(moments: MomentSource, site: str, shards: Sequence[Any], stratum: str) -> Float64[Tensor, " width"]:
    return moments.pair(site, site, shard=shards[0], stratum=stratum).mean_y

"""Pairs of sites that share nothing, as many as wanted: the null of sizes and scores.

Each draw pairs x of a token with y of another document at the same position, documents in another order each time, and
gives moments of fit, validation and test as `pair_splits` does. What is the same at every text of a position, and what
neighbouring tokens of one document have in common, stays: the null is that of rows that come in documents, wider than
that of independent ones.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from tqdm.auto import tqdm

from microtome.capture.activations import Activations
from microtome.lenses.document_shards import SHARES, DocumentShards, shards_by_document
from microtome.lenses.documents import document_numbers
from microtome.lenses.moment_cells import other_documents
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.pair_splits import PairSplits


def shuffled_splits(
    activations: Activations,
    source: Any,
    target: Any,
    *,
    documents: Iterable[Any] | None = None,
    shards: Mapping[str, int | float] | Mapping[int, str] | Sequence[str] | int | DocumentShards = SHARES,
    draws: int = 20,
    seed: int = 0,
    progress: bool = False,
) -> list[PairSplits]:
    """Moments of shuffled pairings of two captured sites.

    Args:
        activations: captured at all positions; rows of position 0 are left out, as sinks are.
        documents, shards: as of `moments_of_activations`; shards named fit, validation and test.
        draws: how many. seed: of the first; the others follow it.

    Raises:
        ValueError: fewer than two documents in the fit or test shard, rows that are means over positions, no draws.
        KeyError: a site that was not captured.
    """
    if draws < 1:
        raise ValueError(f"draws={draws}; give 1 or more.")
    rows: pd.DataFrame = activations.rows
    if len(rows) and int(rows["position"].min()) < 0:
        raise ValueError("These rows are means over positions (position -1). Capture with positions='all'.")
    known = document_numbers(documents, int(rows["text"].max()) + 1).tolist()
    shards = shards_by_document(shards, known)
    split = DocumentShards.of(shards)
    kept = torch.from_numpy((rows["position"] > 0).to_numpy(copy=True)).nonzero()[:, 0]
    x, y = (activations[site][kept].flatten(1) for site in (source, target))
    owners = [known[text] for text in rows["text"].to_numpy()[kept.numpy()].tolist()]
    positions = rows["position"].to_numpy()[kept.numpy()].tolist()
    shard = torch.from_numpy(split.numbers(owners))
    found = []
    for draw in tqdm(range(draws), desc="shuffled pairings", unit="draw", disable=not progress):
        parts: dict[str, PairMoments | None] = {}
        for number, name in enumerate(split.names):
            inside = (shard == number).nonzero()[:, 0]
            picked = inside.tolist()
            own, other = other_documents([owners[i] for i in picked], [positions[i] for i in picked], seed + draw)
            parts[name] = PairMoments.from_rows(x[inside[own]], y[inside[other]]) if len(own) else None
        if parts.get("fit") is None or parts.get("test") is None:
            raise ValueError(
                f"shards {', '.join(split.names)}: fit or test has no two documents that share a position. Give more."
            )
        found.append(PairSplits(parts["fit"], parts.get("validation"), parts["test"]))
    return found

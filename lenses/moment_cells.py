"""Rows of one shard and stratum: the last ones as they came, the earlier ones as cross-products.

Rows wait until there are `chunk` of them, so that products are large whatever the batches are, and what comes out does
not depend on the batches. Sinks are few: their rows wait until they would take more memory than cross-products (or
`most` rows), and only then become products. What waits is part of the state that is saved.

The shuffled control pairs x_t with y of another document at the same position: within each piece of rows that becomes
products, the rows of a position are ordered by a hash of their documents and rotated, so far that no row meets its own
document. Rows that have nobody to meet are left out of the control and counted.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from microtome.lenses.cross_products import CrossProducts
from microtome.lenses.document_shards import document_hash
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.site_pairs import SitePairs

# what products of float32 rows leave where there is no variance: 6e-8 x 2 to 6 was measured for 100 to 4096 rows and 32
# to 576 channels (30 November 2026, CPU), more rows leave less
_ROUNDING = {torch.float32: 1e-6, torch.float64: 0.0}
_ROTATION_SEED = -1  # another hash than that of any split by a seed of 0 or more


@dataclass(eq=False)
class MomentCell:
    """An accumulator.

    Attributes:
        chunk: rows per product.
        most: rows that may wait before they become products.
        products, shuffled: earlier rows; None before there are any.
        dtype: of waiting rows and of products.
        rows: waiting rows, the first `waiting` of them.
        documents, positions: of the waiting rows.
        unmatched: rows left out of the shuffled control so far.
    """

    pairs: SitePairs
    chunk: int
    most: int
    dtype: torch.dtype
    is_shuffled: bool = False
    products: CrossProducts | None = None
    shuffled: CrossProducts | None = None
    rows: Float[Tensor, "token column"] | None = None
    waiting: int = 0
    documents: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    unmatched: int = 0

    @property
    def count(self) -> int:
        """Rows so far."""
        return self.waiting + (self.products.count if self.products else 0)

    @property
    def left_out(self) -> int:
        """Rows without a partner in the shuffled control, those that wait included."""
        return self.unmatched + self.waiting - len(other_documents(self.documents, self.positions)[0])

    def append(
        self, values: list[Tensor], picked: Int64[Tensor, " token"], documents: list[int], positions: list[int]
    ) -> None:
        """Count in some rows.

        Args:
            values: per site, `[any, width]`.
            picked: which of their rows.
            documents, positions: of the picked rows.
        """
        done = 0
        while done < len(picked):
            room = self._room(len(picked) - done, like=values[0])
            some = picked[done : done + room]
            for site, value in enumerate(values):
                self.rows[self.waiting : self.waiting + len(some), self.pairs.span(site)] = value[some].to(self.rows)
            self.documents += documents[done : done + len(some)]
            self.positions += positions[done : done + len(some)]
            self.waiting += len(some)
            done += len(some)
            if self.waiting == self.most:
                self.settle()

    def _room(self, wanted: int, like: Tensor) -> int:
        """How many more rows may wait; memory grows by doubling."""
        room = min(wanted, self.most - self.waiting)
        held = 0 if self.rows is None else len(self.rows)
        if self.waiting + room > held:
            size = min(self.most, max(self.waiting + room, 2 * held))
            fresh = torch.empty(size, self.pairs.columns, dtype=self.dtype, device=like.device)
            if self.rows is not None:
                fresh[: self.waiting] = self.rows[: self.waiting]
            self.rows = fresh
        return room

    def settle(self) -> None:
        """Waiting rows become products."""
        if not self.waiting:
            return
        rows = self.rows[: self.waiting]
        if self.products is None:
            pilot = rows[: self.chunk].mean(0, dtype=torch.float64).to(self.dtype).double()  # as rows can hold it
            self.products = CrossProducts.empty(self.pairs, pilot)
            self.shuffled = CrossProducts.empty(self.pairs, pilot, is_shuffled=True) if self.is_shuffled else None
        for start in range(0, self.waiting, self.chunk):
            piece = slice(start, min(start + self.chunk, self.waiting))
            centred = rows[piece].sub_(self.products.pilot.to(rows.dtype))
            self.products.add(centred)
            if self.shuffled is not None:
                kept, partner = other_documents(self.documents[piece], self.positions[piece])
                self.shuffled.add(centred[kept], centred[partner])
                self.unmatched += len(centred) - len(kept)
        self.waiting, self.documents, self.positions = 0, [], []
        if self.most > self.chunk:  # too many to keep as they are: from now on as any other cell
            self.most, self.rows = self.chunk, None

    def join(self, other: "MomentCell") -> None:
        """Count in another cell's rows; the other stays as it is."""
        if other.products is not None:
            if self.products is None:
                pilot = other.products.pilot.clone()
                self.products = CrossProducts.empty(self.pairs, pilot)
                self.shuffled = CrossProducts.empty(self.pairs, pilot, is_shuffled=True) if self.is_shuffled else None
            self.products.join(other.products)
            if self.shuffled is not None:
                self.shuffled.join(other.shuffled)
            self.unmatched += other.unmatched
            if self.most > self.chunk:
                self.settle()
                self.most, self.rows = self.chunk, None
        if other.waiting:
            values = [other.rows[: other.waiting, self.pairs.span(site)] for site in range(len(self.pairs.names))]
            picked = torch.arange(other.waiting, device=other.rows.device)
            self.append(values, picked, other.documents, other.positions)

    def pair(self, source: int, target: int, *, shuffled: bool = False) -> PairMoments | None:
        """Moments of a pair over all rows, those that wait included; None of no rows. Changes nothing."""
        earlier = self.shuffled if shuffled else self.products
        found = earlier.pair(source, target, _ROUNDING[self.dtype]) if earlier is not None and earlier.count else None
        if self.waiting:
            x, y = (self.rows[: self.waiting, self.pairs.span(site)] for site in (source, target))
            if shuffled:
                kept, partner = other_documents(self.documents, self.positions)
                # the order that gives (first, last) gives (last, first) reversed, as products that settled do
                kept, partner = (kept, partner) if source <= target else (partner, kept)
                x, y = x[kept], y[partner]
            if len(x):
                late = PairMoments.from_rows(x, y)
                found = late if found is None else found + late
        return found


def other_documents(documents: list[int], positions: list[int], seed: int = _ROTATION_SEED) -> tuple[Tensor, Tensor]:
    """For rows of several documents, numbers of rows and of a partner for each: same position, another document.

    seed: of the order of documents; another seed pairs them otherwise.

    The partners are the same rows in another order. Where more than half of a position's rows are of one document, its
    surplus is left out; so is a row that is alone at its position.
    """
    document, position = np.asarray(documents), np.asarray(positions)
    if not len(document):
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    hashes = {d: document_hash(d, seed) for d in np.unique(document).tolist()}
    order = np.lexsort((document, [hashes[d] for d in document.tolist()], position))
    kept, partner = [], []
    for rows in np.split(order, np.flatnonzero(np.diff(position[order])) + 1):
        _, first, counts = np.unique(document[rows], return_index=True, return_counts=True)
        most = int(counts.max())
        if (surplus := 2 * most - len(rows)) > 0:
            start = int(first[counts.argmax()])
            rows, most = np.delete(rows, np.arange(start, start + surplus)), most - surplus
        if len(rows):
            kept.append(rows)
            partner.append(np.roll(rows, -most))
    empty = np.empty(0, dtype=np.int64)
    return tuple(torch.from_numpy(np.concatenate([empty, *each])) for each in (kept, partner))

"""The largest tokens of every row, kept while blocks of logits go by; the lower token id comes first among equals.

Sorting every block would cost as much as its product. Instead a block is cut into groups, and only the groups whose
largest value is above the row's bound are looked at: the bound is the k-th largest of the group maxima seen so far,
which k tokens with lower ids reach, so that a later token must be strictly above it to count. Of 384 groups of 128
in random order some 27 are looked at for a top five.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

GROUP = 128
# above so many times the tokens wanted, what lies above the bound is cut to the largest of each group
MANY = 8


class RunningTop:
    """Largest `top` tokens of `rows` rows. `see` the blocks in order, then ask for the `result`."""

    def __init__(self, rows: int, top: int, like: Tensor) -> None:
        self.top = top
        self.maxima = like.new_full((rows, top), -torch.inf)
        self.found: list[tuple[Tensor, Tensor, Tensor]] = []

    def see(self, z: Float[Tensor, "row block"], start: int) -> Float[Tensor, " row"]:
        """Take in the logits of tokens start, start + 1, ...; returns the largest of each row."""
        rows, width = z.shape
        size = GROUP if width % GROUP == 0 else width
        grouped = z.view(rows, -1, size)
        largest = grouped.amax(-1)
        bound = self.maxima[:, -1]
        row, group = (largest > bound[:, None]).nonzero(as_tuple=True)
        if len(row):
            values = grouped.view(-1, size).index_select(0, row * (width // size) + group)
            above = values > bound[row, None]
            pair, place = above.nonzero(as_tuple=True)
            if len(pair) > MANY * self.top * rows:
                pair, place = _largest(values, min(self.top, size))
            self.found.append((row[pair], start + group[pair] * size + place, values[pair, place]))
            self.maxima = torch.cat([self.maxima, largest], 1).topk(self.top).values
        return largest.amax(-1)

    def result(self) -> tuple[Int64[Tensor, "row top"], Float[Tensor, "row top"]]:
        """Ids and logits, largest first. A row with NaN holds ids -1 and logits NaN."""
        if not self.found:
            ids = torch.full(self.maxima.shape, -1, device=self.maxima.device)
            return ids, torch.full_like(self.maxima, torch.nan)
        row, ids, value = (torch.cat(parts) for parts in zip(*self.found, strict=True))
        keep = value >= self.maxima[row, -1]
        row, ids, value = row[keep], ids[keep], value[keep]
        # what was found of a row has ascending ids, and stable sorts keep them so among equals
        order = value.argsort(descending=True, stable=True)
        order = order[row[order].argsort(stable=True)]
        count = row.bincount(minlength=len(self.maxima))
        place = (count.cumsum(0) - count)[:, None] + torch.arange(self.top, device=row.device)
        lost = (count < self.top)[:, None] | self.maxima.isnan().any(1, keepdim=True)
        chosen = order[place.clamp(max=len(order) - 1)]
        return ids[chosen].masked_fill(lost, -1), value[chosen].masked_fill(lost, torch.nan)


def _largest(values: Float[Tensor, "pair size"], top: int) -> tuple[Int64[Tensor, " found"], Int64[Tensor, " found"]]:
    """Row and place of the largest in each row, places ascending; among equals at the edge the first are kept."""
    value, place = values.topk(top, sorted=False)
    if top < values.shape[1]:
        crowded = (values >= value.amin(1, keepdim=True)).sum(1) > top
        if bool(crowded.any()):
            place[crowded] = values[crowded].argsort(dim=1, descending=True, stable=True)[:, :top]
    pair = torch.arange(len(values), device=values.device)[:, None].expand_as(place)
    return pair.flatten(), place.sort(1).values.flatten()

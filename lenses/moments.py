"""Counts, means and cross-products of chosen pairs of sites, by shard and stratum, from one pass over a corpus.

    moments = moments_of(model, texts, "resid", documents=documents)           # lenses/moments_pass.py
    moments.pair("resid_post.3", "resid_post.12", "fit")                       # PairMoments, stratum "rest"
    moments.pair("resid_post.3", "resid_post.12", moments.training("fold2"))   # total minus fold, exactly

All that linear maps, their scores and their controls need, with no activations on disk (methods sheet 1.2; numerics in
`cross_products`). A token belongs to one shard by its document (`document_shards`) and to one stratum (`strata`).
Products are float32 for float32 input and narrower, within 1e-5 of sqrt(S_ii S_jj) of each entry; float64 for float64.
Sums are float64, so moments join without loss, in one process or several: equal to rounding in any order and division.

Beware: a difference of sites that are nearly equal (`PairMoments.increment`) loses as many digits as they share; give
float64 values where increments are below a thousandth of the stream.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from microtome.lenses.document_shards import SHARES, DocumentShards
from microtome.lenses.documents import document_numbers
from microtome.lenses.moment_cells import MomentCell
from microtome.lenses.moments_estimate import MomentsEstimate, estimate_moments, products_bytes
from microtome.lenses.pair_moments import NoRows, PairMoments
from microtome.lenses.site_pairs import Pairs, SiteKey, SitePairs, site_name
from microtome.lenses.strata import REASONS, STRATA, Stratum, TokenRule, excess, ordinary_median

CHUNK = 2048
LARGEST = 1e15  # squares of larger float32 numbers, summed, would pass the largest float32
_CELLS = ("rest", "sinks")


class Moments:
    """An accumulator: `update`, `finish` and `merge` change it.

    Attributes:
        pairs: the sites in order, and which pairs are held.
        split: which document is in which shard.
        rule: which tokens are sinks.
        provenance: JSON-able, where the values came from; `merge` wants that of the model alike.
        documents: those counted in.
        medians: by residual site, what the rule measures massive activations by; from the first rows if not given.
        margins: the largest token that is no massive one, and the smallest that is, in units of the threshold.
        left_out: by reason, tokens of each shard that were not given, where somebody counts them (`leave_out`).
    """

    def __init__(
        self,
        widths: Mapping[SiteKey, int],
        pairs: Pairs = "all",
        shards: Mapping[str, int | float] | Mapping[int, str] | int | DocumentShards = SHARES,
        *,
        seed: int = 0,
        rule: TokenRule | None = None,
        shuffled: bool = False,
        chunk: int = CHUNK,
        provenance: Mapping[str, Any] | None = None,
        medians: Mapping[str, float | int] | None = None,
    ):
        """Moments of no rows; memory is taken when rows come.

        Args:
            widths: width of every site, in order of depth. A site is a `Site`, its name, or (model's name, Site).
            pairs: "all"; a band, as a number: sites at most so many places apart; one site, with which each other is
                paired; or a list of (source, target).
            shards: shares of documents by name; a number of equal folds; or the shard of every document by number.
            seed: of the split.
            rule: which tokens are sinks; None for `TokenRule()`.
            shuffled: hold the shuffled pairing too, at twice the memory and time.
            chunk: rows per product, 4096 at most.
            provenance: kept, and saved.
            medians: of another `Moments` of this model, so that both judge tokens alike; from the first rows if None.

        Raises:
            ValueError: no sites or one twice, shares that do not sum to 1, a chunk out of range.
            KeyError: a pair names a site that is not there.
        """
        if not 1 <= chunk <= 4096:
            raise ValueError(f"chunk={chunk}: expected 1 to 4096 rows, beyond which float32 sums lose digits.")
        self.pairs = SitePairs.of(widths, pairs)
        self.split = DocumentShards.of(shards, seed=seed)
        self.rule = rule or TokenRule()
        self.is_shuffled = shuffled
        self.chunk = chunk
        self.provenance = dict(provenance or {})
        self.documents: set[int] = set()
        self.medians: dict[str, float] = {name: float(value) for name, value in (medians or {}).items()}
        self.margins = (0.0, float("inf"))
        self.dtype: torch.dtype | None = None
        self.cells: dict[tuple[str, str], MomentCell] = {}
        self.reason_counts = torch.zeros(len(self.shards), len(REASONS), dtype=torch.int64)
        self.left_out: dict[str, Tensor] = {}

    @property
    def sites(self) -> tuple[str, ...]:
        """Names, in order of depth."""
        return self.pairs.names

    @property
    def shards(self) -> tuple[str, ...]:
        """Names."""
        return self.split.names

    def estimate(self, *, sinks: int = 0, device: torch.device | None = None) -> MomentsEstimate:
        """Bytes and operations before any row comes. sinks: tokens that will be set apart, about one per text."""
        dtype = self.dtype or torch.float32
        return estimate_moments(
            self.pairs,
            len(self.shards),
            shuffled=self.is_shuffled,
            chunk=self.chunk,
            dtype=dtype,
            sinks=sinks,
            device=device,
        )

    def update(
        self,
        values: Mapping[SiteKey, Tensor],
        *,
        documents: Sequence[int] | Int64[Tensor, " token"],
        position: Int64[Tensor, " token"],
        is_special: Bool[Tensor, " token"] | None = None,
        text: Int64[Tensor, " token"] | None = None,
        reasons: Int64[Tensor, " token"] | None = None,
    ) -> None:
        """Count in some tokens; all of their sites at once.

        Args:
            values: by site, `[token, width]` or `[token, head, d_head]`; further ones that the rule looks at.
            documents: of each token.
            position: in its text, 0 first.
            is_special: BOS and the like; none if None.
            text: number of each token's text, for error messages.
            reasons: of each token, where they were judged already (`reasons_of`); `is_special` is not asked then.

        Raises:
            KeyError: a site is missing, or a document is in no shard.
            ValueError: rows of another number or width than expected, NaN or infinity (names site, text, position).
        """
        named = {site_name(key): value.detach().flatten(1) for key, value in values.items()}
        rows, n = self._checked(named, position, text), len(position)
        documents = [int(d) for d in (documents.tolist() if isinstance(documents, Tensor) else documents)]
        if len(documents) != n:
            raise ValueError(f"{len(documents)} documents for {n} tokens. Give the document of every token.")
        if not n:
            return
        shard = torch.from_numpy(self.split.numbers(documents))
        position = position.cpu()
        special = torch.zeros(n, dtype=torch.bool) if is_special is None else is_special.cpu()
        if reasons is None:
            reasons = self._reasons(named, position, special, text, self.sites)
        if self.dtype is None:
            is_double = any(row.dtype == torch.float64 for row in rows)
            self.dtype = torch.float64 if is_double else torch.float32
        self.documents.update(documents)
        self.reason_counts += torch.bincount(shard * len(REASONS) + reasons, minlength=self.reason_counts.numel()).view(
            self.reason_counts.shape
        )
        places = position.tolist()
        for number, name in enumerate(self.shards):
            for stratum in _CELLS:
                picked = ((shard == number) & ((reasons > 0) == (stratum == "sinks"))).nonzero()[:, 0]
                if len(picked):
                    chosen = picked.tolist()
                    self._cell(name, stratum).append(
                        rows,
                        picked.to(rows[0].device),
                        [documents[i] for i in chosen],
                        [places[i] for i in chosen],
                    )

    def reasons_of(
        self,
        values: Mapping[SiteKey, Tensor],
        *,
        position: Int64[Tensor, " token"],
        is_special: Bool[Tensor, " token"],
        text: Int64[Tensor, " token"] | None = None,
    ) -> Int64[Tensor, " token"]:
        """Why each token is a sink, as a number of `REASONS`, counting nothing in; the first tokens fix the medians.

        Args:
            values: by site, those that the rule looks at among others.
            position, is_special, text: as in `update`.

        Raises:
            KeyError, ValueError: as `update`.
        """
        named = {site_name(key): value.detach().flatten(1) for key, value in values.items()}
        return self._reasons(named, position.cpu(), is_special.cpu(), text, ())

    def leave_out(self, reason: str, documents: Sequence[int]) -> None:
        """Count tokens that are not given, for `counts()`. documents: of each such token."""
        shard = torch.from_numpy(self.split.numbers(documents))
        found = torch.bincount(shard, minlength=len(self.shards))
        self.documents.update(documents)
        self.left_out[reason] = self.left_out.get(reason, torch.zeros_like(found)) + found

    def finish(self) -> None:
        """Make products of rows that wait (sinks stay rows while they are few). More may come afterwards."""
        for cell in self.cells.values():
            if cell.most == cell.chunk:
                cell.settle()

    def merge(self, other: "Moments") -> None:
        """Count in the rows of `other`, made elsewhere of other documents; `other` stays as it is.

        Raises:
            ValueError: other settings or another model (names the difference), or documents that both have.

        Warns:
            UserWarning: medians of their own have judged tokens of `other` to be massive, or not, that those here would
                judge otherwise. `Moments(medians=first.medians)` makes both alike.
        """
        mine, theirs = (each.settings() | {"dtype": each.dtype or self.dtype or other.dtype} for each in (self, other))
        if differing := [name for name in mine if mine[name] != theirs[name]]:
            said = "; ".join(f"{name}: {mine[name]!s:.200} here, {theirs[name]!s:.200} there" for name in differing)
            raise ValueError(f"These moments cannot be merged ({said}). Merge moments of one model and one request.")
        if both := sorted(self.documents & other.documents):
            raise ValueError(
                f"{len(both)} documents are in both, such as {both[0]}: their tokens would count twice. Divide the "
                "documents among processes, and number them alike in all."
            )
        self._warn_of_medians(other)
        self.dtype = self.dtype or other.dtype
        for (shard, stratum), cell in other.cells.items():
            self._cell(shard, stratum).join(cell)
        self.documents |= other.documents
        self.medians = self.medians or dict(other.medians)
        (low, high), (low_there, high_there) = self.margins, other.margins
        self.margins = (max(low, low_there), min(high, high_there))
        self.reason_counts += other.reason_counts
        for reason, counts in other.left_out.items():
            self.left_out[reason] = self.left_out.get(reason, torch.zeros_like(counts)) + counts

    def pair(
        self,
        source: SiteKey,
        target: SiteKey,
        shard: str | Sequence[str] | None = "fit",
        stratum: Stratum = "rest",
        *,
        shuffled: bool = False,
    ) -> PairMoments:
        """Moments of (source, target) rows about their own means, float64 on the device of the sums.

        Args:
            shard: a name, several names together, or None for all shards.
            shuffled: y of another document at the same position, in the same shard and stratum.

        Raises:
            KeyError: no such site, shard or stratum, or a pair that was not accumulated.
            NoRows: a ValueError, no rows there.
            ValueError: the shuffled pairing was not accumulated.
        """
        first, last = self.pairs.find(source), self.pairs.find(target)
        self.pairs.block_of(first, last)
        if shuffled and not self.is_shuffled:
            raise ValueError("The shuffled pairing was not accumulated. Run the pass again with shuffled=True.")
        found = None
        for cell in self._chosen(shard, stratum):
            part = cell.pair(first, last, shuffled=shuffled)
            if part is not None:
                found = part if found is None else found + part
        if found is None:
            why = "no two documents share a position there" if shuffled else "no token is there"
            raise NoRows(
                f"Shard {shard!r}, stratum {stratum!r}: {why}. `counts()` says how many tokens are where; give more "
                "documents, or another split."
            )
        return found

    def held_pairs(self) -> list[tuple[str, str]]:
        """Ordered pairs of sites that `pair` can give, each with itself included, by source and then target."""
        return [
            (self.sites[i], self.sites[j])
            for i in range(len(self.sites))
            for j in range(len(self.sites))
            if max(i, j) in self.pairs.targets[min(i, j)]
        ]

    def training(self, fold: str) -> tuple[str, ...]:
        """The other shards: `pair(..., moments.training("fold2"))` is the total minus that fold.

        Their moments are added, not the fold's subtracted, so that not a bit of the fold is in them.
        """
        if fold not in self.shards:
            raise KeyError(f"{fold!r} is no shard. Shards: {', '.join(self.shards)}.")
        return tuple(name for name in self.shards if name != fold)

    def count(self, shard: str | Sequence[str] | None = None, stratum: Stratum = "rest") -> int:
        """Tokens there."""
        return sum(cell.count for cell in self._chosen(shard, stratum))

    def shard_of(self, documents: Iterable[Any]) -> list[str]:
        """The shard that each document (name or number) is in, or would be in. Raises KeyError for one that shards
        listed by text do not name."""
        known = list(documents)
        return [self.shards[n] for n in self.split.numbers(document_numbers(known, len(known)).tolist())]

    def __repr__(self) -> str:
        counts = ", ".join(f"{name} {self.count(name, 'all'):,}" for name in self.shards)
        held = f"{len(self.sites)} sites, {self.pairs.pairs} pairs; {len(self.documents)} documents"
        return f"Moments({held}, tokens: {counts})"

    def counts(self) -> pd.DataFrame:
        """One row per shard: its tokens by reason (rest, first, special, massive); unmatched: without a partner; and a
        column per reason of tokens that were left out."""
        table = pd.DataFrame(self.reason_counts.numpy().copy(), columns=list(REASONS))
        table.insert(0, "shard", list(self.shards))
        if self.is_shuffled:
            table["unmatched"] = [
                sum(self.cells[name, s].left_out for s in _CELLS if (name, s) in self.cells) for name in self.shards
            ]
        for reason, counts in self.left_out.items():
            table[reason] = counts.numpy().copy()
        return table

    def settings(self) -> dict[str, Any]:
        """JSON-able: what two `Moments` have in common if they can be merged."""
        return {
            "pairs": self.pairs.described(),
            "split": self.split.described(),
            "rule": self.rule.described(),
            "shuffled": self.is_shuffled,
            "chunk": self.chunk,
            "model": self.provenance.get("model"),
        }

    def _warn_of_medians(self, other: "Moments") -> None:
        """The rows of `other` lie where its own thresholds put them; ours mostly put them there as well."""
        if not self.medians or not other.medians or not other.count(None, "all"):
            return
        ratios = [
            self.rule.threshold(self.medians[name]) / self.rule.threshold(other.medians[name])
            for name in other.medians
            if name in self.medians
        ]
        largest_rest, smallest_massive = other.margins
        between = []
        if ratios and largest_rest > min(ratios):
            between.append(f"up to {largest_rest:.3g} in the rest")
        if ratios and smallest_massive <= max(ratios):
            between.append(f"from {smallest_massive:.3g} among sinks")
        if between:
            warnings.warn(
                f"Thresholds of massive tokens are {min(ratios):.3g} to {max(ratios):.3g} times those there, and "
                f"tokens there lie between ({', '.join(between)} times their threshold): some are in another stratum "
                "than one pass would put them. To have both alike, run one with medians= those of the other.",
                stacklevel=3,
            )

    def _cell(self, shard: str, stratum: str) -> MomentCell:
        key = (shard, stratum)
        if key not in self.cells:
            most = self.chunk
            if stratum == "sinks":  # as many as take the memory of products
                row_bytes = self.pairs.columns * self.dtype.itemsize
                most = max(most, products_bytes(self.pairs, shuffled=self.is_shuffled) // row_bytes)
            self.cells[key] = MomentCell(self.pairs, self.chunk, most, self.dtype, self.is_shuffled)
        return self.cells[key]

    def _chosen(self, shard: str | Sequence[str] | None, stratum: str) -> list[MomentCell]:
        names = self.shards if shard is None else (shard,) if isinstance(shard, str) else tuple(shard)
        if wrong := [name for name in names if name not in self.shards]:
            raise KeyError(f"{wrong[0]!r} is no shard. Shards: {', '.join(self.shards)}.")
        if stratum not in STRATA:
            raise KeyError(f"{stratum!r} is no stratum. Strata: {', '.join(STRATA)}.")
        strata = _CELLS if stratum == "all" else (stratum,)
        return [self.cells[name, s] for name in names for s in strata if (name, s) in self.cells]

    def _checked(self, named: Mapping[str, Tensor], position: Tensor, text: Tensor | None) -> list[Tensor]:
        rows = []
        for name, width in zip(self.sites, self.pairs.widths, strict=True):
            if name not in named:
                raise KeyError(f"{name} is missing from the values. All sites of a token come at once.")
            value = named[name]
            if tuple(value.shape) != (len(position), width):
                raise ValueError(f"{name} has shape {list(value.shape)}; expected [{len(position)}, {width}].")
            self._require_finite(name, value, position, text)
            rows.append(value.to(_home(value if not rows else rows[0])))
        return rows

    def _require_finite(self, name: str, value: Tensor, position: Tensor, text: Tensor | None) -> None:
        if not value.numel() or (float(value.amin()) > -LARGEST and float(value.amax()) < LARGEST):  # nor is it NaN
            return
        row = int((~(value.abs() < LARGEST)).any(1).nonzero()[0, 0])
        where = "" if text is None else f"text {int(text[row])}, "
        raise ValueError(
            f"{name} is NaN, infinite or past {LARGEST:g} at {where}position {int(position[row])}. Look at that text, "
            "or leave it out; a model in float16 overflows at 65504, load it in float32."
        )

    def _reasons(
        self,
        named: Mapping[str, Tensor],
        position: Tensor,
        special: Tensor,
        text: Tensor | None,
        checked: Sequence[str],
    ) -> Tensor:
        """checked: sites that are known to be finite."""
        wanted = self.rule.sites(self.sites)
        if missing := [name for name in wanted if name not in named]:
            raise KeyError(f"{missing[0]} is looked at for massive tokens and missing from the values. Give it too.")
        looked_at = {name: named[name] for name in wanted}
        for name, value in looked_at.items():
            if name not in checked:
                self._require_finite(name, value, position, text)
        ordinary = (position != 0) & ~special
        for name, value in looked_at.items():
            if name not in self.medians:
                self.medians[name] = ordinary_median(value[:CHUNK], ordinary[:CHUNK])
        reasons = self.rule.reasons(position, special, looked_at, self.medians)
        if looked_at and len(position):
            sizes = excess(looked_at, self.medians, self.rule)
            low, high = self.margins
            if len(rest := sizes[reasons == 0]):
                low = max(low, float(rest.max()))
            if len(massive := sizes[reasons == REASONS.index("massive")]):
                high = min(high, float(massive.min()))
            self.margins = (low, high)
        return reasons


def _home(value: Tensor) -> torch.device:
    """Where sums lie: with the first site's values, but for devices without float64."""
    return torch.device("cpu") if value.device.type == "mps" else value.device

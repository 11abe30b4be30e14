"""Which shard (fit, validation, test, or a fold) each document is in, so that no document is in two.

    u(document) = 64 bits of BLAKE2b(seed, document) / 2^64,     shard k where u falls among the running sums of shares

The shard of a document depends on its number and the seed alone: it stays when more documents come, in whatever order,
and is the same in every process. Splits go by document and never by token, since neighbours leak.

Beware: shares hold on average; of 10 documents with a share of 0.2, none to five may come.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from jaxtyping import Int64

SHARES = {"fit": 0.6, "validation": 0.2, "test": 0.2}


@dataclass(frozen=True)
class DocumentShards:
    """Names of the shards, and the rule that divides documents.

    Attributes:
        names: in order.
        shares: of each by the hash; empty where `listed` names the shard of every document.
        listed: shard of each document, for a split of one's own.
        seed: of the hash.
    """

    names: tuple[str, ...]
    shares: tuple[float, ...] = ()
    listed: Mapping[int, str] | None = None
    seed: int = 0

    @classmethod
    def of(
        cls, shards: "Mapping[str, int | float] | Mapping[int, str] | int | DocumentShards", *, seed: int = 0
    ) -> "DocumentShards":
        """From shares by name, a number of equal folds (named fold0, fold1, ...), or the shard of every document.

        Raises:
            ValueError: no shards, shares that are not positive or do not sum to 1, fewer than 2 folds.
        """
        if isinstance(shards, DocumentShards):
            return shards
        if isinstance(shards, int):
            if shards < 2:
                raise ValueError(f"shards={shards}: a number of folds is 2 or more. One shard: shards={{'all': 1}}.")
            return cls(tuple(f"fold{k}" for k in range(shards)), (1 / shards,) * shards, seed=seed)
        if not shards:
            raise ValueError("shards is empty. Give shares, such as {'fit': 0.6, 'validation': 0.2, 'test': 0.2}.")
        if all(isinstance(name, str) for name in shards.values()):
            listed = {int(document): name for document, name in shards.items()}
            return cls(tuple(dict.fromkeys(listed.values())), (), listed, seed)
        if not all(isinstance(share, int | float) and share > 0 for share in shards.values()):
            raise ValueError(f"shards={dict(shards)}: every share is above 0.")
        if abs(sum(shards.values()) - 1) > 1e-9:
            raise ValueError(f"shards={dict(shards)} sum to {sum(shards.values()):g}; shares sum to 1.")
        return cls(tuple(map(str, shards)), tuple(map(float, shards.values())), seed=seed)

    def numbers(self, documents: Iterable[int]) -> Int64[np.ndarray, " document"]:
        """The place in `names` of each document's shard.

        Raises:
            KeyError: a document that the list does not name.
        """
        documents = [int(document) for document in documents]
        known: dict[int, int] = {}
        for document in dict.fromkeys(documents):
            known[document] = self._number(document)
        return np.array([known[document] for document in documents], dtype=np.int64)

    def _number(self, document: int) -> int:
        if self.listed is not None:
            if document not in self.listed:
                raise KeyError(f"document {document} is in no shard. The list names {len(self.listed)} documents.")
            return self.names.index(self.listed[document])
        place = document_hash(document, self.seed)
        bounds = list(accumulate(self.shares))
        return next((k for k, bound in enumerate(bounds) if place < bound), len(bounds) - 1)

    def described(self) -> dict[str, object]:
        """JSON-able: what decides the split."""
        listed = None if self.listed is None else [[d, self.listed[d]] for d in sorted(self.listed)]
        return {"names": list(self.names), "shares": list(self.shares), "seed": self.seed, "listed": listed}


def document_hash(document: int, seed: int) -> float:
    """A number in [0, 1) that stands for this document, as good as drawn."""
    digest = hashlib.blake2b(f"{seed} {document}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def shards_of_texts(shards: Sequence[str], documents: Sequence[int]) -> dict[int, str]:
    """The shard of every document, from those of its texts.

    Raises:
        ValueError: other numbers of texts, or a document with texts in two shards.
    """
    if len(shards) != len(documents):
        raise ValueError(f"{len(shards)} shards for {len(documents)} texts. Give one for each text.")
    found: dict[int, str] = {}
    for name, document in zip(shards, documents, strict=True):
        if found.setdefault(int(document), name) != name:
            raise ValueError(
                f"document {document} has texts in {found[int(document)]!r} and {name!r}. Keep each document in one."
            )
    return found


def shards_by_document(shards: Any, documents: Sequence[int] | None = None) -> Any:
    """Shards as `DocumentShards.of` takes them: the shard's name of each text becomes that of each document.

    documents: of each text; each its own if None.
    Raises what `shards_of_texts` raises.
    """
    if isinstance(shards, str) or not isinstance(shards, Sequence):
        return shards
    return shards_of_texts(shards, range(len(shards)) if documents is None else documents)

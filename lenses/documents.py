"""The document of each text as a number: what splits and bootstraps go by.

Whole numbers stay as they are; names (such as "brown:ca01") become 63 bits of BLAKE2b of themselves, so that a document
has one number in every draw, process and machine. Without documents each text is its own.
"""

import hashlib
from collections.abc import Iterable
from numbers import Integral
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64


def document_numbers(documents: Iterable[Any] | None, n_texts: int) -> Int64[np.ndarray, " text"]:
    """A number per text.

    Raises:
        ValueError: documents for another number of texts.
        TypeError: documents that are neither all whole numbers nor all names.
    """
    if documents is None:
        return np.arange(n_texts)
    listed = documents.tolist() if hasattr(documents, "tolist") else list(documents)
    if len(listed) != n_texts:
        raise ValueError(f"{len(listed)} documents for {n_texts} texts. Give the document of every text.")
    if all(isinstance(document, str) for document in listed):
        known = {name: _number(name) for name in dict.fromkeys(listed)}
        return np.array([known[name] for name in listed], dtype=np.int64)
    if all(isinstance(document, Integral) and not isinstance(document, bool) for document in listed):
        return np.array(listed, dtype=np.int64)
    kinds = sorted({type(document).__name__ for document in listed})
    raise TypeError(f"documents are {', '.join(kinds)}; give a name (str) or a whole number for every text.")


def document_draws(documents: int, draws: int, seed: int) -> Float64[np.ndarray, "draw document"]:
    """How often each document counts in each draw of a bootstrap over documents."""
    shares = np.full(documents, 1 / documents)
    return np.random.default_rng(seed).multinomial(documents, shares, size=draws).astype(float)


def _number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1

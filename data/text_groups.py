"""Group keys that keep twins together: equal texts, near-equal texts and snippets of one document share a group.

    group = connected component of: rows as nodes; an edge where two rows have (a) the same document, (b) the same
    normalised text, or (c) word sets A, B with |A and B| / |A or B| >= similarity

A split that lets a sentence's twin into the other side measures memory, not the concept. Normalised: Unicode NFKC,
case folded, everything but letters, digits and underscores dropped; a text without any ("!") is compared as it stands.
(c) is the Jaccard similarity of word sets, for texts of at least `minimum_words` different words: short texts are
alike by chance. Beware: components chain (A like B like C puts A with C). Look at the largest: a giant one means that
`similarity` is too low for these texts.
"""

import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

import numpy as np
import pandas as pd
from jaxtyping import Int64
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components


def normalised_text(text: str) -> str:
    """The text's words, case folded and joined by single spaces; the stripped text itself if it has no word."""
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(words) if words else text.strip()


def text_groups(
    texts: Sequence[str],
    *,
    documents: Sequence[Hashable] | None = None,
    similarity: float | None = 0.8,
    minimum_words: int = 4,
) -> Int64[np.ndarray, " text"]:
    """A group number for each text, 0, 1, ... in order of first appearance.

    documents: each row's source (review, article, speaker); rows of one source share a group. similarity: the word-set
    similarity, in (0, 1], from which two texts are twins; None joins equal normalised texts only.
    Raises ValueError for a document list of another length or a similarity out of range.
    """
    if documents is not None and len(documents) != len(texts):
        raise ValueError(f"{len(documents)} documents for {len(texts)} texts. Give one document per text.")
    if similarity is not None and not 0 < similarity <= 1:
        raise ValueError(f"similarity is {similarity}. Give a share of common words above 0 and up to 1, or None.")
    normalised = [normalised_text(text) for text in texts]
    edges = [_chain(pd.factorize(np.asarray(normalised, dtype=object))[0])]
    if documents is not None:
        edges.append(_chain(pd.factorize(pd.Series(list(documents), dtype=object))[0]))
    if similarity is not None:
        edges.append(_similar_pairs(normalised, similarity, minimum_words))
    first, second = np.concatenate(edges, axis=1)
    graph = coo_array((np.ones(len(first), dtype=np.int8), (first, second)), shape=(len(texts), len(texts)))
    return pd.factorize(connected_components(graph, directed=False)[1])[0].astype(np.int64)


def _chain(keys: np.ndarray) -> np.ndarray:
    """Edges `[2, edge]` that link the rows of each key in a chain: as connected as all pairs, but linear in rows."""
    order = np.argsort(keys, kind="stable")
    same = keys[order][1:] == keys[order][:-1]
    return np.stack([order[:-1][same], order[1:][same]])


def _similar_pairs(normalised: list[str], similarity: float, minimum_words: int) -> np.ndarray:
    """Row pairs `[2, pair]` whose word sets are alike.

    Exact, by prefix filtering (Chaudhuri, Ganti, Kaushik 2006, "A primitive operator for similarity joins", section 4):
    with every set's words ordered from rare to frequent, two sets of Jaccard similarity t share a word among the first
    n - ceil(t n) + 1 of each, so that only rows with a rare word in common are compared.
    """
    sets = [set(text.split()) for text in normalised]
    frequency = Counter(word for words in sets for word in words)
    seen: dict[str, list[int]] = defaultdict(list)
    pairs: list[tuple[int, int]] = []
    for row, words in enumerate(sets):
        if len(words) < minimum_words:
            continue
        # the small subtraction keeps t * n = 4.000000001 from dropping a word that the filter needs
        prefix = len(words) - math.ceil(similarity * len(words) - 1e-9) + 1
        candidates = set()
        for word in sorted(words, key=lambda word: (frequency[word], word))[:prefix]:
            candidates.update(seen[word])
            seen[word].append(row)
        for other in candidates:
            common = len(words & sets[other])
            if common >= similarity * (len(words) + len(sets[other]) - common) - 1e-9:
                pairs.append((other, row))
    return np.array(pairs, dtype=np.int64).reshape(-1, 2).T

"""What a written text is like, without a model: variety, repetition, emptiness.

    distinct_n = different n-grams / n-grams          repetition = share of n-grams that stood in the text before

over lower-cased words (split at white space). A text of fewer than n words has no n-grams: NaN, left out of means.
Source: distinct-n after Li et al. (2016), "A Diversity-Promoting Objective Function", NAACL, section 5.
"""

from collections.abc import Sequence

import pandas as pd


def ngrams(words: Sequence[object], n: int) -> list[tuple[object, ...]]:
    """Runs of n neighbours."""
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def distinct(words: Sequence[object], n: int) -> float:
    """Different n-grams over all n-grams; NaN where there are none."""
    found = ngrams(words, n)
    return len(set(found)) / len(found) if found else float("nan")


def longest_loop(words: Sequence[object]) -> int:
    """Words at the end of the text that repeat what stood a period before them, for the best of all periods."""
    best = 0
    for period in range(1, len(words) // 2 + 1):
        length = 0
        while length < len(words) - period and words[-1 - length] == words[-1 - length - period]:
            length += 1
        best = max(best, length if length >= period else 0)
    return best


def text_measures(completions: Sequence[str]) -> pd.DataFrame:
    """A row per text: n_words, empty, distinct_1, distinct_2, distinct_3, repetition (of 3-grams), loop (words)."""
    rows = []
    for text in completions:
        words = text.lower().split()
        rows.append(
            {
                "n_words": len(words),
                "empty": not words,
                **{f"distinct_{n}": distinct(words, n) for n in (1, 2, 3)},
                "repetition": 1 - distinct(words, 3),
                "loop": longest_loop(words),
            }
        )
    return pd.DataFrame(rows)


def pooled_distinct(completions: Sequence[str], n: int) -> float:
    """Different n-grams over n-grams of all texts together: what is reported of a condition as Dist-n."""
    found = [gram for text in completions for gram in ngrams(text.lower().split(), n)]
    return len(set(found)) / len(found) if found else float("nan")

"""What a steering run is about: labelled texts to find a direction in, prompts to steer, neutral text to pay with.

Groups (documents, near twins) are divided by hash into fit, validation and test, so that no prompt comes from a group
that a direction was found in:

    contrast   fit texts of the domains the direction is found in
    other      fit texts of the other domains, for a probe that has seen none of the contrast's sources
    prompts    openings of validation ("dev") and test texts, as many of either class
    neutral    English passages of other sources, for KL and cross-entropy
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from microtome.data.plain_english import plain_english
from microtome.data.sentiment import sentiment
from microtome.lenses.document_shards import SHARES, DocumentShards
from microtome.lenses.documents import document_numbers

SPLIT_OF_SHARD = {"validation": "dev", "test": "test"}
POSITIVE_WORDS = ("good", "great", "wonderful", "excellent", "beautiful", "love", "happy", "best")
NEGATIVE_WORDS = ("bad", "terrible", "awful", "horrible", "ugly", "hate", "sad", "worst")


@dataclass(frozen=True, eq=False)
class SteeringTask:
    """Data of one steering question.

    Attributes:
        name: of the data.
        contrast, other: text, label (True is wanted), group.
        prompts: by "dev" and "test": text, label (of the text it opens), group.
        neutral: passages.
        names: what True and False show.
        words: attribute words of the two.
    """

    name: str
    contrast: pd.DataFrame
    other: pd.DataFrame
    prompts: Mapping[str, pd.DataFrame]
    neutral: list[str]
    names: tuple[str, str] = ("positive", "negative")
    words: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def texts(self, label: bool) -> list[str]:
        """Contrast texts of one class."""
        return self.contrast.loc[self.contrast["label"] == label, "text"].tolist()

    def groups(self, label: bool) -> list[int]:
        """Their groups."""
        return self.contrast.loc[self.contrast["label"] == label, "group"].tolist()


def opening(text: str, words: int) -> str:
    """The first words of a text."""
    return " ".join(text.split()[:words])


def split_task(
    table: pd.DataFrame,
    *,
    name: str,
    contrast: int = 400,
    other: pd.DataFrame | None = None,
    prompts: int = 100,
    dev_prompts: int = 40,
    words: int = 6,
    neutral: Sequence[str] | None = None,
    names: tuple[str, str] = ("positive", "negative"),
    attribute_words: tuple[Sequence[str], Sequence[str]] = ((), ()),
    seed: int = 0,
) -> SteeringTask:
    """A task from a table of texts with a label of two classes and a group.

    Args:
        table: text, label (bool), group.
        contrast: texts for the direction at most, as many of either class.
        other: texts of other sources, for the independent probe; those of the table's fit shard if left out.
        prompts, dev_prompts: how many openings, as many of either class.
        words: of an opening; texts of fewer than two words more are left out.
        neutral: passages; English of other sources (40 of them) if left out.
        names: of the True and the False class.
        attribute_words: of either class.

    Raises:
        ValueError: a column that is missing, one class, too few texts in a shard.
    """
    if missing := {"text", "label", "group"} - set(table.columns):
        raise ValueError(f"The table lacks {', '.join(sorted(missing))}. Give text, label (True is wanted) and group.")
    table = table.assign(label=table["label"].astype(bool)).reset_index(drop=True)
    shard = shards_of_groups(table["group"].tolist(), seed)
    fit = table[shard == "fit"]
    found = {"contrast": _balanced(fit, contrast, seed, f"{name}: texts to find a direction in")}
    if other is None:
        rest = fit.drop(found["contrast"].index)
        found["other"] = rest[~rest["group"].isin(found["contrast"]["group"])]
    else:
        found["other"] = other
    held = {}
    for part, split in SPLIT_OF_SHARD.items():
        some = table[(shard == part) & (table["text"].str.split().str.len() >= words + 2)]
        count = prompts if split == "test" else dev_prompts
        chosen = _balanced(some, count, seed, f"{name}: texts for {count} {split} prompts")
        held[split] = chosen.assign(text=[opening(text, words) for text in chosen["text"]]).reset_index(drop=True)
    passages = neutral_passages(40, seed=seed) if neutral is None else list(neutral)
    positive, negative = attribute_words
    return SteeringTask(
        name,
        found["contrast"].reset_index(drop=True),
        found["other"].reset_index(drop=True),
        held,
        passages,
        names,
        (tuple(positive), tuple(negative)),
    )


def sentiment_task(
    *, contrast: int = 400, prompts: int = 100, dev_prompts: int = 40, words: int = 6, seed: int = 0
) -> SteeringTask:
    """Negative to positive: directions from tweets and film snippets, the independent probe's texts from products and
    editorials, prompts from tweets and films of other groups."""
    table = sentiment(["tweets", "movie"], per_domain=2000, seed=seed)
    other = sentiment(["amazon", "nyt"], per_domain=600, seed=seed)
    return split_task(
        table,
        name="sentiment",
        contrast=contrast,
        other=other.assign(label=other["label"].astype(bool))[["text", "label", "group"]],
        prompts=prompts,
        dev_prompts=dev_prompts,
        words=words,
        attribute_words=(POSITIVE_WORDS, NEGATIVE_WORDS),
        seed=seed,
    )


def neutral_passages(count: int, *, characters: int = 500, seed: int = 0) -> list[str]:
    """Passages of books, news and articles that no direction was found in, equally many of each source."""
    sources = ("brown", "encyclopedia", "news")
    table = plain_english(characters=200_000, split="validation", sources=sources, seed=seed)
    table = table[table["text"].str.len() >= characters]
    chosen = table.sample(frac=1, random_state=seed).groupby("source").head(-(-count // len(sources)))
    return [text[:characters].rsplit(" ", 1)[0] for text in chosen["text"]][:count]


def shards_of_groups(groups: Sequence[object], seed: int) -> np.ndarray:
    """fit, validation or test for every row, by its group."""
    split = DocumentShards.of(SHARES, seed=seed)
    return np.array([split.names[number] for number in split.numbers(document_numbers(groups, len(groups)).tolist())])


def _balanced(table: pd.DataFrame, count: int, seed: int, what: str) -> pd.DataFrame:
    """So many rows at random, half of them of either class, in their order."""
    drawn = table.sample(frac=1, random_state=seed)
    parts = [drawn[drawn["label"] == label].head(count // 2) for label in (True, False)]
    least = min(len(part) for part in parts)
    if least < 2:
        raise ValueError(f"{what}: {least} of one class. Give more texts of both classes, in more groups.")
    return pd.concat([part.head(least) for part in parts]).sort_index()

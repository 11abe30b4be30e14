"""The data sets by name: what each holds, a draw from it, and its state in the cache.

    data = load_data("cities", texts=500)
    capture(model, data.texts, sites, labels=data.labels, token_labels=data.token_labels)

A draw takes texts at random (whole blocks of true and false statements), with as many of both classes where the set's
first label is binary; a smaller draw is contained in a larger one of the same seed. Rows stay in the set's order.
Beware: a draw may cut groups; split by the group column all the same.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from microtome.data.brown import BROWN_TABLE, brown_sentences, word_labels
from microtome.data.cached_tables import CachedTable
from microtome.data.cities import CITIES_TABLE, cities
from microtome.data.computed_labels import line_left, line_position, token_length
from microtome.data.elements import ELEMENTS_TABLE, elements
from microtome.data.gensim_texts import ENCYCLOPEDIA_TABLE, NEWS_TABLE
from microtome.data.gutenberg import GUTENBERG_TABLE
from microtome.data.lines import lines
from microtome.data.plain_english import plain_english
from microtome.data.questions import QUESTIONS_TABLE, questions
from microtome.data.registry import Archive, fetch
from microtome.data.sentiment import SENTIMENT_TABLE, sentiment
from microtome.data.table import table_sha256
from microtome.data.toy import toy_sentiment

TokenLabels = Mapping[str, Callable | list]


def _no_token_labels(_: pd.DataFrame) -> TokenLabels:
    return {}


@dataclass(frozen=True)
class DataSet:
    """One set. says: what it is, in a sentence. rows: how many texts it has. labels: its label columns and what they
    are, the default one first. token_labels: the same for labels of tokens. group: the column to split by.
    draws_groups: whether a draw takes whole groups, because each is balanced as a whole. licence: of the texts. tables:
    the parsed tables that it is made of, none if it is generated. read: gives all texts.
    read_token_labels: gives the token labels of these texts, as `capture` takes them.
    """

    name: str
    says: str
    rows: int
    labels: Mapping[str, str]
    licence: str
    read: Callable[[], pd.DataFrame]
    tables: tuple[CachedTable, ...] = ()
    token_labels: Mapping[str, str] = field(default_factory=dict)
    read_token_labels: Callable[[pd.DataFrame], TokenLabels] = _no_token_labels
    group: str = "group"
    draws_groups: bool = False

    @property
    def archives(self) -> tuple[Archive, ...]:
        """The archives that are fetched for it."""
        return tuple(dict.fromkeys(table.archive for table in self.tables))


@dataclass(frozen=True)
class LabelledTexts:
    """Texts drawn from a set.

    table: the columns text, the group, the labels and further keys. token_labels: as `capture` takes them; empty for
    most sets. facts: where they come from and what they are, JSON-able: name, archives with hashes, licence, rows of
    the whole set, texts drawn, seed, classes (texts of each value of the default label), groups, table_sha256.
    """

    name: str
    table: pd.DataFrame
    token_labels: TokenLabels
    facts: dict

    def __repr__(self) -> str:
        labels = ", ".join([*self.table.columns.drop("text"), *(f"{name} (per token)" for name in self.token_labels)])
        return f"LabelledTexts({self.name}: {len(self.table):,} texts in {self.facts['groups']:,} groups; {labels})"

    @property
    def texts(self) -> list[str]:
        """The texts, in the table's order."""
        return self.table["text"].tolist()

    @property
    def labels(self) -> pd.DataFrame:
        """The table without the texts: what `capture` takes as labels."""
        return self.table.drop(columns="text")


@dataclass(frozen=True)
class DataStatus:
    """is_cached: whether `load_data` needs no network. bytes: what its archives and tables take on disk."""

    name: str
    is_cached: bool
    bytes: int
    archives: tuple[Archive, ...]


def load_data(name: str, *, texts: int | None = None, seed: int = 0) -> LabelledTexts:
    """`texts` texts of the set (default: all), fetched and parsed first if it is not in the cache.

    Raises KeyError for an unknown name, ValueError for fewer than 1 text or more than there are, and what `fetch`
    raises.
    """
    data_set = _known(name)
    table = data_set.read()
    if texts is not None and not 1 <= texts <= len(table):
        raise ValueError(f"texts is {texts}, but {name} has {len(table)}. Give 1 to {len(table)}, or None for all.")
    default = next(iter(data_set.labels))
    groups = table[data_set.group] if data_set.draws_groups else None
    rows = np.arange(len(table)) if texts is None else draw(table[default], texts, seed, groups=groups)
    first = ["text", data_set.group, *data_set.labels]
    chosen = table.iloc[rows].reset_index(drop=True)
    chosen = chosen[[*first, *(column for column in table.columns if column not in first)]]
    facts = {
        "name": name,
        "archives": [vars(archive) for archive in data_set.archives],
        "licence": data_set.licence,
        "rows": len(table),
        "texts": len(chosen),
        "seed": seed,
        "classes": {str(value): int(count) for value, count in chosen[default].value_counts(sort=False).items()},
        "groups": int(chosen[data_set.group].nunique()),
        "table_sha256": table_sha256(chosen),
    }
    return LabelledTexts(name, chosen, data_set.read_token_labels(chosen), facts)


def draw(labels: pd.Series, count: int, seed: int, *, groups: pd.Series | None = None) -> np.ndarray:
    """`count` row numbers, ascending. Of two classes equally many (up to one), as long as there are.

    groups: keys of rows that come together, but for the last ones. Rows whose groups hold as many of both classes, such
    as blocks of true and false statements, then stay balanced word by word; drawn one by one they would not be.
    """
    codes = np.arange(len(labels)) if groups is None else pd.factorize(groups)[0]
    rank = np.random.default_rng(seed).permutation(codes.max() + 1)
    order = np.argsort(rank[codes], kind="stable")
    if labels.nunique() == 2:
        classes = pd.factorize(labels, sort=True)[0][order]
        place = pd.Series(classes).groupby(classes).cumcount().to_numpy()
        order = order[np.lexsort((classes, place))]
    return np.sort(order[:count])


def data_status(name: str) -> DataStatus:
    """Whether the set is in the cache, and how large; no network. Raises KeyError for an unknown name."""
    data_set = _known(name)
    is_cached = all(table.path.exists() or table.archive_path.exists() for table in data_set.tables)
    paths = {path for table in data_set.tables for path in (table.archive_path, table.path) if path.exists()}
    return DataStatus(name, is_cached, sum(path.stat().st_size for path in paths), data_set.archives)


def fetch_data(name: str) -> DataStatus:
    """Fetch and parse what is not in the cache yet; afterwards the set needs no network.

    Raises KeyError for an unknown name, and what `fetch` raises.
    """
    for table in _known(name).tables:
        fetch(table.archive)
        table.read()
    return data_status(name)


def verify_data(name: str) -> DataStatus:
    """Hash the archives, parse them again, compare with the cached tables, and count the rows; no network.

    Raises KeyError for an unknown name, and ValueError that says what is missing or wrong.
    """
    data_set = _known(name)
    for table in data_set.tables:
        table.verify()
    rows = len(data_set.read())
    if rows != data_set.rows:
        raise ValueError(f"{name} has {rows} texts, but {data_set.rows} are expected of this version of Microtome.")
    return data_status(name)


def _known(name: str) -> DataSet:
    if name not in DATA_SETS:
        near = difflib.get_close_matches(name, DATA_SETS, n=3, cutoff=0.6)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise KeyError(f"there is no data set {name!r}; there are {', '.join(DATA_SETS)}.{hint}")
    return DATA_SETS[name]


def _toy() -> pd.DataFrame:
    return toy_sentiment(1440)


def _length_of_tokens(_: pd.DataFrame) -> TokenLabels:
    return {"token_length": token_length}


def _plain_english() -> pd.DataFrame:
    return plain_english(passage=2000).rename(columns={"document": "group"})


def _brown_token_labels(texts: pd.DataFrame) -> TokenLabels:
    of_words = {label: word_labels(label, texts["sentence"].tolist()) for label in ("pos", "tag")}
    return of_words | {"token_length": token_length}


def _line_token_labels(_: pd.DataFrame) -> TokenLabels:
    return {"line_position": line_position, "line_left": line_left, "token_length": token_length}


_TRUE = {"label": "whether the statement is true"}
_TOKEN_LENGTH = {"token_length": "characters of the token, without white space at its ends"}
_BROWN_LICENCE = 'package MIT; corpus "redistribution permitted"'

DATA_SETS: dict[str, DataSet] = {
    data_set.name: data_set
    for data_set in (
        DataSet(
            name="sentiment",
            says="Tweets, film and product reviews and editorials with human sentiment ratings.",
            rows=17010,
            labels={
                "label": "whether the mean rating is above 0",
                "rating": "mean of 20 raters, -4 to 4; none between -0.5 and 0.5",
                "domain": "tweets, movie, amazon or nyt",
            },
            licence="MIT",
            read=sentiment,
            tables=(SENTIMENT_TABLE,),
        ),
        DataSet(
            name="toy",
            says="Generated sentences with a positive or negative adjective; needs no download.",
            rows=1440,
            labels={"label": "whether the adjective is positive"},
            licence="generated, Apache-2.0",
            read=_toy,
        ),
        DataSet(
            name="cities",
            says="True and false statements on the country of 1,018 large cities, words balanced.",
            rows=2036,
            labels=_TRUE,
            licence="GeoNames, CC BY 4.0; package MIT",
            read=cities,
            draws_groups=True,
            tables=(CITIES_TABLE,),
        ),
        DataSet(
            name="elements",
            says="True and false statements on 114 chemical elements, words balanced.",
            rows=912,
            labels=_TRUE | {"relation": "atomic_number, period, block or series"},
            licence="MIT",
            read=elements,
            draws_groups=True,
            tables=(ELEMENTS_TABLE,),
        ),
        DataSet(
            name="questions",
            says="Questions by the kind of answer they ask for (TREC).",
            rows=5380,
            labels={"kind": "ABBR, DESC, ENTY, HUM, LOC or NUM", "fine": "50 finer classes"},
            licence="package MIT; nothing stated on the questions",
            read=questions,
            tables=(QUESTIONS_TABLE,),
        ),
        DataSet(
            name="brown",
            says="Sentences of the Brown corpus with the part of speech of every word.",
            rows=56692,
            labels={"genre": "15 genres, the same for all sentences of a document"},
            licence=_BROWN_LICENCE,
            read=brown_sentences,
            tables=(BROWN_TABLE,),
            token_labels={"pos": "12 universal parts of speech", "tag": "Brown's own tag"} | _TOKEN_LENGTH,
            read_token_labels=_brown_token_labels,
        ),
        DataSet(
            name="lines",
            says="Prose of the Brown corpus wrapped at widths from 15 to 150 characters.",
            rows=6595,
            labels={"width": "the width at which the text is wrapped"},
            licence=_BROWN_LICENCE,
            read=lines,
            tables=(BROWN_TABLE,),
            token_labels={
                "line_position": "characters since the last newline",
                "line_left": "characters to the end of the line",
            }
            | _TOKEN_LENGTH,
            read_token_labels=_line_token_labels,
        ),
        DataSet(
            name="english",
            says="Passages of novels, Brown, Wikipedia, editorials, news and reviews, for fitting lenses.",
            rows=9716,
            labels={
                "source": "gutenberg, brown, encyclopedia, editorials, news or reviews",
                "split": "fit, validation or test, by document",
            },
            licence="public domain; brown, MIT, LGPL-2.1; encyclopedia CC BY-SA 3.0",
            read=_plain_english,
            tables=(GUTENBERG_TABLE, BROWN_TABLE, ENCYCLOPEDIA_TABLE, SENTIMENT_TABLE, NEWS_TABLE),
            token_labels=_TOKEN_LENGTH,
            read_token_labels=_length_of_tokens,
        ),
    )
}

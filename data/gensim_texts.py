"""News items and encyclopaedia articles from the test data of gensim: modern English prose with names and facts.

Source: PyPI's gensim 4.4.0 (LGPL-2.1), fetched by name on first use (28 MB), checked and cached; nothing of it is
committed here. Of the wheel only single members are read, never its code.

news: Lee, Pincombe and Welsh (2005), "An Empirical Evaluation of Models of Text Document Similarity": 300 short items
of the Australian Broadcasting Corporation from 2000 and 2001, of which 293 are unlike each other.
encyclopedia: articles of the English Wikipedia of 2016 (CC BY-SA 3.0) whose names begin with A for the most part,
without redirects, disambiguation pages and lists; markup is taken away by `wikitext`.
"""

import bz2
import re
import zipfile
from functools import partial
from pathlib import Path

import pandas as pd

from microtome.data.cached_tables import CachedTable, check_rows
from microtome.data.registry import Archive
from microtome.data.wikitext import plain_wikitext

GENSIM_ARCHIVE = Archive(
    package="gensim",
    version="4.4.0",
    filename="gensim-4.4.0-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl",
    sha256="91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8",
)
TEST_DATA = "gensim/test/test_data/"
LEAST_CHARACTERS = 1000


def news() -> pd.DataFrame:
    """The items in file order: item (int, its line), text (str). Raises what `fetch` raises."""
    return NEWS_TABLE.read()


def encyclopedia() -> pd.DataFrame:
    """The articles in file order: title (str), text (str, headings and paragraphs apart by an empty line).

    Raises what `fetch` raises.
    """
    return ENCYCLOPEDIA_TABLE.read()


def parse_pages(dump: str) -> pd.DataFrame:
    """The articles of a MediaWiki export that are prose of LEAST_CHARACTERS and more."""
    rows = []
    for page in re.findall(r"<page>.*?</page>", dump, flags=re.DOTALL):
        title = re.search(r"<title>(.*?)</title>", page)
        markup = re.search(r"<text\b[^>]*>(.*?)</text>", page, flags=re.DOTALL)
        if title is None or markup is None or re.match(r"\s*#redirect", markup[1], flags=re.IGNORECASE):
            continue
        is_list = "(disambiguation)" in title[1] or title[1].startswith("List of")
        text = plain_wikitext(markup[1])
        if not is_list and len(text) >= LEAST_CHARACTERS:
            rows.append((title[1], text))
    return pd.DataFrame(rows, columns=["title", "text"])


def _parse_news(path: Path) -> pd.DataFrame:
    with zipfile.ZipFile(path) as wheel:
        lines = wheel.read(f"{TEST_DATA}lee_background.cor").decode("utf-8").splitlines()
    table = pd.DataFrame({"item": range(len(lines)), "text": [line.strip() for line in lines]})
    return table.drop_duplicates("text", ignore_index=True)


def _parse_encyclopedia(path: Path) -> pd.DataFrame:
    with zipfile.ZipFile(path) as wheel:
        raw = wheel.read(f"{TEST_DATA}enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2")
    return parse_pages(bz2.decompress(raw).decode("utf-8"))


NEWS_TABLE = CachedTable(
    name="news",
    archive=GENSIM_ARCHIVE,
    version=1,
    parse=_parse_news,
    check=partial(check_rows, rows=293, release=GENSIM_ARCHIVE.requirement),
)
ENCYCLOPEDIA_TABLE = CachedTable(
    name="encyclopedia",
    archive=GENSIM_ARCHIVE,
    version=1,
    parse=_parse_encyclopedia,
    check=partial(check_rows, rows=94, release=GENSIM_ARCHIVE.requirement),
)

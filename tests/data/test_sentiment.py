import io
import sys
import tarfile
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from microtome.data.registry import file_sha256
from microtome.data.sentiment import (
    DOMAINS,
    SENTIMENT_ARCHIVE,
    SENTIMENT_TABLE,
    parse_ground_truth,
    sentiment,
    sentiment_ratings,
)
from microtome.data.text_groups import normalised_text


def parse(*lines: str) -> pd.DataFrame:
    return parse_ground_truth("\r\n".join(lines).encode("utf-8"), name="some.txt")


def test_parse_keeps_everything_but_entities_and_ends():
    table = parse("1_2\t-0.15\tTom &amp; Jerry &lt;3  two spaces ", "2\t4\tMünch's caf&eacute; – that&amp;#39;s it")
    assert table.to_dict("list") == {
        "id": ["1_2", "2"],
        "rating": [-0.15, 4.0],
        "text": ["Tom & Jerry <3  two spaces", "Münch's café – that's it"],
    }


@pytest.mark.parametrize("text", ["this&nothing", "AT&T", "a & b; c", "&unknown; word", "R&amp;D"])
def test_only_whole_entities_are_replaced(text):
    assert parse(f"1\t0\t{text}")["text"][0] == text.replace("&amp;", "&")


@pytest.mark.parametrize("end", ["", "\r\n", "\n"])
def test_line_ends(end):
    assert len(parse_ground_truth(f"1\t0\ta\r\n2\t1\tb{end}".encode(), name="some.txt")) == 2


@pytest.mark.parametrize(
    "line", ["2\t1.0", "2\tgood\ttext", "2\t4.5\ttext", "2\t1\ta\tb", "2\t1\t ", "", "2\tnan\ttext", "\t1\ttext"]
)
def test_malformed_lines_are_named(line):
    with pytest.raises(ValueError, match=r"some\.txt, line 2: .* is not `id <tab> rating"):
        parse("1\t0\tfine", line, "3\t0\tfine")


def test_latin_1_is_refused_with_its_line():
    with pytest.raises(ValueError, match=r"some\.txt, line 2: not UTF-8"):
        parse_ground_truth("1\t0\tfine\n2\t1\tcafé\n".encode("latin-1"), name="some.txt")


def test_unknown_domains():
    for domains in (["films"], [], ["nyt", "nyt"], "movie"):
        with pytest.raises(ValueError, match=r"Give a list of one or more of \['tweets', 'movie', 'amazon', 'nyt'\]"):
            sentiment_ratings(domains)


ROWS = {"tweets": 4200, "movieReviewSnippets": 10605, "amazonReviewSnippets": 3708, "nytEditorialSnippets": 5190}


def ground_truth(stem: str, rows: int) -> bytes:
    """Distinct texts, twice as many positive as negative, a tenth of them exactly neutral, five snippets a document."""
    lines = []
    for row in range(rows):
        rating = 0.0 if row % 10 == 9 else (-1) ** (row % 3 == 0) * (0.1 + row % 39 / 10)
        number = f"{row // 5}_{row % 5}" if stem[0] in "an" else str(row)
        lines.append(f"{number}\t{rating}\t{stem} word{row} &amp; other{row} third{row} fourth{row}")
    return "\r\n".join(lines).encode()


def tar_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def expect_hash(monkeypatch, sha256: str) -> None:
    # by sys.modules: microtome.data.sentiment, as an attribute, is the function
    module = sys.modules["microtome.data.sentiment"]
    archive = replace(SENTIMENT_ARCHIVE, sha256=sha256)
    monkeypatch.setattr(module, "SENTIMENT_TABLE", replace(SENTIMENT_TABLE, archive=archive))


def place_archive(cache, monkeypatch, rows: dict[str, int]) -> None:
    """Put an archive built like the real one into the cache, and make the module expect its hash."""
    files = {f"hutto_ICWSM_2014/{stem}_GroundTruth.txt": ground_truth(stem, count) for stem, count in rows.items()}
    path = cache / "archives" / SENTIMENT_ARCHIVE.filename
    path.parent.mkdir(parents=True)
    path.write_bytes(tar_of({"vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz": tar_of(files)}))
    expect_hash(monkeypatch, file_sha256(path))
    monkeypatch.setenv("MICROTOME_CACHE", str(cache))


@pytest.fixture(scope="module")
def look_alike_cache(tmp_path_factory):
    """The cached table of an archive with the real one's files and row counts, but made-up content."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as monkeypatch:
        place_archive(cache, monkeypatch, ROWS)
        sentiment_ratings(["nyt"])
    return cache


@pytest.fixture
def look_alike(look_alike_cache, monkeypatch):
    expect_hash(monkeypatch, file_sha256(look_alike_cache / "archives" / SENTIMENT_ARCHIVE.filename))
    monkeypatch.setenv("MICROTOME_CACHE", str(look_alike_cache))
    return look_alike_cache


@pytest.mark.usefixtures("look_alike")
def test_ratings_have_every_row_of_the_domains_in_order():
    table = sentiment_ratings()
    assert list(table.columns) == ["id", "text", "rating", "domain", "document", "group"]
    assert table.groupby("domain", sort=False).size().to_dict() == dict(zip(DOMAINS, ROWS.values(), strict=True))
    assert table["id"].is_unique
    assert (table["rating"] == 0).any()
    assert table["text"][0] == "tweets word0 & other0 third0 fourth0"
    pd.testing.assert_frame_equal(
        sentiment_ratings(["nyt", "tweets"]),
        pd.concat([table[table["domain"] == domain] for domain in ("nyt", "tweets")], ignore_index=True),
    )


@pytest.mark.usefixtures("look_alike")
def test_documents_and_groups():
    table = sentiment_ratings()
    assert table.loc[table["id"] == "nyt:3_4", "document"].item() == "nyt:3"
    assert table.loc[table["id"] == "movie:34", "document"].item() == "movie:34"
    # every text is different here, so that groups are documents
    assert (table.groupby("document")["group"].nunique() == 1).all()
    assert table["group"].nunique() == table["document"].nunique()


@pytest.mark.usefixtures("look_alike")
def test_binary_rows_are_clear_and_balanced():
    ratings = sentiment_ratings()
    table = sentiment()
    assert list(table.columns) == ["id", "text", "rating", "label", "domain", "document", "group"]
    assert table["label"].dtype == bool
    assert (table["label"] == (table["rating"] > 0)).all()
    assert table["rating"].abs().min() >= 0.5
    assert (table.groupby("domain")["label"].mean() == 0.5).all()
    rest = sentiment(balanced=False)
    assert len(rest) == (ratings["rating"].abs() >= 0.5).sum() > len(table)
    assert set(rest.loc[~rest["label"], "id"]) == set(table.loc[~table["label"], "id"])
    assert len(sentiment(minimum_rating=0.0, balanced=False)) == (ratings["rating"] != 0).sum()
    assert list(table.index) == list(range(len(table)))


@pytest.mark.usefixtures("look_alike")
def test_draws_are_nested_and_independent_of_the_other_domains():
    small, large = sentiment(per_domain=20, seed=3), sentiment(per_domain=60, seed=3)
    assert small.groupby("domain").size().eq(20).all()
    assert (small.groupby("domain")["label"].sum() == 10).all()
    assert set(small["id"]) < set(large["id"])
    alone = sentiment(["amazon"], per_domain=20, seed=3)
    pd.testing.assert_frame_equal(alone, small[small["domain"] == "amazon"].reset_index(drop=True))
    pd.testing.assert_frame_equal(sentiment(per_domain=20, seed=3), small)
    assert set(sentiment(per_domain=20, seed=4)["id"]) != set(small["id"])
    order = sentiment_ratings()["id"].tolist()
    assert np.all(np.diff([order.index(name) for name in small["id"]]) > 0)


@pytest.mark.usefixtures("look_alike")
def test_impossible_draws():
    for wrong in (0, 1, 7):
        with pytest.raises(ValueError, match=f"per_domain is {wrong}. Give 2 or more, and an even number"):
            sentiment(per_domain=wrong)
    assert len(sentiment(["nyt"], per_domain=7, balanced=False)) == 7
    with pytest.raises(ValueError, match=r"per_domain is 9000, but tweets has \d+ balanced rows"):
        sentiment(per_domain=9000)
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="minimum_rating is"):
            sentiment(minimum_rating=wrong)


def test_a_damaged_cached_table_is_an_error(look_alike):
    (path,) = (look_alike / "tables").iterdir()
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[:1000])
        with pytest.raises(ValueError, match=r"cannot be read .* Delete it: it is rebuilt"):
            sentiment_ratings()
    finally:
        path.write_bytes(whole)


def test_an_archive_with_other_row_counts_is_refused_and_not_cached(tmp_path, monkeypatch):
    place_archive(tmp_path, monkeypatch, ROWS | {"tweets": 4199})
    with pytest.raises(ValueError, match=r"row counts \{'tweets': 4199, .*3\.3\.2 has \{'tweets': 4200"):
        sentiment_ratings()
    assert list((tmp_path / "tables").iterdir()) == []


@pytest.mark.slow
@pytest.mark.network
def test_the_real_archive(empty_cache):
    table = sentiment_ratings()
    assert len(table) == 23703
    assert file_sha256(empty_cache / "archives" / SENTIMENT_ARCHIVE.filename) == SENTIMENT_ARCHIVE.sha256
    signs = {domain: np.sign(table.loc[table["domain"] == domain, "rating"]).value_counts() for domain in DOMAINS}
    assert {domain: (count[1.0], count[-1.0]) for domain, count in signs.items()} == {
        "tweets": (2897, 1299),
        "movie": (5242, 5326),
        "amazon": (2128, 1482),
        "nyt": (2204, 2742),
    }
    assert table.groupby("domain")["document"].nunique()[["amazon", "nyt"]].tolist() == [300, 498]
    assert not table["text"].str.contains(r"&(?:#\d+|\w+);", regex=True).any()
    assert table["text"].str.contains("Almodóvar").any()
    # no twin and no document lies in two groups, and the largest group stays small
    assert table["group"].nunique() == 15397
    assert table["group"].value_counts().max() == 77
    assert (table.groupby("document")["group"].nunique() == 1).all()
    assert (table.groupby(table["text"].map(normalised_text))["group"].nunique() == 1).all()
    assert sentiment().groupby("domain").size().to_dict() == {
        "tweets": 2174,
        "movie": 9992,
        "amazon": 2470,
        "nyt": 2374,
    }

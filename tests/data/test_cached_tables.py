import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest

from microtome.data.cached_tables import CachedTable, check_rows
from microtome.data.registry import Archive


def parse(path: Path) -> pd.DataFrame:
    rows = path.read_text().split("\n")
    return pd.DataFrame({"text": rows, "lengths": [[len(row)] for row in rows]})


def check(table: pd.DataFrame, where: Path) -> None:
    check_rows(table, where, rows=3, release="some-text 1.0")


def table_of(content: str, version: int = 1) -> CachedTable:
    sha256 = hashlib.sha256(content.encode()).hexdigest()
    return CachedTable("some", Archive("some-text", "1.0", "some.whl", sha256), version, parse, check)


def place(cache: Path, content: str) -> Path:
    path = cache / "archives" / "some.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def test_parsed_once_then_read_without_the_archive(cache, network_attempts):
    path = place(cache, "a\nb\nc")
    table = table_of("a\nb\nc")
    assert table.read()["text"].tolist() == ["a", "b", "c"]
    path.unlink()
    assert list(table.read(["lengths"]).columns) == ["lengths"]
    assert [file.name for file in table.path.parent.iterdir()] == [table.path.name]
    assert table.path.name == f"some-{table.archive.sha256[:12]}-1.parquet"
    assert not network_attempts


def test_another_version_or_archive_is_another_file(cache):
    place(cache, "a\nb\nc")
    assert len({table_of("a\nb\nc").path, table_of("a\nb\nc", version=2).path, table_of("a\nb\nd").path}) == 3


def test_several_at_once(cache):
    place(cache, "a\nb\nc")
    table = table_of("a\nb\nc")
    with ThreadPoolExecutor(3) as pool:
        lengths = list(pool.map(lambda _: len(table.read()), range(3)))
    assert lengths == [3, 3, 3]
    assert len(list(table.path.parent.iterdir())) == 1


def test_other_counts_are_refused_and_not_cached(cache):
    path = place(cache, "a\nb")
    table = table_of("a\nb")
    with pytest.raises(ValueError, match=rf"{path} gives 2 rows; some-text 1\.0 is known to give 3"):
        table.read()
    assert list(table.path.parent.iterdir()) == []


def test_a_table_that_cannot_be_read_is_named(cache):
    place(cache, "a\nb\nc")
    table = table_of("a\nb\nc")
    table.read()
    table.path.write_bytes(b"PAR1 half")
    with pytest.raises(ValueError, match=r"cannot be read .* Delete it: it is rebuilt from the archive"):
        table.read()


def test_verify_finds_what_is_missing_damaged_or_changed(cache):
    table = table_of("a\nb\nc")
    with pytest.raises(ValueError, match=r"some\.whl is not there, .* Fetch it first"):
        table.verify()
    path = place(cache, "a\nb\nc")
    table.verify()
    for changed in (table.read().assign(text=["a", "b", "x"]), table.read().assign(lengths=[[1], [1], [2]])):
        changed.to_parquet(table.path)
        with pytest.raises(ValueError, match=r"is not what some\.whl gives. Delete it: it is rebuilt"):
            table.verify()
    path.write_text("a\nb\nd")
    with pytest.raises(ValueError, match="the file is damaged or is not that release"):
        table.verify()

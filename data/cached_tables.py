"""Tables parsed from a fetched archive, kept as Parquet files in the cache: parsed once, offline afterwards.

    file = <cache>/tables/<name>-<first 12 digits of the archive's SHA-256>-<version>.parquet

So another archive, or a raised version, is another file, and a table of an older release of Microtome is never read by
mistake. The file is written in a folder of its own and renamed: two processes at once are safe.
"""

import io
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from microtome.data.registry import Archive, cache_folder, fetch


@dataclass(frozen=True)
class CachedTable:
    """How one archive becomes one table.

    name: part of the file's name. version: raise it when parsing or grouping changes. parse: makes the table from the
    archive's path. check: raises ValueError if the table is not as the release is known to be (row counts); it runs
    after parsing and each time the table is read, and is given the table and the file to name in its message.
    """

    name: str
    archive: Archive
    version: int
    parse: Callable[[Path], pd.DataFrame]
    check: Callable[[pd.DataFrame, Path], None]

    @property
    def path(self) -> Path:
        """Where the parsed table lies, or will lie."""
        return cache_folder("tables") / f"{self.name}-{self.archive.sha256[:12]}-{self.version}.parquet"

    @property
    def archive_path(self) -> Path:
        """Where the fetched archive lies, or will lie."""
        return cache_folder("archives") / self.archive.filename

    def read(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """The table, or these columns of it, parsed (and the archive fetched) if it is not in the cache.

        Raises what `fetch` raises, and ValueError if the archive holds something else or the table cannot be read.
        """
        path = self.path
        if not path.exists():
            table = self._parsed()
            with tempfile.TemporaryDirectory(prefix=f".{self.name}-", dir=path.parent) as scratch:
                table.to_parquet(Path(scratch) / path.name)
                os.replace(Path(scratch) / path.name, path)
        try:
            table = pd.read_parquet(path, columns=None if columns is None else list(columns))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read ({error}). Delete it: it is rebuilt from the archive.") from error
        self.check(table, path)
        return table

    def verify(self) -> None:
        """Hash the archive, parse it again, and compare the cached table with what comes out; no network.

        Raises ValueError that says what is missing or wrong.
        """
        import pyarrow as pa  # compares columns of lists, which pandas cannot

        if not self.archive_path.exists():
            raise ValueError(f"{self.archive_path} is not there, so that nothing can be verified. Fetch it first.")
        # written and read like the kept one, so that storage types do not count
        fresh = io.BytesIO(self._parsed().to_parquet())
        if not pa.Table.from_pandas(self.read()).equals(pa.Table.from_pandas(pd.read_parquet(fresh))):
            raise ValueError(f"{self.path} is not what {self.archive.filename} gives. Delete it: it is rebuilt.")

    def _parsed(self) -> pd.DataFrame:
        archive = fetch(self.archive)
        table = self.parse(archive)
        self.check(table, archive)
        return table


def check_rows(table: pd.DataFrame, where: Path, *, rows: int, release: str) -> None:
    """Raise ValueError, naming the file, unless the table has that many rows."""
    if len(table) != rows:
        raise ValueError(f"{where} gives {len(table)} rows; {release} is known to give {rows}. Delete the file.")

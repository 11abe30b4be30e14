"""The folder of a grid, and what it says of each cell.

    <out>/<name>/config.yaml  log.txt  summary.parquet
                 captures/<cell>/        a store of activations; captures/<cell>.json says how it was made
                 cells/<cell>/           a run folder; its values/cell.json is written last: a cell with it is finished
                 errors/<cell>.txt       why a cell failed: one line, then the traceback
                 checkpoints/<cell>/     fits of a probe cell that is not finished
                 locks/<cell>.lock       held by the process that works on the cell

Everything is read from disk: a process that starts anew, or beside another, sees what is there.
"""

import json
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from filelock import FileLock, Timeout

from microtome.app.grid_cells import CaptureCell, ProbeCell
from microtome.app.grid_config import GridConfig
from microtome.app.grid_log import said_error
from microtome.capture import StoreInfo, store_info
from microtome.capture.store_files import is_store
from microtome.data.replaced_file import replaced_file
from microtome.data.runs import Run

MARKER = "cell"
_WAIT_SECONDS = 0.5  # another process that only looks whether a lock is held has it for less


class CellIsBusy(Exception):
    """Another process works on this cell."""


@dataclass(frozen=True)
class GridFolder:
    """A grid's folder. `path` is absolute; it need not be there yet."""

    path: Path

    @classmethod
    def of(cls, config: GridConfig) -> "GridFolder":
        """The folder that a grid has or will get. Raises FileExistsError if something else is there."""
        path = config.out.resolve() / config.name
        if path.exists() and (not path.is_dir() or (any(path.iterdir()) and not (path / "captures").is_dir())):
            raise FileExistsError(f"{path} is there and is no grid. Give the grid another name.")
        return cls(path)

    @property
    def log_file(self) -> Path:
        """The log."""
        return self.path / "log.txt"

    @property
    def summary_file(self) -> Path:
        """The table of all cells."""
        return self.path / "summary.parquet"

    def create(self, config: GridConfig) -> None:
        """Make the folders and keep the settings."""
        for name in ("captures", "cells", "errors", "locks"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        settings = config.model_dump(mode="json", exclude_none=True)
        write_whole(self.path / "config.yaml", yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))

    def store(self, cell: CaptureCell) -> Path:
        """Where a capture's activations are."""
        return self.path / "captures" / cell.name

    def run(self, cell: ProbeCell) -> Path:
        """Where a probe cell's results are."""
        return self.path / "cells" / cell.name

    def checkpoint(self, cell: ProbeCell) -> Path:
        """Where the fits of an unfinished probe cell are."""
        return self.path / "checkpoints" / cell.name

    def delete_checkpoint(self, cell: ProbeCell) -> None:
        """Delete the fits of a cell that is finished."""
        if self.checkpoint(cell).is_dir():
            shutil.rmtree(self.checkpoint(cell))

    def error_file(self, cell: CaptureCell | ProbeCell) -> Path:
        """Where a failed cell's traceback is."""
        return self.path / "errors" / f"{cell.name}.txt"

    def capture_facts(self, cell: CaptureCell) -> dict | None:
        """What captures/<cell>.json says: settings, and of a finished capture sizes and seconds; None without one."""
        return _read_json(self.path / "captures" / f"{cell.name}.json")

    def write_capture_facts(self, cell: CaptureCell, facts: dict) -> None:
        """Keep what a capture was made with."""
        write_whole(self.path / "captures" / f"{cell.name}.json", json.dumps(facts, indent=1, ensure_ascii=False))

    def probe_facts(self, cell: ProbeCell) -> dict | None:
        """What a finished probe cell says: settings and its row of the summary; None for one that is not finished."""
        return _read_json(self.run(cell) / "values" / f"{MARKER}.json")

    def finished_cells(self) -> dict[str, dict]:
        """`probe_facts` of every finished cell in the folder, also of those that are in no grid any more."""
        found = {path.name: _read_json(path / "values" / f"{MARKER}.json") for path in (self.path / "cells").glob("*")}
        return {name: facts for name, facts in sorted(found.items()) if facts is not None}

    def is_captured(self, cell: CaptureCell) -> bool:
        """Whether the whole capture is on disk."""
        held = self.store_info(cell)
        return held is not None and held.is_whole and "rows" in (self.capture_facts(cell) or {})

    def store_info(self, cell: CaptureCell) -> StoreInfo | None:
        """How far a capture is; None if it was not begun."""
        return store_info(self.store(cell)) if is_store(self.store(cell)) else None

    def fresh_run(self, cell: ProbeCell, config: GridConfig) -> Run:
        """A new run folder for a cell; what an unfinished one of before left is deleted."""
        path = self.run(cell)
        if path.exists() and self.probe_facts(cell) is None:
            shutil.rmtree(path)
        settings = config.model_dump(mode="json", exclude_none=True) | {"cell": cell.name}
        return Run.create(path.parent, path.name, settings, seed=config.seed)

    def error(self, cell: CaptureCell | ProbeCell) -> str | None:
        """The one line of a failed cell; None if it has not failed."""
        try:
            return self.error_file(cell).read_text(encoding="utf-8").partition("\n")[0]
        except FileNotFoundError:
            return None

    def write_error(self, cell: CaptureCell | ProbeCell, error: Exception) -> None:
        """Keep an error with its traceback."""
        trace = "".join(traceback.format_exception(error))
        write_whole(self.error_file(cell), f"{said_error(error)}\n\n{cell.name}\n\n{trace}")

    @contextmanager
    def locked(self, cell: CaptureCell | ProbeCell) -> Iterator[None]:
        """Hold a cell. Raises CellIsBusy if another process does."""
        lock = FileLock(self._lock_file(cell))
        try:
            lock.acquire(timeout=_WAIT_SECONDS, poll_interval=0.05)
        except Timeout as error:
            raise CellIsBusy(f"another process works on {cell.name}") from error
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def summary_locked(self) -> Iterator[None]:
        """Hold the summary, so that an older one never replaces a newer one."""
        with FileLock(self.path / "locks" / "summary.lock"):
            yield

    def is_busy(self, cell: CaptureCell | ProbeCell) -> bool:
        """Whether a process works on a cell right now. Makes no file."""
        file = self._lock_file(cell)
        if not file.exists():
            return False
        lock = FileLock(file)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            return True
        lock.release()
        return False

    def _lock_file(self, cell: CaptureCell | ProbeCell) -> Path:
        return self.path / "locks" / f"{cell.name}.lock"


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader, also after a crash, sees the old one or the whole new one."""
    with replaced_file(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def _read_json(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}). Delete it, and its cell is made again.") from error

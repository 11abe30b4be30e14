"""The folder of a run that one process makes, and that is there whole or not at all.

    <out>/<name>/           the run; values/<kind>.json says that it is finished, and of which settings
    <out>/.<name>.fits/     what is fitted so far, and the folder while it is written; deleted at the end
    <out>/.<name>.lock      held by the one process that makes the run; deleted at the end

Stopped or killed at any moment, the same command goes on. A run of the same settings is not made again, and no other
run of that name is written over.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock, Timeout

from microtome.app.machine import can_write
from microtome.data.runs import Run

_OTHER_NAME = "Give this run another name (--name)."


@dataclass(frozen=True)
class RunFolder:
    """Where a run of one kind ("lens") will be.

    Attributes:
        path: the run.
        kind: name of the command that makes it.
    """

    path: Path
    kind: str

    @classmethod
    def at(cls, out: Path, name: str, kind: str) -> "RunFolder":
        """The folder `name` in a folder of runs."""
        return cls(out.expanduser().resolve() / name, kind)

    @property
    def kept(self) -> Path:
        """What is kept of a stopped run."""
        return self.path.with_name(f".{self.path.name}.fits")

    @property
    def shown(self) -> Path:
        """As a person in the working directory would write it."""
        return self.path.relative_to(Path.cwd()) if self.path.is_relative_to(Path.cwd()) else self.path

    @property
    def is_finished(self) -> bool:
        """Whether a run of this kind is there."""
        return (self.path / "values" / f"{self.kind}.json").is_file()

    def held(self) -> dict[str, Any]:
        """What `finish` was told."""
        return Run.open(self.path).json(self.kind)

    def require_free(self) -> None:
        """Raises FileExistsError if anything else has the name, PermissionError if the place cannot be written to."""
        if self.path.exists():
            raise FileExistsError(f"{self.path} is there and no finished {self.kind} run. {_OTHER_NAME}")
        Run.require_free(self.path.parent, self.path.name)
        if not can_write(self.path.parent):
            raise PermissionError(f"{self.path.parent} cannot be written to. Give another folder of runs (--out).")

    def require_same(self, settings: Mapping[str, Any], *, model: str, weights: str | None = None) -> None:
        """Raises FileExistsError if the finished run is of other settings, or of other weights of the model."""
        held = self.held()
        if changed := [key for key in settings if held["settings"].get(key) != settings[key]]:
            said = "; ".join(f"{key} was {held['settings'].get(key)}, is {settings[key]}" for key in changed[:3])
            raise FileExistsError(f"{self.path} was made with other settings ({said}). {_OTHER_NAME}")
        if held.get("weights") != weights:
            raise FileExistsError(
                f"{model} has changed since {self.path} was made with it: other weights. {_OTHER_NAME}"
            )

    def finished_tables(self, settings: Mapping[str, Any], *, model: str, weights: str) -> dict[str, pd.DataFrame]:
        """Tables of the run that is there, by name. FileExistsError as `require_same`."""
        self.require_same(settings, model=model, weights=weights)
        run = Run.open(self.path)
        return {name: run.table(name) for name in run.tables}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """The right to make the run, for one process at a time; a killed one loses it. BlockingIOError if taken."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.with_name(f".{self.path.name}.lock")
        lock = FileLock(file)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise BlockingIOError(
                f"{self.path} is being made by another process. Wait for it, or give this run another name (--name)."
            ) from error
        try:
            yield
        finally:
            file.unlink(missing_ok=True)
            lock.release()

    def finish(self, run: Run, settings: Mapping[str, Any], **more: Any) -> None:
        """Move the written folder to its place, and delete what was kept."""
        run.write_json(self.kind, {"settings": dict(settings), **more})
        if self.path.exists():
            raise FileExistsError(f"{self.path} has appeared meanwhile. {_OTHER_NAME}")
        os.replace(run.path, self.path)
        shutil.rmtree(self.kept, ignore_errors=True)

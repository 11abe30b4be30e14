"""The log of a grid: plain text, a line per event, for whoever reads it next morning.

Each line is on the disk before the work goes on, so the last one says what ran when a machine went down. The same lines
go to the console. Several processes may append to one log: a line is one write.
"""

import os
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path


@dataclass(frozen=True)
class GridLog:
    """Appends to `file`, and shows the same lines on stderr. file: None shows them only."""

    file: Path | None

    def line(self, text: str) -> None:
        """One event, with the local time before it. A text of several lines is indented below the first."""
        stamp = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S")
        written = f"{stamp}  " + text.rstrip().replace("\n", f"\n{' ' * (len(stamp) + 2)}") + "\n"
        if self.file is not None:
            descriptor = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, written.encode("utf-8", errors="replace"))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        print(written, end="", file=sys.stderr, flush=True)


def said_error(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    said = error.args[0] if isinstance(error, KeyError) and error.args else error
    lines = str(said).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

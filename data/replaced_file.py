"""Replace a file whole or not at all: written beside its place, brought to the disk, renamed into it."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """A scratch file beside `path` that takes its place when the block ends well, and goes when it does not.

    A reader sees the old file or the whole new one; a rename never reaches the disk before the bytes it names. A killed
    process leaves the scratch file, `.<name>.<hex>.part`.
    """
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        yield scratch
        with scratch.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)

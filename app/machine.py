"""What this machine has: cores of this process, free disk at a folder, bytes below one."""

import os
import shutil
from pathlib import Path


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_disk(folder: Path) -> int:
    """Bytes free where a folder lies, or would lie if it were made."""
    place = folder.absolute()
    while not place.is_dir():
        place = place.parent
    return shutil.disk_usage(place).free


def can_write(folder: Path) -> bool:
    """Whether a file can be made in a folder, or in the nearest one above it if it is not there."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return place.is_dir() and os.access(place, os.W_OK | os.X_OK)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; files that go away meanwhile are not counted."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size if path.is_file() and not path.is_symlink() else 0
        except FileNotFoundError:
            continue
    return total

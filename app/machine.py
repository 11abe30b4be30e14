"""What this machine has left: cores of this process, free memory, free disk at a folder.

Free memory is the least of what the system and the control group (a container's limit) leave. Beware: both are read
from Linux's own files; elsewhere free memory is not known.
"""

import os
import re
import shutil
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CONTROL_GROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory() -> int | None:
    """Bytes that new work can take without swapping; None if the system does not say."""
    try:
        kibibytes = re.search(r"^MemAvailable:\s*(\d+) kB$", MEMINFO.read_text(), flags=re.MULTILINE)
    except OSError:
        return None
    left = [int(kibibytes[1]) * 1024] if kibibytes else []
    try:
        limit = (CONTROL_GROUP / "memory.max").read_text().strip()
        used = int((CONTROL_GROUP / "memory.current").read_text())
        cached = re.search(r"^inactive_file (\d+)$", (CONTROL_GROUP / "memory.stat").read_text(), flags=re.MULTILINE)
        left += [max(0, int(limit) - used + (int(cached[1]) if cached else 0))] if limit != "max" else []
    except (OSError, ValueError):
        pass  # no control group of this kind: the system's own figure stands
    return min(left, default=None)


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

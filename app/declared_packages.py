"""Packages that Microtome declares, with their lower bounds, and whether this Python has them. Nothing is imported.

Read from the metadata of the installed package. Beware: only lower bounds (`name>=1.2`) are understood, which is all
that is declared; markers other than the extra are not evaluated.
"""

import importlib.metadata
import re
from dataclasses import dataclass

_IMPORT_NAMES = {"sklearn": "scikit-learn", "yaml": "pyyaml"}  # where more differs from the package than - and _


@dataclass(frozen=True)
class DeclaredPackage:
    """A package that Microtome needs, or that one of its extras adds.

    name: as on PyPI. at_least: lower bound ("" for none). extra: the optional part it belongs to, None if needed.
    """

    name: str
    at_least: str
    extra: str | None

    @property
    def requirement(self) -> str:
        """As pip takes it: `name>=1.2`."""
        return f"{self.name}>={self.at_least}" if self.at_least else self.name

    @property
    def installed_version(self) -> str | None:
        """The version here, None if it is not installed."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return None

    @property
    def is_new_enough(self) -> bool:
        """Whether it is installed and not older than its lower bound."""
        found = self.installed_version
        return found is not None and _release(found) >= _release(self.at_least)


def declared_packages() -> list[DeclaredPackage]:
    """Every package in Microtome's metadata, in order. Raises PackageNotFoundError if Microtome is not installed."""
    packages = []
    for line in importlib.metadata.requires("microtome") or []:
        named, _, marker = line.partition(";")
        name = re.match(r"[A-Za-z0-9._-]+", named)[0]
        at_least = re.search(r">=\s*([0-9][0-9A-Za-z.]*)", named)
        extra = re.search(r"""extra == ['"]([^'"]+)['"]""", marker)
        packages.append(DeclaredPackage(name, at_least[1] if at_least else "", extra[1] if extra else None))
    return packages


def package_of(module: str) -> DeclaredPackage | None:
    """The declared package that brings a module (`sklearn.svm`: scikit-learn); None if none does."""
    top = module.partition(".")[0]
    wanted = _IMPORT_NAMES.get(top, top).replace("_", "-").lower()
    try:
        found = [package for package in declared_packages() if package.name.replace("_", "-").lower() == wanted]
    except importlib.metadata.PackageNotFoundError:
        return None
    return found[0] if found else None


def pip_command(packages: list[DeclaredPackage]) -> str:
    """What installs these packages; "" for none."""
    return " ".join(["pip install", *(f"'{package.requirement}'" for package in packages)]) if packages else ""


def _release(version: str) -> tuple[int, ...]:
    """(2, 13, 0) of 2.13.0+cpu. A pre-release counts as its release."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    parts = [int(part) for part in numbers[0].split(".")] if numbers else []
    while parts and parts[-1] == 0:  # 2.0 is 2
        parts.pop()
    return tuple(parts)

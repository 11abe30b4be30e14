"""Declared packages are those of pyproject.toml; versions are compared as numbers."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

from microtome.app.declared_packages import DeclaredPackage, declared_packages, package_of, pip_command

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_every_declared_package_is_read_with_its_bound():
    packages = declared_packages()
    assert [package.requirement for package in packages if package.extra is None] == PROJECT["dependencies"]
    for extra, requirements in PROJECT["optional-dependencies"].items():
        found = [(package.name, package.at_least) for package in packages if package.extra == extra]
        plain = [line.partition(";")[0].strip().replace("[nodejs]", "") for line in requirements]
        assert [f"{name}>={bound}" for name, bound in found] == plain


def test_the_installed_version_is_the_one_of_the_metadata():
    assert DeclaredPackage("numpy", "2.0", None).installed_version == importlib.metadata.version("numpy")
    assert DeclaredPackage("no-such-package-here", "1", None).installed_version is None
    assert not DeclaredPackage("no-such-package-here", "", None).is_new_enough


@pytest.mark.parametrize(
    ("installed", "at_least", "expected"),
    [
        ("2.6", "2.6", True),
        ("2.13.0+cpu", "2.6", True),
        ("2.5.1", "2.6", False),
        ("10.0", "9.1", True),
        ("2", "2.0", True),
        ("5.24.0.dev0", "5.24", True),
        ("0.9.9", "", True),
    ],
)
def test_versions_are_compared_as_numbers(monkeypatch, installed, at_least, expected):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed)
    assert DeclaredPackage("some", at_least, None).is_new_enough is expected


@pytest.mark.parametrize(
    ("module", "package"),
    [("sklearn.svm", "scikit-learn"), ("yaml", "pyyaml"), ("huggingface_hub", "huggingface-hub"), ("torch", "torch")],
)
def test_a_module_leads_to_its_package(module, package):
    assert package_of(module).name == package


def test_a_module_of_nobody_leads_nowhere():
    assert package_of("microtome.app.nowhere") is None


def test_one_command_installs_several():
    packages = [DeclaredPackage("a", "1.2", None), DeclaredPackage("b", "", "app")]
    assert pip_command(packages) == "pip install 'a>=1.2' 'b'"
    assert pip_command([]) == ""

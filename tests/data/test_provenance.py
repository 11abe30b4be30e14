import datetime
import importlib.metadata
import json
import shlex
import subprocess
import sys

import pytest
import torch

from microtome.data.provenance import commit_of, environment, package_versions


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "file.txt").write_text("one")
    git(tmp_path, "add", "file.txt")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_environment_is_plain_and_of_this_process(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/some/where/microtome", "sweep", "--data", "a b.csv"])
    facts = environment()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["command"] == "microtome sweep --data 'a b.csv'"
    assert shlex.split(facts["command"])[1:] == sys.argv[1:]
    assert facts["threads"] == torch.get_num_threads()
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(facts["date"])
    assert 0 <= age.total_seconds() < 600
    assert facts["processor"]


def test_versions_are_those_of_the_declared_dependencies():
    versions = package_versions()
    assert versions["torch"] == importlib.metadata.version("torch")
    assert versions["microtome"] == importlib.metadata.version("microtome")
    assert {"transformers", "numpy", "scikit-learn", "pandas", "safetensors"} <= versions.keys()
    assert "pytest" not in versions


def test_commit_and_changes(repository):
    head = commit_of(repository)
    assert len(head) == 40
    (repository / "new.txt").write_text("untracked files do not count")
    assert commit_of(repository) == head
    (repository / "file.txt").write_text("two")
    assert commit_of(repository) == head + "+changes"
    git(repository, "commit", "-q", "-a", "-m", "second")
    assert commit_of(repository) != head


def test_no_repository_no_commit(tmp_path, monkeypatch):
    assert commit_of(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert commit_of(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert commit_of(tmp_path) is None

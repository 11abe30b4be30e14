import hashlib
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from microtome.data import registry
from microtome.data.registry import Archive, cache_folder, fetch, file_sha256, pip_command

SOURCE = Archive("some-text", "1.0", "some_text-1.0.tar.gz", sha256="0" * 64)


@pytest.fixture
def local_index(tmp_path, monkeypatch):
    """A wheel in a folder that pip takes as its only index; returns its Archive."""
    folder = tmp_path / "index"
    folder.mkdir()
    path = folder / "some_text-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("some_text-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: some-text\nVersion: 1.0\n")
        wheel.writestr(
            "some_text-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("some_text-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return Archive("some-text", "1.0", path.name, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def test_fetched_once_then_offline(empty_cache, local_index, monkeypatch):
    path = fetch(local_index)
    assert path == empty_cache / "archives" / local_index.filename
    assert file_sha256(path) == local_index.sha256
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was called for a cached archive"))
    assert fetch(local_index) == path
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_several_at_once_leave_one_whole_file(empty_cache, local_index):
    with ThreadPoolExecutor(3) as pool:
        paths = set(pool.map(fetch, [local_index] * 3))
    assert [file_sha256(path) for path in paths] == [local_index.sha256]
    assert len(list((empty_cache / "archives").iterdir())) == 1


def test_a_wrong_release_is_refused_by_pip_and_leaves_nothing(empty_cache, local_index):
    other = Archive(local_index.package, local_index.version, local_index.filename, sha256="1" * 64)
    with pytest.raises(FileNotFoundError, match="DO NOT MATCH THE HASHES"):
        fetch(other)
    assert list((empty_cache / "archives").iterdir()) == []


def test_a_damaged_cached_file_is_an_error(empty_cache, local_index):
    fetch(local_index).write_bytes(b"half a file")
    with pytest.raises(ValueError, match=r"damaged or is not that release. Delete it"):
        fetch(local_index)


def test_without_network_the_error_gives_the_command(empty_cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(empty_cache))
    with pytest.raises(FileNotFoundError) as caught:
        fetch(SOURCE)
    command = (
        f"{sys.executable} -m pip download --no-deps --no-binary some-text -d {empty_cache}/archives some-text==1.0"
    )
    assert command in str(caught.value)
    assert "pip said:\n" in str(caught.value)
    assert "some-text==1.0" in str(caught.value).partition("pip said:")[2]


def test_a_python_without_pip_is_told_so(empty_cache, monkeypatch):
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(FileNotFoundError, match=r"has no pip to fetch it with.*ensurepip"):
        fetch(SOURCE)


def test_wheels_and_source_archives_are_asked_for_as_such(tmp_path):
    wheel = Archive("some-text", "1.0", "some_text-1.0-py3-none-any.whl", sha256="0" * 64)
    assert pip_command(wheel, tmp_path)[-5:] == ["--only-binary", "some-text", "-d", str(tmp_path), "some-text==1.0"]
    assert pip_command(SOURCE, tmp_path)[-5:-3] == ["--no-binary", "some-text"]


def test_cache_folder_follows_the_variable(empty_cache, monkeypatch, tmp_path):
    assert cache_folder("a", "b") == empty_cache / "a" / "b"
    assert (empty_cache / "a" / "b").is_dir()
    monkeypatch.delenv("MICROTOME_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "microtome"

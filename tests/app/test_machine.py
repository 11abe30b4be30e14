"""Free memory and disk: the least of the system's and the container's limit; folders that are not there yet."""

import shutil

import pytest

from microtome.app import machine
from microtome.app.machine import can_write, cores, folder_bytes, free_disk, free_memory


@pytest.fixture
def system(tmp_path, monkeypatch):
    """`system(available_kb, limit, used, inactive)`: what Linux's files say; None for a file that is not there."""

    def write(available: int | None, limit: str | None = None, used: int = 0, inactive: int = 0) -> None:
        monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
        monkeypatch.setattr(machine, "CONTROL_GROUP", tmp_path)
        if available is not None:
            (tmp_path / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:    {available} kB\n")
        if limit is not None:
            (tmp_path / "memory.max").write_text(f"{limit}\n")
            (tmp_path / "memory.current").write_text(f"{used}\n")
            (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")

    return write


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ((1000,), 1_024_000),
        ((1000, "max", 5, 5), 1_024_000),
        ((1000, "500000", 400_000, 50_000), 150_000),
        ((1000, "9000000", 0, 0), 1_024_000),
        ((1000, "500", 900, 0), 0),
        ((None, "500000", 400_000, 0), None),
    ],
)
def test_the_tightest_limit_counts(system, facts, expected):
    system(*facts)
    assert free_memory() == expected


def test_a_folder_that_is_not_there_yet(tmp_path):
    assert abs(free_disk(tmp_path / "a" / "b") - shutil.disk_usage(tmp_path).free) < 1e9
    assert can_write(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    (tmp_path / "file").chmod(0o755)  # as folders are: it may be entered
    assert not can_write(tmp_path / "file" / "b")
    assert not (tmp_path / "a").exists()


def test_files_below_a_folder_are_summed(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x").write_bytes(b"12345")
    (tmp_path / "y").write_bytes(b"123")
    (tmp_path / "link").symlink_to(tmp_path / "y")
    assert folder_bytes(tmp_path) == 8


def test_there_is_a_core():
    assert cores() >= 1

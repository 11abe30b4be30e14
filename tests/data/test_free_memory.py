"""Free memory: the least of the system's and the container's limit."""

import importlib

import pytest

from microtome.data.free_memory import free_memory

module = importlib.import_module("microtome.data.free_memory")


@pytest.fixture
def system(tmp_path, monkeypatch):
    """`system(available_kb, limit, used, inactive)`: what Linux's files say; None for a file that is not there."""

    def write(available: int | None, limit: str | None = None, used: int = 0, inactive: int = 0) -> None:
        monkeypatch.setattr(module, "MEMINFO", tmp_path / "meminfo")
        monkeypatch.setattr(module, "CONTROL_GROUP", tmp_path)
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

import pytest


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """A cache folder of its own for the test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MICROTOME_CACHE", str(folder))
    return folder

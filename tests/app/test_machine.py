"""Free disk of folders that are not there yet, what can be written to, bytes below a folder."""

import shutil

from microtome.app.machine import can_write, cores, folder_bytes, free_disk


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

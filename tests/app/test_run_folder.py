"""The folder of a run: one maker at a time, nothing written over, finished or not there."""

import pytest
from filelock import FileLock
from pydantic import BaseModel

from microtome.app.run_folder import RunFolder
from microtome.data.runs import Run


class Nothing(BaseModel):
    """Settings of a run that has none."""


def made(folder: RunFolder) -> Run:
    return Run.create(folder.kept, folder.path.name, Nothing(), seed=0, overwrite=True)


def test_a_run_is_there_whole_or_not_at_all(tmp_path):
    folder = RunFolder.at(tmp_path / "runs", "a", "lens")
    folder.require_free()
    with folder.alone():
        run = made(folder)
        assert not folder.path.exists()
        folder.finish(run, {"top": 5}, weights="w", more=[1])
        assert folder.is_finished
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]
    assert folder.held() == {"settings": {"top": 5}, "weights": "w", "more": [1]}
    folder.require_same({"top": 5}, model="m", weights="w")
    with pytest.raises(FileExistsError, match=r"made with other settings \(top was 5, is 6; seed was None, is 1\)"):
        folder.require_same({"top": 6, "seed": 1}, model="m", weights="w")
    with pytest.raises(FileExistsError, match=r"m has changed since .* other weights"):
        folder.require_same({"top": 5}, model="m", weights="v")
    assert not RunFolder(folder.path, "heads").is_finished
    with pytest.raises(FileExistsError, match="no finished heads run"):
        RunFolder(folder.path, "heads").require_free()


def test_a_mistake_leaves_no_lock_and_what_came_meanwhile_is_kept(tmp_path):
    folder = RunFolder.at(tmp_path, "a", "lens")
    with pytest.raises(KeyError, match="mistake"), folder.alone():
        raise KeyError("mistake")
    assert not list(tmp_path.iterdir())
    with folder.alone():
        run = made(folder)
        folder.path.mkdir()
        (folder.path / "mine").touch()
        with pytest.raises(FileExistsError, match="has appeared meanwhile"):
            folder.finish(run, {})
    assert (folder.path / "mine").exists()
    assert folder.kept.exists()


def test_one_process_makes_a_run(tmp_path):
    folder = RunFolder.at(tmp_path, "a", "lens")
    with FileLock(tmp_path / ".a.lock"), pytest.raises(BlockingIOError, match="being made by another process"):
        folder.alone().__enter__()
    with folder.alone():
        pass


def test_a_place_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(PermissionError, match="cannot be written to"):
        RunFolder.at(tmp_path / "file" / "runs", "a", "lens").require_free()

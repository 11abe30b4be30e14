"""Places of settings become absolute, data sets keep their name, and contents tell files and folders apart."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from microtome.app.repeatable import contents_of, repeatable


class Settings(BaseModel):
    data: str | None
    out: Path
    vectors: Path | None = None


def test_places_are_absolute_and_data_sets_keep_their_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = repeatable(Settings(data="mine.csv", out=Path("here/../runs")), "out", "vectors")
    assert (found.data, found.out, found.vectors) == (str(tmp_path / "mine.csv"), tmp_path / "runs", None)
    assert repeatable(Settings(data="sentiment", out=tmp_path), "out").data == "sentiment"
    assert repeatable(Settings(data=None, out=tmp_path), "out").data is None


def test_contents_change_with_what_is_inside_and_with_names(tmp_path) -> None:
    file = tmp_path / "folder" / "a.txt"
    file.parent.mkdir()
    file.write_text("one")
    one, held = contents_of(file), contents_of(file.parent)
    assert held == [f"a.txt {one}"]
    file.write_text("two")
    assert contents_of(file) != one
    file.rename(file.with_name("b.txt"))
    assert contents_of(file.parent) == [f"b.txt {contents_of(file.with_name('b.txt'))}"]
    assert contents_of(None) is None
    with pytest.raises(FileNotFoundError):
        contents_of(tmp_path / "none")

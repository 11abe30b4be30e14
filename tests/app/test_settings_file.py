"""Settings from a file and from flags; what is no settings file is told by name."""

import pytest
from pydantic import BaseModel, ValidationError

from microtome.app.settings_file import read_settings


class Settings(BaseModel):
    name: str = "a"
    count: int = 1


def test_flags_win_and_the_rest_keeps_its_default(tmp_path):
    (tmp_path / "s.yaml").write_text("count: 3\nname: b\n")
    assert read_settings(Settings, None) == Settings()
    assert read_settings(Settings, tmp_path / "s.yaml") == Settings(name="b", count=3)
    assert read_settings(Settings, tmp_path / "s.yaml", {"count": 4}) == Settings(name="b", count=4)


def test_an_empty_file_gives_the_defaults(tmp_path):
    (tmp_path / "s.yaml").write_text("# nothing\n")
    assert read_settings(Settings, tmp_path / "s.yaml") == Settings()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- 1\n- 2\n", "holds a list; settings are names with values"),
        (b"texts: [unclosed", "is no YAML"),
        (b"\xff\xfe\x00", "is no UTF-8 text"),
        (b"1: 2\n", "1 is no name of a setting"),
    ],
)
def test_what_is_no_settings_file(tmp_path, content, message):
    (tmp_path / "s.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_settings(Settings, tmp_path / "s.yaml")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no settings file"):
        read_settings(Settings, tmp_path / "s.yaml")


def test_what_the_model_refuses(tmp_path):
    (tmp_path / "s.yaml").write_text("count: many\n")
    with pytest.raises(ValidationError):
        read_settings(Settings, tmp_path / "s.yaml")

"""Lines of the log, and how it says times, sizes and errors."""

import re

import pytest

from microtome.app.grid_log import GridLog, said_bytes, said_error, said_seconds


def test_a_line_is_in_the_file_and_on_the_console(tmp_path, capsys) -> None:
    log = GridLog(tmp_path / "log.txt")
    log.line("first")
    log.line("second\nand more\n")
    text = (tmp_path / "log.txt").read_text(encoding="utf-8")
    first, second, more = text.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  first", first)
    assert second.endswith("  second")
    assert more == " " * 21 + "and more"
    assert capsys.readouterr().err == text


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7450, "2 h 04 min"),
    ],
)
def test_times(seconds, said) -> None:
    assert said_seconds(seconds) == said


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (3100, "3.1 kB"),
        (999_600, "1.0 MB"),
        (120e6, "120 MB"),
        (4.24e9, "4.2 GB"),
        (2e12, "2.0 TB"),
    ],
)
def test_sizes(size, said) -> None:
    assert said_bytes(size) == said


def test_errors_take_one_line() -> None:
    assert said_error(ValueError("first\nsecond")) == "ValueError: first"
    assert said_error(KeyError("a column")) == "KeyError: a column"
    assert said_error(RuntimeError()) == "RuntimeError"

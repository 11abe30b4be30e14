"""Lines of the log, and how it says times, sizes and errors."""

import re

from microtome.app.grid_log import GridLog, said_error


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


def test_errors_take_one_line() -> None:
    assert said_error(ValueError("first\nsecond")) == "ValueError: first"
    assert said_error(KeyError("a column")) == "KeyError: a column"
    assert said_error(RuntimeError()) == "RuntimeError"

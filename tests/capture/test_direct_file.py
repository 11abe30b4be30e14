"""What is written past the page cache is what was given, in every size, and where a file system knows no such thing."""

import errno
import os

import pytest

from microtome.capture import direct_file
from microtome.capture.direct_file import DirectFile

SIZES = [0, 1, 511, 4095, 4096, 4097, 8192, 3 * 8192, 3 * 8192 + 1]


@pytest.mark.parametrize("sizes", [[n] for n in SIZES] + [SIZES, SIZES[::-1], [7] * 5000])
@pytest.mark.parametrize("has_direct", [True, False])
def test_the_bytes_are_those_that_were_given(tmp_path, monkeypatch, sizes, has_direct) -> None:
    monkeypatch.setattr(direct_file, "_BUFFER", 8192)
    opened = os.open

    def without(path, flags, mode=0o777):
        if not has_direct and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no such thing here")
        return opened(path, flags, mode)

    monkeypatch.setattr(direct_file.os, "open", without)
    parts = [os.urandom(n) for n in sizes]
    with DirectFile(tmp_path / "f") as file:
        assert [file.write(memoryview(part)) for part in parts] == sizes
        file.finish()
    assert (tmp_path / "f").read_bytes() == b"".join(parts)


def test_an_old_file_is_replaced_from_its_first_byte(tmp_path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 10_000)
    with DirectFile(tmp_path / "f") as file:
        file.write(b"new")
        file.finish()
    assert (tmp_path / "f").read_bytes() == b"new"


def test_a_folder_that_is_not_there_and_a_full_disk_are_errors(tmp_path) -> None:
    with pytest.raises(FileNotFoundError):
        DirectFile(tmp_path / "nothing" / "f")
    with DirectFile(direct_file.Path("/dev/full")) as file:
        file.write(b"x" * 5000)
        with pytest.raises(OSError, match="No space left"):
            file.finish()

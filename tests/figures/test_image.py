import shutil
import struct
import subprocess
import zlib

import numpy as np
import plotly.graph_objects as go
import pytest

from microtome.figures import image
from microtome.figures.image import find_browser, screenshot, top_rows, write_png

needs_browser = pytest.mark.skipif(
    not any(shutil.which(name) for name in image._BROWSERS),
    reason="no Chromium on this machine: apt-get install chromium",
)


def png_of(pixels: np.ndarray, *, interlace: int = 0) -> bytes:
    """A PNG of `[row, column, rgb]` bytes, its data in two chunks, with a text chunk before them."""
    height, width, _ = pixels.shape
    data = zlib.compress(b"".join(b"\0" + row.tobytes() for row in pixels))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, interlace)
    chunks = [(b"IHDR", header), (b"tEXt", b"a\0b"), (b"IDAT", data[:20]), (b"IDAT", data[20:]), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks
    )


def pixels_of(png: bytes) -> np.ndarray:
    """The pixels of an unfiltered PNG as `png_of` makes them."""
    width, height = struct.unpack(">II", png[16:24])
    place, data = 8, b""
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        name, content = png[place + 4 : place + 8], png[place + 8 : place + 8 + length]
        assert struct.unpack(">I", png[place + 8 + length : place + 12 + length]) == (zlib.crc32(name + content),)
        data += content if name == b"IDAT" else b""
        place += 12 + length
    rows = np.frombuffer(zlib.decompress(data), dtype=np.uint8).reshape(height, 1 + 3 * width)
    return rows[:, 1:].reshape(height, width, 3)


@pytest.mark.parametrize("rows", [1, 7, 11, 40])
def test_top_rows_are_the_pictures_own(rows):
    pixels = np.random.default_rng(0).integers(0, 256, size=(11, 5, 3), dtype=np.uint8)
    np.testing.assert_array_equal(pixels_of(top_rows(png_of(pixels), rows)), pixels[:rows])


def test_interlaced_pictures_are_refused():
    with pytest.raises(ValueError, match="interlaced"):
        top_rows(png_of(np.zeros((2, 2, 3), dtype=np.uint8), interlace=1), 1)


def test_without_a_browser_the_error_says_how_to_get_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("MICROTOME_BROWSER", raising=False)
    with pytest.raises(FileNotFoundError, match=r"no browser found .*chromium.*apt-get install chromium"):
        find_browser()
    monkeypatch.setenv("MICROTOME_BROWSER", "/no/such/browser")
    with pytest.raises(FileNotFoundError, match="looked for /no/such/browser"):
        write_png(go.Figure(), tmp_path / "figure.png")


def test_a_browser_that_fails_is_reported_and_the_old_picture_stays(monkeypatch, tmp_path):
    browser = tmp_path / "browser"
    browser.write_text("#!/bin/sh\necho it broke >&2\nexit 3\n")
    browser.chmod(0o755)
    monkeypatch.setenv("MICROTOME_BROWSER", str(browser))
    (tmp_path / "a.png").write_bytes(b"old")
    with pytest.raises(RuntimeError, match=r"left no picture .exit status 3.: it broke"):
        screenshot("<p>", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes() == b"old"


def test_the_browser_is_asked_for_the_page_as_wanted(monkeypatch, tmp_path):
    asked = []
    picture = png_of(np.zeros((400, 4, 3), dtype=np.uint8))

    def run(command, **_):
        asked.extend(command)
        (path,) = [part.partition("=")[2] for part in command if part.startswith("--screenshot=")]
        with open(path, "wb") as file:
            file.write(picture)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(image.subprocess, "run", run)
    monkeypatch.setattr(image, "find_browser", lambda: "browser")
    path = screenshot("<p>", tmp_path / "new" / "a.png", width=390, height=100, scale=2.0, dark=True)
    assert pixels_of(path.read_bytes()).shape[0] == 200
    assert "--blink-settings=preferredColorScheme=0" in asked
    assert "--force-device-scale-factor=2" in asked
    assert [file.name for file in path.parent.iterdir()] == ["a.png"]


@pytest.mark.slow
@needs_browser
def test_a_real_picture_shows_the_figure(tmp_path):
    figure = go.Figure(go.Heatmap(z=[[0.0, 1.0]]), layout={"height": 300})
    path = write_png(figure, tmp_path / "figure.png", width=390, scale=1.0)
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    assert (width, height) == (390, 316)
    empty = screenshot("<p>", tmp_path / "empty.png", width=390, height=316)
    assert len(path.read_bytes()) > 2 * len(empty.read_bytes())
    dark = write_png(figure, tmp_path / "dark.png", width=390, scale=1.0, dark=True)
    assert dark.read_bytes() != path.read_bytes()

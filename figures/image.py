"""Pictures of figures and pages: a PNG through a Chromium that is on this machine, without network.

The page is the same self-contained HTML that a report is, so that the picture shows what a reader sees. For README
pictures and for looking at figures where no browser window can open; a run needs none of it.
"""

import os
import shutil
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import plotly.graph_objects as go

from microtome.figures.page import figure_block, page

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
_SECONDS = 120
# a headless window keeps this many pixels of its height for a frame that nobody sees, and leaves as much white below
_WINDOW_FRAME = 160
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def write_png(figure: go.Figure, path: str | Path, *, width: int = 900, scale: float = 2.0, dark: bool = False) -> Path:
    """Draw a figure into a PNG of `scale` times `width` by the figure's height; returns the path."""
    style = "main { max-width: none; padding: 8px; } figure { margin: 0; } .modebar { display: none; }"
    body = f"<style>{style}</style>{figure_block(figure)}"
    height = int(figure.layout.height or 400) + 16
    return screenshot(page("figure", body), path, width=width, height=height, scale=scale, dark=dark)


def screenshot(
    document: str, path: str | Path, *, width: int = 1280, height: int = 900, scale: float = 1.0, dark: bool = False
) -> Path:
    """Photograph the top `height` pixels of an HTML document, `width` pixels wide, into a PNG; returns the path.

    scale: picture pixels per page pixel. dark: as a reader with a dark setting sees it.
    Raises FileNotFoundError if there is no Chromium, RuntimeError if it leaves no picture.
    """
    browser = find_browser()
    path = Path(path).resolve()
    with tempfile.TemporaryDirectory(prefix="microtome-picture-") as scratch:
        inner, outer, picture = (Path(scratch) / name for name in ("inner.html", "outer.html", "picture.png"))
        inner.write_text(document, encoding="utf-8")
        # a window has a least width of some 500 pixels, a frame in it has none
        outer.write_text(
            '<!doctype html><meta name="color-scheme" content="light dark"><body style="margin:0">'
            f'<iframe style="border:0" src="inner.html" width="{width}" height="{height}"></iframe>',
            encoding="utf-8",
        )
        command = [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
            *(f"--user-data-dir={scratch}/profile", f"--window-size={width},{height + _WINDOW_FRAME}"),
            *(f"--force-device-scale-factor={scale:g}", "--virtual-time-budget=10000"),
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            *(f"--screenshot={picture}", outer.as_uri()),
        ]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        if not picture.exists():
            said = finished.stderr[-800:]
            raise RuntimeError(f"{browser} left no picture (exit status {finished.returncode}): {said}")
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_bytes(top_rows(picture.read_bytes(), round(height * scale)))
        os.replace(unfinished, path)
    return path


def find_browser() -> str:
    """Path of a Chromium-kind browser: `$MICROTOME_BROWSER`, or the first of the usual names on the search path."""
    chosen = os.environ.get("MICROTOME_BROWSER")
    for name in (chosen,) if chosen else _BROWSERS:
        if found := shutil.which(name):
            return found
    raise FileNotFoundError(
        f"no browser found (looked for {chosen or ', '.join(_BROWSERS)}). Install one, on Debian: "
        "apt-get install chromium, or set MICROTOME_BROWSER to the program's path."
    )


def top_rows(png: bytes, rows: int) -> bytes:
    """The PNG cut to its first `rows` pixel rows: for pictures without interlacing, which is what browsers write."""
    chunks = list(_chunks(png))
    width, height, depth, colour, _, _, interlace = struct.unpack(">IIBBBBB", chunks[0][1])
    if interlace:
        raise ValueError("the PNG is interlaced, so its first rows cannot be cut off. Save it without interlacing.")
    rows = min(rows, height)
    samples = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    # a row is a filter byte and the packed pixels, and depends on the rows above it only
    row_bytes = 1 + (width * samples * depth + 7) // 8
    pixels = zlib.decompress(b"".join(content for name, content in chunks if name == b"IDAT"))[: rows * row_bytes]
    header = struct.pack(">IIBBBBB", width, rows, depth, colour, 0, 0, 0)
    kept = [(name, content) for name, content in chunks[1:-1] if name != b"IDAT"]
    cut = [(b"IHDR", header), *kept, (b"IDAT", zlib.compress(pixels, 9)), (b"IEND", b"")]
    return _PNG_SIGNATURE + b"".join(
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in cut
    )


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    place = len(_PNG_SIGNATURE)
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        yield png[place + 4 : place + 8], png[place + 8 : place + 8 + length]
        place += 12 + length

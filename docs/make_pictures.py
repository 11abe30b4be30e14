"""Make the README's pictures from a run: every figure, and the top of its report, as PNG through Chromium.

    python docs/make_pictures.py [runs/demo [docs/images]]

It needs a run (`make demo`) and a Chromium (`apt-get install chromium`), and no network.
"""

import sys
from pathlib import Path

from microtome.data import Run
from microtome.figures import screenshot, write_png


def make_pictures(run: Run, folder: Path) -> list[Path]:
    """Write `<figure>.png` for each of the run's figures and `report.png`; returns the paths."""
    pictures = [write_png(run.figure(name), folder / f"{name}.png", width=1000) for name in run.figures]
    report = run.path / "report.html"
    if not report.is_file():
        raise FileNotFoundError(f"{run.path} has no report.html. Make the run with `make demo`.")
    document = report.read_text(encoding="utf-8")
    return [*pictures, screenshot(document, folder / "report.png", width=1280, height=1100)]


if __name__ == "__main__":
    run_folder = sys.argv[1] if len(sys.argv) > 1 else "runs/demo"
    image_folder = sys.argv[2] if len(sys.argv) > 2 else "docs/images"
    for path in make_pictures(Run.open(run_folder), Path(image_folder)):
        print(path)

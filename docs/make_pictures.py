"""Make the README's pictures from a finished demo run: `make pictures` (needs a headless Chromium)."""

import sys
from pathlib import Path

from microtome.data import Run
from microtome.figures import screenshot, write_png


def main(run_path: str = "runs/demo", out: str = "docs/images") -> None:
    """Write the head map, the layer curve and the top of the report as PNG."""
    run, folder = Run.open(run_path), Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("head_map", "layer_curve"):
        print(write_png(run.figure(name), folder / f"{name}.png"))
    report = (run.path / "report.html").read_text(encoding="utf-8")
    print(screenshot(report, folder / "report.png", width=1280, height=900))


if __name__ == "__main__":
    main(*sys.argv[1:])

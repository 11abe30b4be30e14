"""Paired timing, and one JSON line per claim: printed, and appended to results.jsonl with where it was measured."""

import json
import platform
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy
import sklearn
import torch
import transformers

RESULTS = Path(__file__).parent / "results.jsonl"


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def paired(one: Callable[[], object], other: Callable[[], object], pairs: int) -> tuple[float, list[float]]:
    """Median of one / other over pairs run in turn, after one warm-up of each; and all ratios."""
    one(), other()
    ratios = []
    for i in range(pairs):
        if i % 2:
            b, a = timed(other), timed(one)
        else:
            a, b = timed(one), timed(other)
        ratios.append(a / b)
    return median(ratios), [round(ratio, 3) for ratio in ratios]


def record(claim: str, ratio: float, bar: str, met: bool | None, baseline: str, detail: str) -> None:
    """Print {"claim", "ratio", "bar", "met", "baseline", "detail"} and append it with where it was measured."""
    met = None if met is None else bool(met)  # numpy's too
    line = {"claim": claim, "ratio": round(ratio, 3), "bar": bar, "met": met, "baseline": baseline, "detail": detail}
    print(json.dumps(line), flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    measured = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "scikit-learn": sklearn.__version__,
        "numpy": numpy.__version__,
        "commit": commit.stdout.strip() or None,
    }
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line | measured) + "\n")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [x.split(":", 1)[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")]
        if info.exists()
        else []
    )
    return f"{names[0] if names else platform.processor()}, {len(names)} cores" if names else platform.machine()

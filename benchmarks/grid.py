"""A sweep of three models x two data sets x every layer and head, end to end, with where the time goes.

The models are SmolLM2-135M, MiniLM-L6 and, as a control, SmolLM2's architecture with random weights; the data sets are
true and false statements on cities, and questions for a person against others. A second run finds all finished.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
import torch
import yaml
from ledger import record

CONFIG = {
    "name": "night",
    "data": [
        {"name": "cities", "texts": 200},
        {"name": "questions", "texts": 300, "label": {"column": "kind", "positive": "HUM"}},
    ],
    "sites": [["resid_post", "attn_out", "mlp_out", "z"]],
    "positions": ["last"],
    "probe": {"permutations": 199, "bootstraps": 500},
}


def sweep(config: Path) -> tuple[float, str]:
    """Seconds of `microtome sweep`, and what it printed."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "microtome.app", "sweep", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return time.perf_counter() - started, done.stderr


def main() -> None:
    """Run the grid twice and record the seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="a folder to run in and to keep")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = (options.keep or Path(name)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        models = ["smollm2", "minilm", {"name": "smollm2", "untrained": 0, "called": "untrained"}]
        config = folder / "night.yaml"
        config.write_text(yaml.safe_dump(CONFIG | {"models": models, "out": str(folder / "runs")}, sort_keys=False))
        seconds, log = sweep(config)
        again, _ = sweep(config)
        summary = pd.read_parquet(folder / "runs" / "night" / "summary.parquet")
        columns = ["model", "data", "best_layer_site", "best_layer_auroc", "best_head_site", "best_head_auroc"]
        print(summary[[*columns, "p_best_site", "seconds_capture", "seconds_probe"]].to_string())
        where = next(line for line in log.splitlines() if "This took" in line).partition("This took ")[2]
        record(
            "sweep of 3 models x 2 data sets x all layers and heads: a second run over the first",
            again / seconds,
            "none",
            None,
            "the first run",
            f"first {seconds:.0f} s ({where.strip()}), second {again:.1f} s; {int(summary['texts'].sum())} texts, "
            f"{(summary['status'] == 'finished').sum()} of {len(summary)} cells; {torch.get_num_threads()} threads",
        )


if __name__ == "__main__":
    main()

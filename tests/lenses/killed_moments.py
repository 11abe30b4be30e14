"""Passes that are killed: run by test_moments_pass.py as a process of its own, which forks one child per pass.

    python killed_moments.py FOLDER 12       a child kills itself at its n-th write to disk, n to 12; another goes on
    python killed_moments.py FOLDER 12 routed       the same of routed moments

Prints {"kills": , "resumed": , "differing": [folders whose state differs from that of an uninterrupted pass]}.
"""

import json
import os
import random
import signal
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from microtome.capture import LoadedModel, dissect
from microtome.lenses.moments_files import read_progress
from microtome.lenses.moments_pass import moments_of
from microtome.lenses.transport.route_moments import routed_moments

torch.set_num_threads(1)  # a child of a fork has no threads but its own
CONFIG = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
IDS = random.Random(0)
TEXTS = [[IDS.randrange(3, 100) for _ in range(IDS.randrange(2, 30))] for _ in range(90)]


def run(loaded: LoadedModel, path: Path) -> None:
    """The pass that is killed: a checkpoint after each of some ten batches."""
    options = {
        "documents": [i // 2 for i in range(len(TEXTS))],
        "shuffled": True,
        "chunk": 100,
        "max_tokens": 150,
        "save": path,
        "checkpoint_minutes": 0,
        "progress": False,
    }
    if sys.argv[3:] == ["routed"]:
        routes = ["same", "offset 1", "head 1.0", "random 0"]
        routed_moments(loaded, TEXTS, ["resid_pre.0", "z.1"], "resid_post.1", routes, joined=True, **options)
    else:
        moments_of(loaded, TEXTS, ["resid", "z.1"], **options)


def child(loaded: LoadedModel, path: Path, dies_at: int | None = None) -> bool:
    """Whether a forked process that runs the pass finished; it kills itself at that write to disk."""
    pid = os.fork()
    if not pid:
        if dies_at is not None:
            count_writes(dies_at)
        try:
            run(loaded, path)
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return False
    if os.WEXITSTATUS(status):
        raise RuntimeError("a pass failed; see above")
    return True


def count_writes(dies_at: int) -> None:
    """Let the process kill itself before its n-th rename, deletion or fsync."""
    left = dies_at

    def counting(function):
        def counted(*given, **named):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*given, **named)

        return counted

    for name in ("replace", "fsync", "unlink"):
        setattr(os, name, counting(getattr(os, name)))


def state(path: Path) -> tuple[str, object]:
    """Hash of all tensors and what the json says of the cells: equal for equal bits."""
    facts = json.loads((path / "moments.json").read_text(encoding="utf-8"))
    return facts["digest"], [
        facts[name] for name in ("cells", "documents", "medians", "reason_counts", "left_out", "progress")
    ]


def main() -> None:
    """Make the reference, then kill."""
    torch.manual_seed(0)
    config = LlamaConfig(**CONFIG, num_key_value_heads=2, vocab_size=100, max_position_embeddings=64)
    loaded = LoadedModel.from_module(LlamaForCausalLM(config).eval(), name="tiny")
    dissect(loaded)
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    assert child(loaded, folder / "reference")
    kills, resumed, differing = 0, 0, []
    for step in range(1, steps + 1):
        path = folder / f"killed-{step}"
        kills += not child(loaded, path, step)
        if (path / "moments.json").exists():
            progress = read_progress(path)
            resumed += 0 < progress["next_batch"] < progress["batches"]
        assert child(loaded, path)
        left = [file.name for file in path.iterdir() if file.name.endswith(".part")]
        if state(path) != state(folder / "reference") or left or len(list(path.glob("moments-*"))) != 1:
            differing.append(str(path))
    print(json.dumps({"kills": kills, "resumed": resumed, "differing": differing}))


main()

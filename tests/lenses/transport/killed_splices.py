"""Causal tests that are killed: run by test_splice_study.py as a process of its own, which forks one child per run.

    python killed_splices.py FOLDER      a child kills itself before its n-th rename or fsync, n = 1..4; another goes on

Prints {"kills": , "resumed": , "same": whether sums are those of an uninterrupted run, to the bit}.
"""

import json
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from microtome.capture import LoadedModel, dissect
from microtome.lenses.linear_map import LinearMap
from microtome.lenses.transport import splice_study
from microtome.lenses.transport.operator import operator_of
from microtome.lenses.transport.splice_study import splice_effects

torch.set_num_threads(1)  # a child of a fork has no threads but its own
splice_study.SAVE_SECONDS = 0.0
CONFIG = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
IDS = random.Random(0)
TEXTS = [[IDS.randrange(3, 100) for _ in range(IDS.randrange(8, 20))] for _ in range(12)]
OPERATOR = operator_of(LinearMap(torch.eye(16), torch.ones(16), "drawn", "resid_pre.0", "resid_post.0"))
FILE = "splices.safetensors"


def child(loaded: LoadedModel, path: Path, dies_at: int | None = None) -> bool:
    """Whether a forked process that runs the test finished; it kills itself at that write to disk."""
    pid = os.fork()
    if not pid:
        if dies_at is not None:
            count_writes(dies_at)
        try:
            splice_effects(loaded, TEXTS, OPERATOR, at=("all",), max_tokens=80, save=path)
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return False
    if os.WEXITSTATUS(status):
        raise RuntimeError("a run failed; see above")
    return True


def count_writes(dies_at: int) -> None:
    """Let the process kill itself before its n-th rename or fsync."""
    left = dies_at

    def counting(function):
        def counted(*given, **named):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*given, **named)

        return counted

    for name in ("replace", "fsync"):
        setattr(os, name, counting(getattr(os, name)))


def state(path: Path) -> tuple[int, list[np.ndarray]]:
    """Batches done, and the sums."""
    with safe_open(path / FILE, framework="numpy") as file:
        return int(file.metadata()["batches"]), [file.get_tensor(name) for name in ("sums", "text_sums")]


def main() -> None:
    """Make the reference, then kill."""
    torch.manual_seed(0)
    config = LlamaConfig(**CONFIG, num_key_value_heads=2, vocab_size=100, max_position_embeddings=64)
    loaded = LoadedModel.from_module(LlamaForCausalLM(config).eval(), name="tiny")
    dissect(loaded)
    folder = Path(sys.argv[1])
    assert child(loaded, folder / "reference")
    batches, expected = state(folder / "reference")
    kills, resumed, same = 0, 0, True
    for step in range(1, 5):
        path = folder / f"killed-{step}"
        kills += not child(loaded, path, step)
        if (path / FILE).exists():
            resumed += 0 < state(path)[0] < batches
        assert child(loaded, path)
        done, sums = state(path)
        same = same and done == batches and all(map(np.array_equal, sums, expected))
        same = same and not list(path.glob("*.part")) and not list(path.glob(".*.part"))
    print(json.dumps({"kills": kills, "resumed": resumed, "same": same}))


main()

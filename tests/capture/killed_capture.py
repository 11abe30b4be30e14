"""Captures that are killed: run by test_store_resume.py as a process of its own, which forks one child per capture.

    python killed_capture.py FOLDER random 50       kill -9 at random moments, 50 times; each time the same call goes on
    python killed_capture.py FOLDER steps 25        a child kills itself at its n-th write to disk, n from 1 to 25

Prints {"kills": , "stores": , "differing": [names of files that differ from an uninterrupted capture]}.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from microtome.capture import LoadedModel, Store, capture, dissect, verify_store

torch.set_num_threads(1)  # a child of a fork has no threads but its own
CONFIG = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
IDS = random.Random(0)
TEXTS = [[IDS.randrange(3, 100) for _ in range(IDS.randrange(2, 30))] for _ in range(240)]
LABELS = {"label": [i % 2 for i in range(len(TEXTS))]}


def model() -> LoadedModel:
    """A tiny random model, dissected."""
    torch.manual_seed(0)
    config = LlamaConfig(**CONFIG, num_key_value_heads=2, vocab_size=100, max_position_embeddings=64)
    loaded = LoadedModel.from_module(LlamaForCausalLM(config).eval(), name="tiny")
    dissect(loaded)
    return loaded


def capture_to(loaded: LoadedModel, path: Path) -> None:
    """The capture that is killed: 10 shards and more."""
    sites = ["resid_post", "z", "mlp_act"]
    capture(loaded, TEXTS, sites, "all", labels=LABELS, store=path, shard_tokens=300, progress=False)


def child(loaded: LoadedModel, path: Path, dies_at: int | None = None) -> int:
    """The pid of a forked process that captures to `path`; it kills itself at that write to disk."""
    pid = os.fork()
    if pid:
        return pid
    if dies_at is not None:
        count_writes(dies_at)
    try:
        capture_to(loaded, path)
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)


def count_writes(dies_at: int) -> None:
    """Let the process kill itself before its n-th rename, deletion or fsync, so that every order of events is met."""
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


def ended(pid: int) -> bool:
    """Wait for a child; whether it finished. Raises RuntimeError if it failed by itself."""
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return False
    if os.WEXITSTATUS(status):
        raise RuntimeError("a capture failed; see above")
    return True


def shards(path: Path) -> dict[str, str]:
    """SHA-256 of every shard and row table."""
    files = [*path.glob("shard-*"), *path.glob("rows-*")]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)}


def is_clean(path: Path) -> bool:
    """No scratch files, and every byte is as the log says."""
    return not list(path.glob(".*.part")) and not verify_store(path) and Store.open(path).is_whole


def at_random(loaded: LoadedModel, folder: Path, wanted: int, reference: dict[str, str], seconds: float) -> dict:
    """Kill at random moments until `wanted` kills have hit a capture at work."""
    moments = random.Random(1)
    kills, stores, differing = 0, 0, []
    while kills < wanted:
        path, is_done = folder / f"store-{stores}", False
        while not is_done:
            pid = child(loaded, path)
            if kills < wanted:
                time.sleep(moments.uniform(0, seconds))
                os.kill(pid, signal.SIGKILL)
            is_done = ended(pid)
            kills += not is_done
        found = shards(path)
        differing += [name for name in reference.keys() | found.keys() if reference.get(name) != found.get(name)]
        differing += [] if is_clean(path) else [str(path)]
        stores += 1
    return {"kills": kills, "stores": stores, "differing": differing}


def at_every_step(loaded: LoadedModel, folder: Path, wanted: int, reference: dict[str, str]) -> dict:
    """Kill before every write to disk of the first shards, then go on without a kill."""
    kills, stores, differing = 0, 0, []
    for step in range(1, wanted + 1):
        path = folder / f"store-{stores}"
        stores += 1
        kills += not ended(child(loaded, path, step))
        assert ended(child(loaded, path))
        found = shards(path)
        differing += [name for name in reference.keys() | found.keys() if reference.get(name) != found.get(name)]
        differing += [] if is_clean(path) else [str(path)]
    return {"kills": kills, "stores": stores, "differing": differing}


def main() -> None:
    """Make the reference, then kill."""
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    loaded = model()
    assert ended(child(loaded, folder / "warm"))
    started = time.perf_counter()
    assert ended(child(loaded, folder / "reference"))
    seconds = time.perf_counter() - started
    reference = shards(folder / "reference")
    if mode == "random":
        result = at_random(loaded, folder, int(sys.argv[3]), reference, seconds)
    else:
        result = at_every_step(loaded, folder, int(sys.argv[3]), reference)
    print(json.dumps(result | {"shards": len(reference) // 2, "seconds": round(seconds, 2)}))


main()

"""What a store costs: writing and reading beside a plain file, capturing to it beside memory, going on after a kill.

Claims: shards are written, hashed and brought to the disk at no less than 0.7 of the throughput of a plain file of the
same bytes, and read at no less than 0.7; a capture of SmolLM2 to a store takes at most 1.08 x the capture in memory;
after a kill half way, the same call takes at most 0.55 x the whole plus start-up. Pairs in turn; ratios are medians.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

import pandas as pd
import torch
from ledger import paired, record, timed

from microtome.capture import Store, capture, dissect, load_model
from microtome.capture.safetensors_file import write_safetensors
from microtome.capture.store_files import read_log, shard_file, write_rows
from microtome.data import sentiment

SITES = ["resid_post", "z"]
ONE_CAPTURE = """
import sys
from microtome.capture import capture, load_model
from microtome.data import sentiment

texts = sentiment(per_domain=int(sys.argv[2]))["text"].tolist()
capture(load_model("smollm2"), texts, ["resid_post", "z"], "all", store=sys.argv[1], shard_tokens=1000, progress=False)
"""


def throughput(folder: Path, pairs: int) -> None:
    """A shard of 256 MB with its row table, against a plain file of the same bytes; both brought to the disk."""
    n = 1850
    tensors = {f"resid_post.{i}": torch.randn(n, 576) for i in range(30)}
    tensors |= {f"z.{i}": torch.randn(n, 9, 64) for i in range(30)}
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    rows = pd.DataFrame({"text": range(n), "position": 0, "token": " the", "label": True})
    nbytes = sum(tensor.nbytes for tensor in tensors.values())

    def to_store() -> None:
        write_safetensors(folder / "shard", layout, tensors.values())
        write_rows(folder / "rows", rows)

    def to_file() -> None:
        with open(folder / "plain", "wb") as file:
            for tensor in tensors.values():
                file.write(memoryview(tensor.numpy()).cast("B"))
            file.flush()
            os.fsync(file.fileno())

    ratio, ratios = paired(to_file, to_store, pairs)  # time over time: throughput of the store over the file's
    record(
        "store: throughput of writing a shard over a plain file's",
        ratio,
        ">= 0.7",
        ratio >= 0.7,
        "one file of the same bytes, fsync",
        f"{nbytes / 1e6:.0f} MB in 60 tensors, hash and row table included; pairs {ratios}",
    )


def reading(store: Store, folder: Path, pairs: int) -> None:
    """Every site of a store into memory, against a plain file of the same bytes."""
    with open(folder / "plain", "wb") as file:
        for site in store.sites:
            file.write(memoryview(store[site].contiguous().numpy()).cast("B"))

    def from_store() -> list[torch.Tensor]:
        return [store[site] for site in store.sites]

    def from_file() -> list[torch.Tensor]:
        values = []
        with open(folder / "plain", "rb", buffering=0) as file:
            for site in store.sites:
                values.append(torch.empty(store.tensors[site].shape))
                file.readinto(memoryview(values[-1].numpy()).cast("B"))
        return values

    ratio, ratios = paired(from_file, from_store, pairs)
    record(
        "store: throughput of reading every site over a plain file's",
        ratio,
        ">= 0.7",
        ratio >= 0.7,
        "one file of the same bytes, read site by site, both in the page cache",
        f"{store.nbytes / 1e6:.0f} MB, {len(store.sites)} sites, {len(read_log(store.path))} shards; pairs {ratios}",
    )


def beside_memory(folder: Path, pairs: int, per_domain: int) -> Store:
    """The same capture to a store and in memory."""
    model = load_model("smollm2")
    dissect(model)
    texts = sentiment(per_domain=per_domain)["text"].tolist()

    numbers = count()

    def to_store() -> None:
        capture(model, texts, SITES, "all", store=folder / f"store{next(numbers)}", progress=False)

    def to_memory() -> None:
        capture(model, texts, SITES, "all", progress=False)

    ratio, ratios = paired(to_store, to_memory, pairs)
    store = Store.open(folder / "store0")
    for number in range(1, next(numbers)):
        shutil.rmtree(folder / f"store{number}")
    record(
        "capture() to a store over the same in memory",
        ratio,
        "<= 1.08",
        ratio <= 1.08,
        "capture() without store=",
        f"n={len(texts)} texts, {store.n_rows} rows at {len(store.sites)} sites, {store.nbytes / 1e6:.0f} MB, "
        f"SmolLM2-135M float32, {torch.get_num_threads()} threads; pairs {ratios}",
    )
    return store


def going_on(folder: Path, per_domain: int) -> None:
    """Processes of their own: the whole, one killed half way and gone on with, and one with nothing left to do."""

    def start(path: Path) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-c", ONE_CAPTURE, str(path), str(per_domain)])

    def whole(path: Path) -> float:
        return timed(lambda: start(path).wait())

    seconds = whole(folder / "whole")
    n_shards = len(read_log(folder / "whole"))
    child = start(folder / "killed")
    while not (folder / "killed").exists() or len(read_log(folder / "killed")) < n_shards // 2:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    n_there = len(read_log(folder / "killed"))
    again = whole(folder / "killed")
    nothing = whole(folder / "killed")
    same = all(
        shard_file(folder / "whole", i).read_bytes() == shard_file(folder / "killed", i).read_bytes()
        for i in range(n_shards)
    )
    ratio = (again - nothing) / seconds
    record(
        "going on after a kill half way, less start-up, over the whole",
        ratio,
        "<= 0.55",
        ratio <= 0.55 and same,
        "the same capture without a kill",
        f"{n_there} of {n_shards} shards there; whole {seconds:.1f} s, gone on {again:.1f} s, start-up {nothing:.1f} s "
        f"(imports, model, dissect, encoding); shards {'equal byte for byte' if same else 'DIFFER'}",
    )


def main() -> None:
    """Run the claims."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per-domain", type=int, default=160, help="texts of each of four domains")
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        throughput(folder, options.pairs)
        reading(beside_memory(folder, options.pairs, options.per_domain), folder, options.pairs)
        going_on(folder, options.per_domain)


if __name__ == "__main__":
    main()

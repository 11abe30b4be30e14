"""Write a capture to a store, shard by shard, so that a kill at any moment costs one shard and the same call goes on.

One process writes at a time (a file lock, which goes with the process). A shard's files are written beside their
places, renamed into them, and counted by one line in the log, in this order, each on the disk before the next.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor
from tqdm.auto import tqdm

from microtome.capture.capture_plan import CapturePlan, Layout
from microtome.capture.estimate import estimate_job
from microtome.capture.job import CaptureJob
from microtome.capture.safetensors_file import FileFacts, write_safetensors
from microtome.capture.sites import Site
from microtome.capture.store import Store
from microtome.capture.store_files import (
    FORMAT,
    LOCK,
    LOG,
    MANIFEST,
    WRITER,
    ShardRecord,
    amiss,
    append_log,
    is_store,
    now,
    read_log,
    read_manifest,
    rewrite_log,
    shard_file,
    table_file,
    write_manifest,
    write_rows,
    writing,
)
from microtome.capture.store_request import environment_of, request_of, require_same
from microtome.data.spoken import spoken_bytes

_ROOM = 2**20  # bytes beside the values: tables, manifest


def write_store(path: Path, job: CaptureJob, plan: CapturePlan, *, progress: bool = True) -> Store:
    """Capture what the store does not hold yet, and open it.

    Raises:
        ValueError: the folder holds a store of another request (the message says what differs), or the disk has not
            enough room.
        FileExistsError: the folder holds something else.
        BlockingIOError: another process writes this store.
        OSError: the disk is full or cannot be written to. What was written stays, and the same call goes on.
        KeyboardInterrupt: stopped by hand; likewise.
    """
    path = path.resolve()
    request = request_of(job, plan)
    if is_store(path):
        require_same(path, read_manifest(path)["request"], request)
        if job.forwards.edits and read_log(path):
            raise ValueError(
                f"{path} was made with edits, which are functions and cannot be compared with today's. Read it with "
                "Store.open, or capture to another folder."
            )
        if len(_whole_shards(path)) == len(plan.shards):
            return Store.open(path)
    elif path.exists():
        _require_unused(path)
    with ExitStack() as lock:
        with _saying_what_failed(path):
            path.mkdir(parents=True, exist_ok=True)
            lock.enter_context(writing(path))
            manifest, records = _begun(path, job, plan, request)
        if missing := [number for number in range(len(plan.shards)) if number not in records]:
            _capture(path, job, plan, manifest, missing, progress)
    job.require_rows(sum(record.rows for record in read_log(path).values()))
    return Store.open(path)


def _whole_shards(path: Path) -> dict[int, ShardRecord]:
    return {number: record for number, record in read_log(path).items() if amiss(path, record) is None}


def _require_unused(path: Path) -> None:
    """Raise unless the folder is empty, or was begun by a capture that was killed before its first shard.

    Raises:
        FileExistsError: it is a file, or holds other files.
        ValueError: it holds a manifest that is damaged or of another format.
    """
    if path.is_dir() and (path / MANIFEST).exists():
        read_manifest(path)
    begun = (LOCK, WRITER, LOG)
    is_other = not path.is_dir() or any(f.name not in begun and not f.name.endswith(".part") for f in path.iterdir())
    if is_other and not is_store(path):  # another process may have begun it since
        raise FileExistsError(f"{path} is there and holds no store, so it is left alone. Give another folder.")


def _begun(
    path: Path, job: CaptureJob, plan: CapturePlan, request: dict[str, Any]
) -> tuple[dict[str, Any], dict[int, ShardRecord]]:
    """The manifest of the store, made if there is none, and its whole shards."""
    if not is_store(path):
        rewrite_log(path, [])
        write_manifest(path, _manifest(job, plan, request))
    manifest = read_manifest(path)
    require_same(path, manifest["request"], request)
    whole = _whole_shards(path)
    rewrite_log(path, whole.values())  # also ends a last line that was cut off
    return manifest, whole


def _manifest(job: CaptureJob, plan: CapturePlan, request: dict[str, Any]) -> dict[str, Any]:
    sites = [
        {"name": str(site), "site": asdict(site), "dtype": str(dtype)[6:], "inner": list(inner)}
        for site, (dtype, inner) in plan.layout.items()
    ]
    return {
        "format": FORMAT,
        "date": now(),
        "request": request,
        "sites": sites,
        "shards": [asdict(shard) for shard in plan.shards],
        "unit": plan.unit,
        "environments": [],
        "differences": {},
        "provenance": job.provenance(plan.texts),
    }


def _capture(
    path: Path, job: CaptureJob, plan: CapturePlan, manifest: dict[str, Any], missing: list[int], progress: bool
) -> None:
    done = plan.tokens - sum(plan.shards[number].tokens for number in missing)
    nbytes = sum(plan.shards[number].rows for number in missing) * plan.row_bytes
    free = shutil.disk_usage(path).free
    if nbytes + _ROOM > free:
        raise ValueError(
            f"{path} needs {spoken_bytes(nbytes)} more; its disk has {spoken_bytes(free)} free. Make room, keep fewer "
            "positions or sites, or pass dtype=torch.float16. What was written stays."
        )
    estimate = estimate_job(job, plan, only_if_long=True, done=done)
    if progress and estimate.is_long:
        goes_on = f", {len(plan.shards) - len(missing)} of them there already" if done else ""
        print(f"capture: {estimate}; {len(plan.shards)} shards{goes_on} in {path}.", file=sys.stderr)
    number = _environment_number(path, manifest, environment_of(job))
    with tqdm(total=plan.tokens, initial=done, unit=plan.unit, desc="capture", disable=not progress) as bar:
        try:
            for shard in missing:
                _capture_shard(path, job, plan, shard, number, bar.update)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"Stopped: {len(read_log(path))} of {len(plan.shards)} shards are in {path}; the same call goes on "
                "from there."
            ) from None


def _capture_shard(
    path: Path, job: CaptureJob, plan: CapturePlan, number: int, environment: int, advance: Callable[[int], object]
) -> None:
    """Run a shard's texts, write its files, count it. A function of its own, so that no two shards are in memory.

    Writing on a second thread while the next shard runs was slower here (1.15 instead of 1.06 of a capture in memory):
    it takes turns on two cores with a model that uses both.
    """
    started = time.perf_counter()
    part = plan.shards[number]
    tokens = 0

    def count(n: int) -> None:
        nonlocal tokens
        tokens += n
        advance(n)

    if not job.has_same_texts(part):
        raise ValueError(
            f"Texts {part.first} to {part.stop - 1} are not those that were planned: they changed while the capture "
            "ran. Whole shards stay; give texts that are the same whenever they are asked for."
        )
    table, tensors = job.run(part.first, part.stop, longest=plan.longest, advance=count)
    with _saying_what_failed(path):
        values, rows = _write_shard(path, number, table, tensors, plan.layout)
        seconds = round(time.perf_counter() - started, 3)
        facts = (values.bytes, values.digest, rows.bytes, rows.digest, environment, seconds, now())
        append_log(path, ShardRecord(number, len(table), tokens, *facts))


def _environment_number(path: Path, manifest: dict[str, Any], facts: dict[str, Any]) -> int:
    """Number of this process's environment in the manifest, which gets it, and what differs, before a shard does."""
    known = manifest["environments"]
    if facts in known:
        return known.index(facts)
    known.append(facts)
    names = [name for name in facts if any(other.get(name) != facts[name] for other in known)]
    manifest["differences"] = {name: [other.get(name) for other in known] for name in names}
    write_manifest(path, manifest)
    return len(known) - 1


def _write_shard(
    path: Path, number: int, table: pd.DataFrame, tensors: dict[Site, Tensor], planned: Layout
) -> tuple[FileFacts, FileFacts]:
    """A shard's two files, on the disk: tensors and row table."""
    layout = {str(site): (dtype, (len(table), *inner)) for site, (dtype, inner) in planned.items()}
    for site, tensor in tensors.items():
        if (found := (tensor.dtype, tuple(tensor.shape))) != layout[str(site)]:
            raise ValueError(
                f"{site} came as {found}; planned was {layout[str(site)]}. The model changed since it was dissected: "
                "dissect(model, again=True)."
            )
    facts = write_safetensors(shard_file(path, number), layout, (tensor.cpu() for tensor in tensors.values()))
    rows = write_rows(table_file(path, number), table)
    _sync_folder(path)
    return facts, rows


def _sync_folder(path: Path) -> None:
    """Renames reach the disk before what comes next."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _saying_what_failed(path: Path) -> Iterator[None]:
    """The system's errors of writing, with the folder and what to do."""
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno is None or (error.filename is None and error.strerror is None):
            raise
        raise type(error)(
            error.errno,
            f"{error.strerror}: {path} could not be written. Make room, or give a folder that can be written to; whole "
            "shards stay, and the same call goes on from there",
        ) from error

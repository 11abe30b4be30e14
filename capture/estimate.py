"""What a capture will take: rows and bytes exactly, time from a calibration batch run on the model itself.

    seconds = tokens of all texts / (tokens of the batch / seconds of its second run)

The batch holds the first texts, some 512 tokens on a CPU and a full batch on a GPU; its first run warms up and does not
count. Beware: texts much longer than those cost more per token, and a machine that others use is slower at other times.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from microtome.capture.capture_plan import CapturePlan
from microtome.capture.job import CaptureJob
from microtome.capture.kept_positions import KeptPositions
from microtome.capture.ready_inputs import ReadyInputs
from microtome.data.free_memory import free_memory
from microtome.data.spoken import spoken_bytes, spoken_seconds

_CPU_TOKENS = 512
_ROUGH_TOKENS = 64
_LONG_SECONDS, _LONG_BYTES = 60, 10**9
_SHORT_TOKENS = 4096  # so few tokens are not worth a calibration


@dataclass(frozen=True)
class Estimate:
    """What a capture will take; `str` says it in a line.

    Attributes:
        texts, tokens, rows, sites: how many of each (tokens are inputs for images and sounds).
        nbytes: bytes of all kept values.
        seconds: estimated time; None where nothing was timed.
        tokens_per_second: measured on the calibration batch.
    """

    texts: int
    tokens: int
    rows: int
    sites: int
    nbytes: int
    seconds: float | None
    tokens_per_second: float | None

    @property
    def is_long(self) -> bool:
        """Over a minute, or over a gigabyte."""
        return (self.seconds or 0) > _LONG_SECONDS or self.nbytes > _LONG_BYTES

    def require_memory(self, device: torch.device) -> None:
        """Raise ValueError if the values cannot fit into what memory is free (on the CPU, where that is known)."""
        free = free_memory() if device.type == "cpu" else None
        if free is not None and self.nbytes > free:
            raise ValueError(
                f"{self.rows:,} rows at {self.sites} sites are {spoken_bytes(self.nbytes)}; {spoken_bytes(free)} of "
                "memory are free. Pass store=PATH to write them to disk, or keep fewer positions or sites, or dtype="
                "torch.float16."
            )

    def __str__(self) -> str:
        said = f"{self.texts:,} texts, {self.tokens:,} tokens; {self.rows:,} rows at {self.sites} sites, "
        said += spoken_bytes(self.nbytes)
        if self.seconds is None:
            return said
        return f"{said}; about {spoken_seconds(self.seconds)} at {self.tokens_per_second:,.0f} tokens/s"


def estimate_job(job: CaptureJob, plan: CapturePlan, *, only_if_long: bool = False, done: int = 0) -> Estimate:
    """The estimate of a planned capture.

    Args:
        only_if_long: leave the calibration out if a few tokens already tell that it takes less than a minute.
        done: tokens that need not run again.
    """
    rate = None
    if not isinstance(job.source, ReadyInputs) and not (only_if_long and plan.tokens < _SHORT_TOKENS):
        is_cpu = job.forwards.home.type == "cpu"
        if only_if_long:
            rate = _tokens_per_second(job, _ROUGH_TOKENS, runs=1)
        if rate is None or (plan.tokens - done) / rate > _LONG_SECONDS:
            rate = _tokens_per_second(job, _CPU_TOKENS if is_cpu else job.forwards.max_tokens, runs=2)
    seconds = None if rate is None else (plan.tokens - done) / rate
    return Estimate(job.n_texts, plan.tokens, plan.rows, len(plan.layout), plan.nbytes, seconds, rate)


def _tokens_per_second(job: CaptureJob, n_tokens: int, *, runs: int) -> float:
    """Speed of the last of some runs of the first texts."""
    stop = min(job.n_texts, 64)
    encoded = job.source.encode(0, stop)
    rows, tokens = [], 0
    for row in encoded.rows:
        rows.append(row)
        tokens += row.length
        if tokens >= n_tokens:
            break
    plain = replace(job, forwards=replace(job.forwards, edits={}))
    if job.generation is not None:  # a few steps of it, whose tokens then are those that count
        return _generating_speed(plain, len(rows), runs)
    kept = _of_first(plain.kept_of(encoded, 0), len(rows))
    longest = max(encoded.lengths)
    return tokens / _last_seconds(
        lambda: plain.forwards.texts(rows, kept, longest=longest, name_row=lambda row: f"kept row {row}"),
        plain.forwards.home,
        runs,
    )


def _generating_speed(job: CaptureJob, n_rows: int, runs: int) -> float:
    """Tokens per second, prompts included, of the first texts going on for a few tokens."""
    few = replace(job, generation=replace(job.generation, max_new_tokens=min(8, job.generation.max_new_tokens)))
    tokens = 0

    def count(n: int) -> None:
        nonlocal tokens
        tokens += n

    def run() -> None:
        nonlocal tokens
        tokens = 0
        few.run(0, n_rows, longest=None, advance=count)

    seconds = _last_seconds(run, job.forwards.home, runs)
    return tokens / seconds


def _last_seconds(run: Callable[[], object], device: torch.device, runs: int) -> float:
    seconds = 1.0
    for _ in range(runs):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
    return seconds


def _of_first(kept: KeptPositions, n_texts: int) -> KeptPositions:
    chosen = kept.text < n_texts
    n_tokens = int(kept.size[chosen].sum())
    return KeptPositions(
        kept.text[chosen],
        kept.position[chosen],
        kept.size[chosen],
        kept.span[chosen],
        kept.tokens[:n_tokens],
        kept.lengths[:n_texts],
    )
